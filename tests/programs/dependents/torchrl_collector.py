"""TorchRL's RPC collector: two remote collectors, whose policy's weights are updated between batches."""

from __future__ import annotations

import argparse
import warnings

import torch
import torch.distributed.rpc as rpc
from tensordict import TensorDict, TensorDictBase
from torch import nn

warnings.filterwarnings("ignore")

from tensordict.nn import TensorDictModule  # noqa: E402
from torchrl.collectors.distributed import RPCCollector  # noqa: E402
from torchrl.data import Bounded, Composite, Unbounded  # noqa: E402
from torchrl.envs import EnvBase  # noqa: E402


class Walk(EnvBase):
    """A point moves by what the policy says; an episode is ten steps long."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(position=Unbounded(shape=(1,)))
        self.action_spec = Bounded(-10.0, 10.0, shape=(1,))
        self.reward_spec = Unbounded(shape=(1,))

    def _reset(self, tensordict: TensorDictBase | None, **_: object) -> TensorDictBase:
        self.steps, self.position = 0, torch.ones(1)
        return self.now()

    def now(self) -> TensorDictBase:
        done = torch.tensor([self.steps == 10])
        return TensorDict({"position": self.position.clone(), "done": done, "terminated": done.clone()})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps += 1
        self.position = self.position + tensordict["action"]
        return self.now().set("reward", -self.position.abs())

    def _set_seed(self, seed: int | None) -> None:
        pass


def main(port: str) -> None:
    print("library", rpc.init_rpc.__module__, flush=True)
    linear = nn.Linear(1, 1)
    policy = TensorDictModule(linear, in_keys=["position"], out_keys=["action"])
    with torch.no_grad():
        linear.weight.fill_(0.0)
        linear.bias.fill_(0.5)
    collector = RPCCollector(
        [Walk, Walk], policy, frames_per_batch=20, total_frames=80, sync=True, launcher="mp", tcp_port=port
    )
    try:
        for number, batch in enumerate(collector):
            assert batch.shape == (20,)
            print(f"result batch{number}={batch['next', 'position'].flatten().tolist()}", flush=True)
            with torch.no_grad():
                linear.bias.add_(0.25)
            collector.update_policy_weights_()
    finally:
        collector.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", default="29500")
    main(parser.parse_args().port)
