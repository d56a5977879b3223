"""PyTorch Geometric's distributed neighbour loader: two processes, each with half of a graph.

The loader samples with operators of pyg-lib, which is not in the package index; those it needs are written here in
Python, for neighbourhoods that are taken whole.
"""

from __future__ import annotations

import argparse
import os
import warnings

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor

warnings.filterwarnings("ignore", message=".*pyg-lib.*")

from torch_geometric.distributed import (  # noqa: E402
    DistContext,
    DistNeighborLoader,
    LocalFeatureStore,
    LocalGraphStore,
)
from torch_geometric.distributed.rpc import rpc_is_initialized  # noqa: E402

NODES, PARTS = 24, 2

pyg = torch.library.Library("pyg", "DEF")
pyg.define(
    "dist_neighbor_sample(Tensor colptr, Tensor row, Tensor seed, int number, Tensor? node_time, Tensor? edge_time, "
    "Tensor? seed_time, Tensor? weight, bool csc, bool replace, bool directed, bool disjoint, str strategy) "
    "-> (Tensor, Tensor, int[])"
)
pyg.define(
    "merge_sampler_outputs(Tensor[] nodes, Tensor[] edges, int[][] ends, int[] parts, int[] orders, int all_parts, "
    "int number, Tensor? batch, bool disjoint) -> (Tensor, Tensor, Tensor?, int[])"
)
pyg.define(
    "relabel_neighborhood(Tensor seed, Tensor sampled, int[] counts, int nodes, Tensor? batch, bool csc, bool alone) "
    "-> (Tensor, Tensor)"
)


def sample(colptr: Tensor, row: Tensor, seed: Tensor, number: int, *_: object) -> tuple[Tensor, Tensor, list[int]]:
    assert number == -1
    edges = [torch.arange(int(colptr[node]), int(colptr[node + 1])) for node in seed.tolist()]
    ends = [len(seed)]
    for found in edges:
        ends.append(ends[-1] + len(found))
    return torch.cat([seed, row[torch.cat(edges)]]), torch.cat(edges), ends


def merge(
    nodes: list[Tensor], edges: list[Tensor], ends: list[list[int]], parts: list[int], orders: list[int], *_: object
) -> tuple[Tensor, Tensor, None, list[int]]:
    spans = [(part, ends[part][order], ends[part][order + 1]) for part, order in zip(parts, orders, strict=True)]
    merged_nodes = torch.cat([nodes[part][begin:end] for part, begin, end in spans])
    merged_edges = torch.cat([edges[part][begin - ends[part][0] : end - ends[part][0]] for part, begin, end in spans])
    return merged_nodes, merged_edges, None, [end - begin for _, begin, end in spans]


def relabel(seed: Tensor, sampled: Tensor, counts: list[int], *_: object) -> tuple[Tensor, Tensor]:
    places = {node: place for place, node in enumerate(dict.fromkeys([*seed.tolist(), *sampled.tolist()]))}
    row = torch.tensor([places[node] for node in sampled.tolist()])
    return row, torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


for name, function in (
    ("dist_neighbor_sample", sample),
    ("merge_sampler_outputs", merge),
    ("relabel_neighborhood", relabel),
):
    pyg.impl(name, function, "CompositeExplicitAutograd")


def partition(rank: int) -> tuple[LocalFeatureStore, LocalGraphStore]:
    """A ring with chords; a node of odd number belongs to rank 1, and the edges that lead to it as well."""
    target = torch.arange(NODES).repeat(2)
    source = torch.cat([torch.arange(1, NODES + 1), torch.arange(NODES) * 5]) % NODES
    mine = target % PARTS == rank
    edge_id = torch.arange(2 * NODES)
    graph = LocalGraphStore.from_data(edge_id[mine], torch.stack([source, target])[:, mine], num_nodes=NODES)
    node_id = torch.arange(rank, NODES, PARTS)
    features = LocalFeatureStore.from_data(
        node_id, x=torch.stack([node_id, node_id**2], dim=1).float(), y=node_id.remainder(3)
    )
    for store in (graph, features):
        store.num_partitions, store.partition_idx = PARTS, rank
    graph.node_pb = features.node_feat_pb = torch.arange(NODES) % PARTS
    graph.edge_pb = features.edge_feat_pb = target % PARTS
    graph.meta = features.meta = {"num_parts": PARTS, "is_hetero": False, "node_types": None, "edge_types": None}
    features.labels = torch.arange(NODES).remainder(3)
    return features, graph


def run(rank: int, port: str, workers: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", port
    dist.init_process_group("gloo", rank=rank, world_size=PARTS)
    features, graph = partition(rank)
    loader = DistNeighborLoader(
        (features, graph),
        num_neighbors=[-1, -1],
        master_addr="localhost",
        master_port=int(port) + 1,
        current_ctx=DistContext(rank, rank, PARTS, PARTS, "loader"),
        input_nodes=torch.arange(rank, NODES, PARTS),
        batch_size=4,
        num_workers=workers,
        concurrency=1,
        async_sampling=False,
        filter_per_worker=True,
    )
    if rank == 0:
        print("library", rpc.init_rpc.__module__, flush=True)
    print(f"result in the world of rank {rank}={rpc_is_initialized()}", flush=True)
    for number, batch in enumerate(loader):
        assert torch.equal(batch.x[:, 0], batch.n_id.float()), "features belong to other nodes"
        assert torch.equal(batch.y, batch.n_id.remainder(3)), "labels belong to other nodes"
        edges = batch.n_id[batch.edge_index]
        checksum = int((edges[0] * 31 + edges[1]).sum())
        found = [*batch.n_id.tolist(), edges.shape[1], checksum, batch.x.sum().item()]
        print(f"result batch {number} of rank {rank}={found}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", default="29500")
    parser.add_argument("--workers", type=int, default=0, help="processes of each loader that sample; 0: itself")
    options = parser.parse_args()
    mp.spawn(run, args=(options.port, options.workers), nprocs=PARTS)
