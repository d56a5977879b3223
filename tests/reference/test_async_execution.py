"""Functions that answer later: every kind of function, in every way of calling it, and what may go wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import actorrpc as rpc
from actorrpc import session
from tests.reference import scripted
from tests.worlds import World, inside, until

OTHER = "worker1"
KINDS = ("free", "static", "of_class", "bound")
VERBS = ("rpc_sync", "rpc_async", "remote")


@rpc.functions.async_execution
def free(how: str, value: Any) -> Any:
    """Returns a future of a given kind, which comes to be done with the value, or fails with it."""
    return FUTURES[how](value)


class Server:
    """The same as a method of each kind."""

    def __init__(self, wanted: str = "a server") -> None:
        self.wanted = wanted
        self.free = free

    @staticmethod
    @rpc.functions.async_execution
    def static(how: str, value: Any) -> Any:
        return FUTURES[how](value)

    @classmethod
    @rpc.functions.async_execution
    def of_class(cls, how: str, value: Any) -> Any:
        assert cls is Server
        return FUTURES[how](value)

    @rpc.functions.async_execution
    def bound(self, how: str, value: Any) -> Any:
        assert self.wanted == "a server"
        return FUTURES[how](value)


def give(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


def _back() -> int:
    """The worker that did not make this call."""
    return 1 - rpc.get_worker_info().id


def _complete(future: Any, value: Any) -> None:
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)


def _later(future: Any, value: Any) -> Any:
    threading.Timer(0.02, _complete, (future, value)).start()
    return future


def _now(future: Any, value: Any) -> Any:
    _complete(future, value)
    return future


def _collected(value: Any) -> Any:
    both = [rpc.rpc_async(_back(), give, args=(value,)), _later(torch.futures.Future(), 0)]
    return torch.futures.collect_all(both).then(lambda done: done.wait()[0].wait())


FUTURES: dict[str, Callable[[Any], Any]] = {
    "of a call": lambda value: rpc.rpc_async(_back(), give, args=(value,)),
    "of then": lambda value: rpc.rpc_async(_back(), int).then(lambda done: give(value)),
    "of a call to itself": lambda value: rpc.rpc_async(rpc.get_worker_info().id, free, args=("of a call", value)),
    "of a group": lambda value: rpc.Group([rpc.RRef(0)]).rpc_async().bit_length().then(lambda done: give(value)),
    "our own, by another thread": lambda value: _later(rpc.Future(), value),
    "our own, done": lambda value: _now(rpc.Future(), value),
    "torch's own, by another thread": lambda value: _later(torch.futures.Future(), value),
    "torch's own, done": lambda value: _now(torch.futures.Future(), value),
    "torch's then": lambda value: _later(torch.futures.Future(), 0).then(lambda done: give(value)),
    "torch's collect_all": _collected,
}


def call(verb: str, to: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function in one of three ways, and fetches its result."""
    if verb == "rpc_sync":
        return rpc.rpc_sync(to, function, args=args)
    if verb == "rpc_async":
        return rpc.rpc_async(to, function, args=args).wait()
    return rpc.remote(to, function, args=args).to_here()


def call_through(verb: str, ref: rpc.RRef[Any], name: str, *args: Any) -> Any:
    """Calls a method through a reference in one of three ways, and fetches its result."""
    result = getattr(getattr(ref, verb)(), name)(*args)
    if verb == "rpc_sync":
        return result
    return result.wait() if verb == "rpc_async" else result.to_here()


def directly(verb: str, to: Any, kind: str, how: str, value: Any) -> Any:
    function = free if kind == "free" else getattr(Server() if kind == "bound" else Server, kind)
    return call(verb, to, function, how, value)


def through_a_reference(verb: str, to: Any, kind: str, how: str, value: Any) -> Any:
    return call_through(verb, rpc.remote(to, Server), kind, how, value)


WAYS: dict[str, Callable[..., Any]] = {"directly": directly, "through a reference": through_a_reference}

each_kind = pytest.mark.parametrize("kind", KINDS)
each_verb = pytest.mark.parametrize("verb", VERBS)
each_way = pytest.mark.parametrize("way", WAYS)


# -- what works


def every_future(way: str, verb: str, kind: str) -> None:
    for to in (OTHER, 0):
        for how in FUTURES:
            assert WAYS[way](verb, to, kind, how, 7) == 7, (to, how)


