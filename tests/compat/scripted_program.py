"""A program for torch.distributed.rpc, written for it alone: `test_scripted.py` runs it under the stand-in.

Its first worker runs all functions that are called `check_...`, and prints what has become of them.
"""

# mypy: ignore-errors
# It is written as programs for torch.distributed.rpc are, which has no types.

import gc
import json
import os
import socket
import threading
import time
import traceback

import pytest
import scripted_parts as parts
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.nn import RemoteModule
from torch.distributed.nn.api.remote_module import _REMOTE_MODULE_PICKLED_ATTRIBUTES, _RemoteModule

HERE, OTHER, THIRD = "worker0", "worker1", "worker2"
ONES = torch.ones(2)


@torch.jit.script
def of_the_main_module(to: str, x: Tensor) -> Tensor:
    return rpc.rpc_sync(to, parts.script_add, (x, x))


def check_what_makes_no_calls_stays_compiled() -> None:
    for function in (parts.script_add, parts.mentions, parts.refuses):
        assert isinstance(function, torch.jit.ScriptFunction)
    assert isinstance(torch.jit.script(nn.Linear(2, 2)), torch.jit.ScriptModule)


def check_a_compiled_function_that_answers_later() -> None:
    for to in (OTHER, HERE):
        args = (THIRD, ONES, torch.ones(1))
        assert rpc.rpc_sync(to, parts.async_add, args=args).tolist() == [2, 2]
        assert rpc.rpc_async(to, parts.async_add, args=args).wait().tolist() == [2, 2]
        assert rpc.remote(to, parts.async_add, args=args).to_here().tolist() == [2, 2]


def check_compiled_functions_that_call_others() -> None:
    for to in (OTHER, HERE):
        assert parts.compiled(to, ONES).tolist() == [2, 2]
        assert parts.calls_a_compiled_one(to, ONES).tolist() == [3, 3]
        assert parts.calls_a_plain_one(to, ONES, 3).tolist() == [8, 8]
        assert parts.forks_a_plain_one(to, ONES).tolist() == [2, 2]
        assert parts.makes_one_there(to, ONES).tolist() == [2, 2]
        assert parts.sends_a_compiled_one(to, THIRD, ONES).tolist() == [3, 3]


def check_compiled_functions_go_to_other_workers_by_name() -> None:
    for to in (OTHER, HERE):
        assert rpc.rpc_sync(to, parts.calls_a_compiled_one, args=(THIRD, ONES)).tolist() == [3, 3]
        assert rpc.rpc_sync(to, parts.calls_a_plain_one, args=(THIRD, ONES, 2)).tolist() == [4, 4]
        assert rpc.rpc_sync(to, of_the_main_module, args=(THIRD, ONES)).tolist() == [2, 2]
        assert rpc.rpc_sync(to, parts.sends_a_compiled_one, args=(HERE, THIRD, ONES)).tolist() == [3, 3]


def check_a_function_of_this_function_is_compiled_too() -> None:
    def call(to: str, x: Tensor) -> Tensor:
        return rpc.rpc_sync(to, parts.script_add, (x, x))

    assert torch.jit.script(call)(OTHER, ONES).tolist() == [2, 2]


def check_compiled_functions_take_references() -> None:
    refs = [rpc.remote(to, torch.add, args=(torch.ones(1), n)) for n, to in enumerate((HERE, OTHER, THIRD))]
    assert parts.reads(refs[1], ONES).tolist() == [3, 3]
    assert parts.reads_all(refs).tolist() == [6]
    for to in (OTHER, HERE):
        assert rpc.rpc_sync(to, parts.reads, args=(refs[2], ONES)).tolist() == [4, 4]
        assert rpc.rpc_sync(to, parts.reads_all, args=(refs,)).tolist() == [6]


def check_compiled_functions_take_part_in_gradients() -> None:
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        loss = parts.calls_a_compiled_one(OTHER, x).sum()
        parts.passes_back(context_id, loss)
        assert parts.gradient_of(context_id, x).tolist() == [2, 2]


def check_a_compiled_module_that_makes_calls_is_the_module() -> None:
    model = torch.jit.script(parts.Model())
    assert model(OTHER, ONES).tolist() == [6, 6]
    assert rpc.rpc_sync(OTHER, model, args=(THIRD, ONES)).tolist() == [6, 6]
    reads = torch.jit.script(parts.Reads(rpc.remote(OTHER, torch.add, args=(ONES, 1))))
    assert reads(ONES).tolist() == [3, 3]
    holds = torch.jit.script(parts.Holds())
    assert holds.part.other(OTHER, holds(ONES)).tolist() == [4, 4]
    with pytest.raises(RuntimeError, match="undefined value"):
        torch.jit.script(Wrong())


