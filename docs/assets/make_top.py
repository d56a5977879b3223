"""Makes docs/assets/top.png: what `actorrpc top` shows of a world that runs. `python docs/assets/make_top.py [PATH]`.

It starts a world of seven processes, looks into it as `actorrpc top` does, and has a browser (chromium) draw the screen
that rich makes of it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import actorrpc as rpc
from actorrpc.commands.top import drawn
from actorrpc.commands.watching import Watcher, lines_of

SECONDS = 90
WIDTH = 118
LOOKS = 5


class Observer(rpc.Actor):
    """Plays, and asks the learner what to do."""

    def play(self, learner: rpc.RRef[Learner], replay: rpc.RRef[Replay], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(4):
                learner.rpc_sync().act(torch.randn(64))
                time.sleep(0.004 * (1 + self.index))
            replay.tell().add(torch.randn(4, 2000))


class Replay(rpc.Actor):
    """Keeps what was played; slowly, so that its mailbox fills."""

    def add(self, steps: torch.Tensor) -> None:
        time.sleep(0.012)


class Learner(rpc.Actor):
    """Says what to do."""

    def act(self, state: torch.Tensor) -> int:
        return int(state.sum() > 0)

    def main(self) -> None:
        replay = self.world.replay[0]
        for future in [one.rpc_async(timeout=0).play(self.rref, replay, SECONDS) for one in self.world.observer]:
            future.wait()


def run_world() -> None:
    rpc.launch(learner=Learner, replay=Replay, observer=rpc.Role(Observer, 5))


def draw(address: str, path: Path) -> None:
    """Looks into a world, and draws the last of some looks."""
    from rich.console import Console

    with rpc.attach(address, timeout=60) as world:
        watcher = Watcher(world._session, 5.0)
        for _ in range(LOOKS):
            shot = watcher.look()
            watcher.pause(1.0)
        lines = lines_of(watcher.look(), address, WIDTH, 30, foot="every 1 s; Ctrl-C ends")
    assert shot.world.workers, "nobody answered"
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        console.print(drawn(lines))
        svg = console.export_svg(title="actorrpc top")
    sizes = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert sizes is not None
    width, height = (round(float(size)) for size in sizes.groups())
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "top.html")
        page.write_text(f"<body style='margin:0;background:#fff'>{svg}</body>")
        browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        assert browser is not None, "this needs chromium"
        subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                f"--user-data-dir={folder}/profile", f"--window-size={width},{height}", f"--screenshot={path}",
                page.as_uri(),
            ],
            check=True, timeout=120, stderr=subprocess.DEVNULL,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", type=Path, default=Path(__file__).with_name("top.png"))
    parser.add_argument("--world", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.world:
        run_world()
        return
    with tempfile.TemporaryDirectory() as folder:  # other worlds of this host are not to be seen
        world = subprocess.Popen([sys.executable, __file__, "--world"], env={**os.environ, "TMPDIR": folder})
        try:
            end = time.monotonic() + 100
            while not (stores := list(Path(folder).glob("actorrpc-*/store"))):
                assert time.monotonic() < end, "the world does not begin"
                time.sleep(0.2)
            draw(stores[0].as_uri(), options.path.resolve())
        finally:
            world.terminate()
            world.wait(30)


if __name__ == "__main__":
    main()
