"""Futures as the reference tells of them: chains, callbacks that fail, and torch's own beside ours."""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import actorrpc as rpc
from tests.worlds import inside, until

OTHER = "worker1"


def give(value: Any) -> Any:
    if isinstance(value, BaseException):
        raise value
    return value


# -- chains of callbacks


def chain(length: int) -> rpc.Future[int]:
    future = rpc.rpc_async(OTHER, give, args=(0,))
    for _ in range(length):
        future = future.then(lambda done: done.wait() + 1)
    return future


class Ends:
    """What came of futures, in the order in which they were done."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def note(self, done: rpc.Future[Any]) -> None:
        self.values.append(done.wait())

    def all_of(self, n: int) -> Callable[[], bool]:
        return lambda: len(self.values) == n


def chains(rounds: int, length: int) -> None:
    """Rounds of several chains at once; some are waited for, of others only the end is seen."""
    for _ in range(rounds // 10):
        ends = Ends()
        futures = [chain(length) for _ in range(5)]
        for _ in range(5):
            chain(length).add_done_callback(ends.note)
        assert [future.wait(30) for future in futures] == [length] * 5
        until(ends.all_of(5), 30)
        assert ends.values == [length] * 5


@inside
def test_chains_of_fifty_callbacks_come_to_their_ends() -> None:
    chains(50, 50)


@pytest.mark.slow
@inside
def test_a_thousand_rounds_of_fifty_chained_callbacks_come_to_their_ends() -> None:
    chains(1000, 50)
    gc.collect()
    assert sum(isinstance(o, rpc.Future) for o in gc.get_objects()) < 100


@inside
def test_a_long_chain_does_not_exhaust_the_stack() -> None:
    own: rpc.Future[int] = rpc.Future()
    end: rpc.Future[int] = own
    for _ in range(sys.getrecursionlimit() // 10):
        end = end.then(lambda done: done.wait() + 1)
    own.set_result(0)
    assert end.wait(30) == sys.getrecursionlimit() // 10


# -- callbacks that raise


class Caught(logging.Handler):
    """What goes to the log meanwhile."""

    def __enter__(self) -> list[str]:
        self.lines: list[str] = []
        logging.getLogger("actorrpc").addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("actorrpc").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        assert record.exc_info is not None
        self.lines.append(repr(record.exc_info[1]))


def raising(error: BaseException) -> Callable[[Any], None]:
    def callback(_: Any) -> None:
        raise error

    return callback


def futures_of_all_kinds() -> dict[str, tuple[rpc.Future[Any], Callable[[], Any]]]:
    """Futures, and what brings about their result."""
    done = rpc.rpc_async(OTHER, give, args=(3,))
    done.wait()
    own, own_done, own_by_another = rpc.Future[int](), rpc.Future[int](), rpc.Future[int]()
    own_done.set_result(3)
    under_way = rpc.rpc_async(OTHER, give, args=(3,))
    return {
        "of a call": (under_way, under_way.wait),
        "of a call that is done": (done, lambda: None),
        "our own": (own, lambda: own.set_result(3)),
        "our own, done": (own_done, lambda: None),
        "our own, by another thread": (own_by_another, threading.Timer(0.02, own_by_another.set_result, (3,)).start),
    }


@pytest.mark.parametrize("error", ["ValueError", "SystemExit"])
def test_a_done_callback_that_raises_is_logged_and_the_others_run(pair: Any, error: str) -> None:
    pair.on(0, callbacks_that_raise, error)


def callbacks_that_raise(name: str) -> None:
    error = {"ValueError": ValueError("of a callback"), "SystemExit": SystemExit(3)}[name]
    for what, (future, complete) in futures_of_all_kinds().items():
        ends = Ends()
        with Caught() as lines:
            future.add_done_callback(ends.note)
            future.add_done_callback(raising(error))
            future.add_done_callback(ends.note)
            complete()
            until(ends.all_of(2), what=what)
            until(lines.__len__, what=what)
        assert ends.values == [3, 3], what
        assert lines == [repr(error)], what
        assert future.wait() == 3, what


@inside
def test_a_then_callback_that_raises_fails_its_child_alone() -> None:
    for what, (future, complete) in futures_of_all_kinds().items():
        with Caught() as lines:
            bad = future.then(raising(KeyError("of a callback")))
            good = future.then(lambda done: done.wait() + 1)
            grandchild = bad.then(lambda done: done.wait())
            complete()
            for failed in (bad, grandchild):
                with pytest.raises(KeyError, match="of a callback"):
                    failed.wait(10)
            assert good.wait(10) == 4, what
        assert lines == [], what
        assert future.wait() == 3, what


@inside
def test_the_pool_outlives_callbacks_of_any_kind() -> None:
    for error in (ValueError("x"), SystemExit(3), KeyboardInterrupt()):
        for _ in range(40):  # more than there are threads for callbacks
            future = rpc.rpc_async(OTHER, give, args=(3,))
            with contextlib.suppress(KeyboardInterrupt):  # where the future is done, it runs here
                future.add_done_callback(raising(error))
            future.wait()
    assert rpc.rpc_async(OTHER, give, args=(3,)).then(lambda done: done.wait() + 1).wait(10) == 4


@inside
def test_what_cannot_be_called_is_refused_as_a_callback() -> None:
    for future, _ in futures_of_all_kinds().values():
        for add in (future.then, future.add_done_callback):
            with pytest.raises(TypeError, match="A callback must be callable, not 3 of type int"):
                add(3)  # type: ignore[arg-type]


# -- torch's own beside ours


def mixed(value: Any = 3) -> list[torch.futures.Future[Any]]:
    """Futures of both kinds, of calls and of the user's own, done and under way. Values: 1 to 8; the 5th may fail."""
    torchs: list[torch.futures.Future[Any]] = [torch.futures.Future() for _ in range(3)]
    ours: list[rpc.Future[Any]] = [rpc.Future(), rpc.Future()]
    torchs[0].set_result(1)
    ours[0].set_result(2)
    threading.Timer(0.01, torchs[1].set_result, (3,)).start()
    threading.Timer(0.02, ours[1].set_result, (4,)).start()
    done = rpc.rpc_async(OTHER, give, args=(6,))
    done.wait()
    return [
        torchs[0], ours[0], torchs[1], ours[1], rpc.rpc_async(OTHER, give, args=(value,)), done,
        rpc.rpc_async(OTHER, give, args=(6,)).then(lambda f: f.wait() + 1),
        rpc.Group([rpc.remote(OTHER, give, args=(8,))] * 2).rpc_async().conjugate().then(lambda f: f.wait()[1]),
    ]  # fmt: skip