class Wrong(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return undefined_name(x)  # noqa: F821


def check_the_error_of_a_compiled_function_is_a_runtime_error() -> None:
    for to in (OTHER, HERE):
        with pytest.raises(RuntimeError, match="not today"):
            rpc.rpc_sync(to, parts.refuses, (ONES,))
        with pytest.raises(RuntimeError, match="not today"):
            rpc.remote(to, parts.refuses, (ONES,)).to_here()


# -- RemoteModule


@torch.jit.interface
class Interface:
    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        pass


class Times(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        return x * self.factor * times


@torch.jit.script
def runs(module: Interface, x: Tensor) -> Tensor:
    return module.forward(x, 3)


def check_compiled_functions_run_remote_modules() -> None:
    for owner in (OTHER, HERE):
        remote = _RemoteModule(owner, Times, (5.0,), _module_interface_cls=Interface)
        assert (remote.is_scriptable, isinstance(remote, nn.Module)) == (True, True)
        assert remote(ONES).tolist() == [10, 10]
        assert runs(torch.jit.script(remote), ONES).tolist() == [15, 15]
        again = RemoteModule.init_from_module_rref(THIRD, remote.get_module_rref(), Interface)
        assert runs(torch.jit.script(again), ONES).tolist() == [15, 15]


def attributes(module):
    return module.__dict__


def made_part_of_another(module, x):
    model = nn.Sequential(module, nn.Identity())
    module.eval()
    module.bias = nn.Identity()
    assert not model.training or list(model.parameters()) == []
    return model(x), list(module.__dict__["_modules"])


def check_a_remote_module_that_was_sent_has_torchs_attributes() -> None:
    remote = RemoteModule(OTHER, Times, kwargs={"factor": 4.0})
    assert isinstance(remote, _RemoteModule)
    remote.new = 1
    for to in (THIRD, OTHER):
        found = rpc.rpc_sync(to, attributes, args=(remote,))
        assert list(found) == [*_REMOTE_MODULE_PICKLED_ATTRIBUTES, "forward_async", "forward"]
        assert (found["on"], found["device"], found["is_scriptable"]) == (OTHER, "cpu", False)
        assert found["forward"](ONES, times=1).tolist() == [4, 4]
        assert rpc.rpc_sync(to, made_part_of_another, args=(remote, ONES))[0].tolist() == [8, 8]
        assert rpc.rpc_sync(to, made_part_of_another, args=(remote, ONES))[1] == ["bias"]


class Louder(RemoteModule):
    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.local = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 100


def check_a_subclass_of_remote_module_keeps_its_own_forward() -> None:
    remote = Louder(OTHER, Times)
    assert remote(ONES).tolist() == [102, 102]
    assert remote.local(ONES).shape == (2,)
    assert rpc.rpc_sync(THIRD, remote.__class__.__call__, args=(remote, ONES)).tolist() == [102, 102]


def owned() -> int:
    return int(rpc._rref_context_get_debug_info()["num_owner_rrefs"])


def wait_for_owned(number: int) -> None:
    end = time.monotonic() + 20
    while rpc.rpc_sync(OTHER, owned) != number:
        assert time.monotonic() < end


def check_a_remote_module_ends_with_the_last_that_refers_to_it() -> None:
    for to in (HERE, OTHER, THIRD):
        rpc.rpc_sync(to, gc.collect)
    wait_for_owned(0)
    gc.disable()
    try:
        remote = RemoteModule(OTHER, Times)
        scripted = torch.jit.script(_RemoteModule(OTHER, Times, _module_interface_cls=Interface))
        assert runs(scripted, remote(ONES)).tolist() == [6, 6]
        assert rpc.rpc_sync(OTHER, owned) == 2
        del remote, scripted
        wait_for_owned(0)
    finally:
        gc.enable()


# -- futures

GATE = threading.Event()


def waits() -> int:
    GATE.wait(60)
    return 1


def lets_go() -> None:
    GATE.set()


def fails() -> None:
    raise KeyError("no luck")


def check_wait_all_and_collect_all_end_with_the_first_error() -> None:
    late = rpc.rpc_async(OTHER, waits)
    bad = [rpc.rpc_async(OTHER, fails), rpc.rpc_async(OTHER, parts.refuses, (ONES,))]
    with pytest.raises(KeyError, match="no luck"):
        torch.futures.wait_all([late, bad[0]])
    with pytest.raises(RuntimeError, match="not today"):
        torch.futures.collect_all([bad[1], late]).wait()
    assert torch.futures.collect_all([late, bad[0]]).then(lambda done: len(failures_of(done))).wait() == 1
    assert not late.done()
    rpc.rpc_sync(OTHER, lets_go)
    own = torch.futures.Future()
    own.set_result(2)
    collected = torch.futures.collect_all([late, own, rpc.rpc_async(THIRD, abs, (-3,))])
    assert [future.wait() for future in collected.wait()] == [1, 2, 3]
    assert torch.futures.wait_all([]) == [] == torch.futures.collect_all([]).wait()


def failures_of(future) -> list:
    try:
        future.wait()
    except KeyError as e:
        return [e]
    return []


# -- running it


def work(number: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    rank = number + 1
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    if rank == 0:
        found = {}
        for name, check in list(globals().items()):
            if name.startswith("check_"):
                try:
                    check()
                    found[name] = ""
                except BaseException:
                    found[name] = traceback.format_exc()
        print(json.dumps(found), flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("localhost", 0))
        free = s.getsockname()[1]
    others = mp.spawn(work, args=(free,), nprocs=2, join=False)
    work(-1, free)
    while not others.join():
        pass
