"""Makes docs/assets/trace.png: records a step of a small world, and draws the file as trace viewers do.

    python docs/assets/make_trace.py [TRACE]

With TRACE, draws that file. It needs matplotlib. (It draws all arrows between calls, which viewers do only for what is
selected; make_viewer.py has a picture of a viewer.)
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import nn

import actorrpc as rpc
from actorrpc import autograd as dist_autograd

PICTURE = Path(__file__).parent / "trace.png"
COLOURS = {"call": "#4c78a8", "serve": "#72b7b2", "part": "#c9d6e4", "backward": "#e45756", "cpu_op": "#f2cf5b"}
MEANINGS = [
    "a call, at its caller",
    "a call, at its callee",
    "write, send, read",
    "a backward pass",
    "torch's operators",
]
WIDTH = 12.8

Event = dict[str, Any]


class Observer(rpc.Actor):
    """Holds one layer, and asks the agent once on its way."""

    def __init__(self) -> None:
        torch.manual_seed(self.index)
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, agent: rpc.RRef[Any]) -> torch.Tensor:
        hidden = self.layer(x).relu()
        scaled: torch.Tensor = hidden * agent.rpc_sync().scale(self.index)
        return scaled


class Agent(rpc.Actor):
    """Has one step recorded: a call of each observer and a backward pass."""

    def scale(self, index: int) -> float:
        return 1.0 + index

    def step(self) -> None:
        x = torch.randn(256, 64)
        with dist_autograd.context() as context_id:
            futures = [ref.rpc_async().forward(x, self.rref) for ref in self.world.observer]
            loss = torch.stack([future.wait() for future in futures]).square().mean()
            dist_autograd.backward(context_id, [loss])

    def main(self) -> None:
        for _ in range(5):
            self.step()
        with rpc.profiler.profile_world(os.environ["TRACE_FILE"]) as profile:
            self.step()
        print(profile)


class Track:
    """The slices of one thread, in layers.

    Arguments:
        name: what stands before it.
        slices: by beginning, the outer ones first.
    """

    def __init__(self, name: str, slices: list[Event]) -> None:
        self.name, self.slices = name, sorted(slices, key=lambda e: (e["ts"], -e["dur"]))
        ends: list[float] = []
        for one in self.slices:
            while ends and ends[-1] <= one["ts"] + 0.01:
                ends.pop()
            one["layer"] = len(ends)
            ends.append(one["ts"] + one["dur"])
        self.height = 1 + max(one["layer"] for one in self.slices)
        self.top = 0.0

    def layer_at(self, time: float) -> int:
        """Returns the innermost layer at a time."""
        inside = [e["layer"] for e in self.slices if e["ts"] - 0.01 <= time <= e["ts"] + e["dur"] + 0.01]
        return max(inside, default=0)


def tracks_of(events: list[Event]) -> dict[tuple[int, int], Track]:
    """Returns the threads' tracks, by process and thread, in the order in which viewers have them."""
    workers = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    places = sorted({(e["pid"], e["tid"]) for e in events if e["ph"] == "X" and e["cat"] in COLOURS})
    tracks = {}
    for pid, tid in places:
        slices = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid) and e["cat"] in COLOURS]
        tracks[pid, tid] = Track(f"{workers[pid]}\n{threads[pid, tid].removeprefix(workers[pid] + '-')}", slices)
    return tracks


def draw(trace: str) -> None:
    """Draws a trace."""
    events = json.loads(Path(trace).read_text())["traceEvents"]
    tracks = tracks_of(events)
    first = min(e["ts"] for track in tracks.values() for e in track.slices)
    last = max(e["ts"] + e["dur"] for track in tracks.values() for e in track.slices)
    total, at = (last - first) / 1000, 0.0
    for track in tracks.values():
        track.top = at
        at += track.height + 0.6
    figure, axes = plt.subplots(figsize=(WIDTH, 1 + 0.2 * at), layout="constrained")
    character = total / 150
    for track in tracks.values():
        for one in track.slices:
            x, width, y = (one["ts"] - first) / 1000, one["dur"] / 1000, track.top + one["layer"]
            axes.add_patch(Rectangle((x, y), width, 0.9, facecolor=COLOURS[one["cat"]], edgecolor="white", lw=0.3))
            if (room := int(width / character)) >= 5:
                name = one["name"] if len(one["name"]) <= room else one["name"][: room - 2] + ".."
                axes.text(x + character / 3, y + 0.5, name, fontsize=6, va="center", clip_on=True)
    begins: dict[str, Event] = {e["id"]: e for e in events if e["ph"] == "s" and e["cat"] == "call"}
    for end in (e for e in events if e["ph"] == "f" and e["cat"] == "call" and e["id"] in begins):
        points = []
        for event in (begins[end["id"]], end):
            track = tracks[event["pid"], event["tid"]]
            points.append(((event["ts"] - first) / 1000, track.top + track.layer_at(event["ts"]) + 0.45))
        axes.add_patch(FancyArrowPatch(*points, arrowstyle="-|>", mutation_scale=6, lw=0.7, color="#333333", zorder=3))
    kinds = [Rectangle((0, 0), 1, 1, facecolor=colour) for colour in COLOURS.values()]
    axes.legend(kinds, MEANINGS, fontsize=7, loc="lower left", frameon=False)
    axes.set_xlim(0, total)
    axes.set_ylim(at, -0.3)
    axes.set_yticks([t.top + t.height / 2 for t in tracks.values()], [t.name for t in tracks.values()], fontsize=7)
    axes.set_xlabel("milliseconds")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False, labelsize=7)
    axes.set_title("One step of an agent and two observers, as actorrpc.profiler.profile_world records it", fontsize=9)
    figure.savefig(PICTURE, dpi=100)
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        draw(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TRACE_FILE"] = f"{folder}/trace.json"
            rpc.launch(agent=Agent, observer=rpc.Role(Observer, 2))
            draw(os.environ["TRACE_FILE"])