@each_way
@each_verb
@each_kind
def test_every_kind_of_function_answers_in_every_way_with_every_kind_of_future(
    pair: World, kind: str, verb: str, way: str
) -> None:
    pair.on(0, every_future, way, verb, kind)


@inside
def test_a_lambda_and_a_local_function_may_answer_later() -> None:
    kept = torch.ones(2)

    @rpc.functions.async_execution
    def local(x: int) -> Any:
        return rpc.rpc_async(0, torch.add, args=(kept, x))

    for verb in VERBS:
        assert call(verb, OTHER, local, 1).tolist() == [2, 2]
        assert call(verb, OTHER, rpc.functions.async_execution(lambda: _now(rpc.Future(), 5))) == 5


def add_later(x: int, y: int = 10, *, z: int = 100) -> Any:
    return _later(rpc.Future(), x + y + z)


@inside
def test_keywords_and_defaults_reach_the_marked_function() -> None:
    marked = rpc.functions.async_execution(add_later)
    assert rpc.rpc_sync(OTHER, marked, args=(1,)) == 111
    assert rpc.rpc_async(OTHER, marked, args=(1,), kwargs={"z": 3}).wait() == 14
    assert rpc.remote(OTHER, marked, kwargs={"x": 1, "y": 2, "z": 3}).to_here() == 6
    assert (marked.__name__, marked.__qualname__, marked.__module__) == ("add_later", "add_later", __name__)


@inside
def test_a_marked_function_called_here_gives_its_future() -> None:
    future = free("our own, by another thread", 7)
    assert isinstance(future, rpc.Future)
    assert future.wait() == 7


@inside
def test_what_another_library_marked_the_same_way_answers_later_too() -> None:
    from torch.distributed.rpc.functions import async_execution

    marked = async_execution(add_later)  # type: ignore[no-untyped-call]
    for verb in VERBS:
        assert call(verb, OTHER, rpc.functions.async_execution(marked), 1) == 111
        assert call(verb, OTHER, marked, 1) == 111


PROMISES: list[rpc.Future[int]] = []


@rpc.functions.async_execution
def promise() -> Any:
    PROMISES.append(rpc.Future())
    return PROMISES[-1]


def keep_promises() -> int:
    """Completes all; returns how many threads the worker had until then."""
    threads = session.current().worker.statistics()["threads"]
    promises, PROMISES[:] = list(PROMISES), []
    for n, future in enumerate(promises):
        future.set_result(n)
    return threads


def promised() -> int:
    return len(PROMISES)


@inside
def test_a_function_that_answers_later_holds_no_thread_meanwhile() -> None:
    futures = [rpc.rpc_async(OTHER, promise) for _ in range(100)]
    until(lambda: rpc.rpc_sync(OTHER, promised) == 100)
    assert not any(future.done() for future in futures)
    assert rpc.rpc_sync(OTHER, keep_promises) < 50
    assert sorted(future.wait() for future in futures) == list(range(100))


@inside
def test_the_answer_to_a_caller_who_has_given_up_is_dropped() -> None:
    late = rpc.rpc_async(OTHER, promise, timeout=0.1)
    with pytest.raises(rpc.RPCTimeoutError, match="promise"):
        late.wait()
    ref = rpc.remote(OTHER, promise)
    with pytest.raises(rpc.RPCTimeoutError):
        ref.to_here(timeout=0.1)
    until(lambda: rpc.rpc_sync(OTHER, promised) == 2)
    rpc.rpc_sync(OTHER, keep_promises)
    assert ref.to_here() == 1


# -- decorators above and below


@inside
def test_it_stands_above_a_scripted_functions_decorator() -> None:
    ones = torch.ones(2)
    for to in (OTHER, 0):
        for verb in VERBS:
            assert call(verb, to, scripted.forked_add, ones, ones).tolist() == [2, 2]
            with pytest.raises(RuntimeError, match="not today"):
                call(verb, to, scripted.forked_refuse, ones)
            with pytest.raises(TypeError, match=r"must return a torch\.futures\.Future object, but no_future returned"):
                call(verb, to, scripted.no_future, ones)


@inside
def test_a_scripted_function_without_the_mark_on_top_of_it_says_what_is_missing() -> None:
    """As where `torch.jit.script` stands above the mark: it compiles what is below, and the mark is lost."""
    ones = torch.ones(2)
    for verb in ("rpc_sync", "rpc_async"):
        with pytest.raises(rpc.SerializationError, match=r"returned a Future.*above torch\.jit\.script"):
            call(verb, OTHER, scripted.unmarked_forked_add, ones, ones)