@inside
def test_wait_all_and_collect_all_take_torchs_futures_and_ours_together() -> None:
    for _ in range(5):
        assert torch.futures.wait_all(mixed(5)) == [1, 2, 3, 4, 5, 6, 7, 8]
        collected = torch.futures.collect_all(mixed(5))
        assert [f.wait() for f in collected.wait()] == [1, 2, 3, 4, 5, 6, 7, 8]
        child = torch.futures.collect_all(mixed(5)).then(lambda done: sum(f.wait() for f in done.wait()))
        assert child.wait() == 36


@inside
def test_wait_all_and_collect_all_raise_the_error_of_a_call_among_them() -> None:
    with pytest.raises(LookupError, match="no luck"):
        torch.futures.wait_all(mixed(LookupError("no luck")))
    with pytest.raises(LookupError, match="no luck"):
        [f.wait() for f in torch.futures.collect_all(mixed(LookupError("no luck"))).wait()]


@rpc.functions.async_execution
def collected_there(values: list[int]) -> Any:
    futures: list[Any] = [rpc.rpc_async(0, give, args=(value,)) for value in values]
    return torch.futures.collect_all(futures).then(lambda done: [f.wait() for f in done.wait()])


@inside
def test_a_handler_may_return_torchs_collection_of_our_futures() -> None:
    assert rpc.rpc_sync(OTHER, collected_there, args=([1, 2, 3],)) == [1, 2, 3]
    assert rpc.rpc_sync(OTHER, collected_there, args=([],)) == []


# -- what help() shows


def test_public_futures_show_no_internal_names() -> None:
    for cls in (rpc.Future, rpc.GroupFuture):
        own = {name for name in vars(cls) if not name.startswith("_")}
        ending = {"set_result", "set_exception", "cancel", "cancelled"}
        assert own <= ending | {"done", "wait", "value", "add_done_callback", "then", "as_completed", "settled"}
        for name in own:
            assert inspect.getdoc(getattr(cls, name)), name
    assert "no need to make one by hand" in inspect.getdoc(rpc.GroupFuture)  # type: ignore[operator]
