"""Runs PyTorch's own RPC tests, as they are shipped in the torch wheel, on torch or on the stand-in.

    python -m tests.conformance.suite list
    python -m tests.conformance.suite run [--target torch|actorrpc] [-k TEXT] [--names FILE] [--out FILE] [--logs DIR]

torch is imported once; every test is forked from there, and forks its four ranks, so that it takes half a second.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import re
import select
import signal
import sys
import time
import unittest
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; four ranks share the machine
os.environ.setdefault("TORCH_DIST_INIT_BARRIER", "1")
"""Else some tests race with themselves, under torch as well (docs/conformance.md)."""

NAMES = Path(__file__).parent / "names.txt"
"""The names that are expected to pass, one a line."""
PREFIX = "Peer"

Classes = dict[str, type[unittest.TestCase]]


class Outcome(NamedTuple):
    """What one test came to.

    Attributes:
        name: the test's.
        word: "pass", "skip", "fail", "crash" or "hang".
        seconds: how long it took.
        text: all that it wrote.
    """

    name: str
    word: str
    seconds: float
    text: str

    def __str__(self) -> str:
        return f"{self.name} {self.word} {self.seconds:.1f} {self.reason()}".rstrip()

    def reason(self) -> str:
        """Returns the line that says what went wrong."""
        if self.word not in ("fail", "crash"):
            return ""
        lines = [line.strip() for line in self.text.splitlines()]
        errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Failure|Interrupt)\b.*:", line)]
        first = [line for line in errors if not line.startswith("RuntimeError: Process")] or errors
        return first[0][:160] if first else ""


def build(target: str) -> Classes:
    """Makes the test classes, which must then be globals of this module."""
    if target == "actorrpc":
        import actorrpc.compat

        actorrpc.compat.install()
    import torch.multiprocessing as mp
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import rpc_utils
    from torch.testing._internal.distributed.rpc import tensorpipe_rpc_agent_test_fixture as fixture

    def fork_ranks(self: Any) -> None:
        self._start_processes(mp.get_context("fork").Process)

    common: Any = common_distributed
    common.MultiProcessTestCase._spawn_processes = fork_ranks
    utils: Any = rpc_utils
    tests = utils.GENERIC_TESTS + utils.TENSORPIPE_TESTS
    made: Classes = utils.generate_tests(PREFIX, fixture.TensorPipeRpcAgentTestFixture, tests, __name__)
    return made


def names_of(classes: Classes) -> list[str]:
    """Returns the names of all tests, without the prefix of their classes."""
    loader = unittest.TestLoader()
    return [
        f"{class_name.removeprefix(PREFIX)}.{test}"
        for class_name, kind in classes.items()
        for test in loader.getTestCaseNames(kind)
    ]


def read_names(path: Path) -> list[str]:
    """Returns the first word of each line that is neither empty nor a comment."""
    return [line.split()[0] for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]


def run_one(classes: Classes, name: str, seconds: float) -> Outcome:
    """Runs a test in a process, and process group, of its own, which end with it."""
    begun = time.monotonic()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            _run_here(classes, name, writer)
        finally:
            os._exit(1)
    os.close(writer)
    text, word = b"", ""
    while not word and time.monotonic() < begun + seconds:
        if select.select([reader], [], [], 0.2)[0]:
            piece = os.read(reader, 65536)
            text += piece
            found = re.search(rb"\nRESULT (\w+)", text)
            word = found.group(1).decode() if found else "" if piece else "crash"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reader)
    return Outcome(name, word or "hang", time.monotonic() - begun, text.decode(errors="replace"))


def _run_here(classes: Classes, name: str, out: int) -> None:
    os.setsid()
    os.dup2(out, 1)
    os.dup2(out, 2)
    class_name, test = name.split(".")
    suite = unittest.TestSuite([classes[PREFIX + class_name](test)])
    result = unittest.TextTestRunner(verbosity=0).run(suite)
    word = "skip" if result.skipped else "pass" if result.wasSuccessful() else "fail"
    os.write(1, f"\nRESULT {word}\n".encode())
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["list", "run"])
    parser.add_argument("--target", default="actorrpc", choices=["torch", "actorrpc"])
    parser.add_argument("-k", default="", metavar="TEXT", help="only names that contain it")
    parser.add_argument("--names", type=Path, help="a file with a test's name a line; default: all tests")
    parser.add_argument("--out", type=Path, help="append a line for each test: NAME RESULT SECONDS REASON")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep there what tests that do not pass wrote")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for each test")
    options = parser.parse_args()
    classes = build(options.target)
    globals().update(classes)  # pickle looks for them here
    names = [name for name in (read_names(options.names) if options.names else names_of(classes)) if options.k in name]
    if options.command == "list":
        print("\n".join(names))
        return
    counts: collections.Counter[str] = collections.Counter()
    for number, name in enumerate(names, 1):
        outcome = run_one(classes, name, options.timeout)
        counts[outcome.word] += 1
        print(f"[{number}/{len(names)}] {outcome}", flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(f"{outcome}\n")
        if options.logs and outcome.word not in ("pass", "skip"):
            options.logs.mkdir(parents=True, exist_ok=True)
            (options.logs / f"{name}.log").write_text(outcome.text)
    print(f"{counts['pass']} of {len(names) - counts['skip']} pass; {dict(counts)}")
    sys.exit(0 if set(counts) <= {"pass", "skip"} else 1)


if __name__ == "__main__":
    main()