@pytest.mark.parametrize("outer", [staticmethod, classmethod])
def test_it_cannot_stand_above_a_static_or_class_methods_decorator(outer: Any) -> None:
    with pytest.raises(TypeError, match=f"goes below @{outer.__name__}"):
        rpc.functions.async_execution(outer(add_later))


def test_it_decorates_what_can_be_called() -> None:
    with pytest.raises(TypeError, match="decorates a function, not 3 of type int"):
        rpc.functions.async_execution(3)  # type: ignore[type-var]


# -- what goes wrong


class NotFutures:
    @staticmethod
    @rpc.functions.async_execution
    def static(value: Any) -> Any:
        return value

    @classmethod
    @rpc.functions.async_execution
    def of_class(cls, value: Any) -> Any:
        return value

    @rpc.functions.async_execution
    def bound(self, value: Any) -> Any:
        return value


@rpc.functions.async_execution
def not_a_future(value: Any) -> Any:
    return value


@inside
def test_a_result_that_is_no_future_is_an_error_that_names_the_function() -> None:
    def functions() -> dict[str, Callable[..., Any]]:
        methods = NotFutures()
        return {
            "not_a_future": not_a_future,
            r"NotFutures\.static": methods.static,
            r"NotFutures\.of_class": methods.of_class,
            r"NotFutures\.bound": methods.bound,
        }

    for to in (OTHER, 0):
        ref = rpc.remote(to, NotFutures)
        for verb in VERBS:
            for name, function in functions().items():
                words = rf"decorated with @rpc.async_function must return a .*Future object, but {name} returned int"
                with pytest.raises(TypeError, match=words):
                    call(verb, to, function, 3)
                if name != "not_a_future":
                    with pytest.raises(TypeError, match=words):
                        call_through(verb, ref, name.split(".")[1], 3)
            with pytest.raises(TypeError, match="returned NoneType"):
                call(verb, to, not_a_future, None)


def every_failure(way: str, verb: str) -> None:
    for to in (OTHER, 0):
        for how in FUTURES:
            # torch's own `then` makes a RuntimeError of whatever its callback raises
            kind = RuntimeError if how in ("torch's then", "torch's collect_all") else LookupError
            with pytest.raises(kind, match="no luck"):
                WAYS[way](verb, to, "static", how, LookupError("no luck"))


@each_way
@each_verb
def test_a_future_that_fails_fails_the_call(pair: World, verb: str, way: str) -> None:
    pair.on(0, every_failure, way, verb)


@rpc.functions.async_execution
def fails_at_once() -> Any:
    raise LookupError("before any future")


@rpc.functions.async_execution
def gives_a_lock() -> Any:
    return _later(rpc.Future(), threading.Lock())


@rpc.functions.async_execution
def times_out() -> Any:
    return rpc.rpc_async(_back(), time.sleep, args=(0.3,), timeout=0.05)


@inside
def test_an_error_before_the_future_is_the_calls() -> None:
    for verb in VERBS:
        with pytest.raises(LookupError, match="before any future"):
            call(verb, OTHER, fails_at_once)


@inside
def test_a_futures_result_that_cannot_be_written_is_the_calls_error() -> None:
    for verb in VERBS:
        with pytest.raises(rpc.SerializationError, match="lock"):
            call(verb, OTHER, gives_a_lock)
    assert rpc.remote(OTHER, gives_a_lock).rpc_sync().locked() is False


@inside
def test_a_timeout_of_the_callees_own_call_is_the_callers_error() -> None:
    for verb in VERBS:
        with pytest.raises(rpc.RPCTimeoutError, match='sleep on worker "worker0"'):
            call(verb, OTHER, times_out)


def unmarked() -> Any:
    return rpc.rpc_async(_back(), int)


@inside
def test_a_future_returned_by_a_function_without_the_mark_says_what_is_missing() -> None:
    for to in (OTHER, 0):
        for verb in ("rpc_sync", "rpc_async"):
            with pytest.raises(rpc.SerializationError, match=r"mark unmarked with functions\.async_execution"):
                call(verb, to, unmarked)
        ref = rpc.remote(to, unmarked)  # it may be kept where it is
        assert ref.rpc_sync().wait() == 0
        with pytest.raises(rpc.SerializationError, match=r"Can not pickle torch\.futures\.Future"):
            rpc.rpc_sync(to, give, args=(rpc.Future(),))
