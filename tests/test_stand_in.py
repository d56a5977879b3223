"""The stand-in in one process: what cannot be undone in the process of the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch.distributed.rpc as rpc
from torch._C import _distributed_rpc as private


class Own(Exception):
    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


def fail(kind, *args):
    raise kind(*args)


def caught(call):
    try:
        call()
    except Exception as error:
        return error


assert private.PyRRef is rpc.RRef
assert not private._is_current_rpc_agent_set()
options = rpc.TensorPipeRpcBackendOptions(init_method="file://" + MEET)
rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
assert private._is_current_rpc_agent_set()
for kind, args, shown in (
    (KeyError, ("a",), "'a'"),
    (Own, (7, "broken"), "broken"),
    (FileNotFoundError, (2, "gone", "x.txt"), "[Errno 2] gone: 'x.txt'"),
    (StopIteration, (5,), "5"),
):
    for call in (
        lambda: rpc.rpc_sync("alone", fail, (kind, *args)),
        lambda: rpc.rpc_async("alone", fail, (kind, *args)).wait(),
        lambda: rpc.rpc_async("alone", rpc.rpc_sync, ("alone", fail, (kind, *args))).wait(),
    ):
        error = caught(call)
        assert isinstance(error, kind) and isinstance(error, RuntimeError), repr(error)
        assert type(error).__name__ == kind.__name__ and str(error) == shown, repr(error)
        assert "in fail" in str(error.__cause__), error.__cause__
assert caught(lambda: rpc.rpc_sync("alone", fail, (Own, 7, "broken"))).code == 7
for kind in (ValueError, TypeError):
    assert type(caught(lambda: rpc.rpc_sync("alone", fail, (kind, "no")))) is kind
futures = [rpc.rpc_async("alone", fail, (KeyError, "b"))]
import torch
assert type(caught(lambda: torch.futures.wait_all(futures))).__name__ == "KeyError"
assert isinstance(caught(lambda: torch.futures.wait_all(futures)), RuntimeError)
rpc.shutdown()
print("all true")
"""


def test_errors_are_of_torchs_kind_as_well_and_private_names_are_ours(meet: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"MEET = {meet.removeprefix('file://')!r}\n{PROGRAM}")
    done = subprocess.run(
        [sys.executable, "-m", "actorrpc", "run", str(program)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "all true\n"), done.stderr
