"""What may be called, with which arguments, and how errors of use are told; by `rpc_sync`, `rpc_async` and `remote`."""

from __future__ import annotations

import collections
import logging
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import actorrpc as rpc
from tests.reference import scripted
from tests.worlds import inside, until

OTHER = "worker1"


def fetch_sync(to: Any, function: Any, args: Any = None, kwargs: Any = None) -> Any:
    return rpc.rpc_sync(to, function, args=args, kwargs=kwargs)


def fetch_async(to: Any, function: Any, args: Any = None, kwargs: Any = None) -> Any:
    return rpc.rpc_async(to, function, args=args, kwargs=kwargs).wait()


def fetch_remote(to: Any, function: Any, args: Any = None, kwargs: Any = None) -> Any:
    return rpc.remote(to, function, args=args, kwargs=kwargs).to_here()


VERBS: list[Callable[..., Any]] = [fetch_sync, fetch_async, fetch_remote]


def every_kind(a: Any, /, b: Any, c: Any = "c", *rest: Any, d: Any, e: Any = "e", **more: Any) -> Any:
    return a, b, c, rest, d, e, more


class Thing:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.made_of = args, kwargs

    def every_kind(self, a: Any, /, b: Any, c: Any = "c", *rest: Any, d: Any, e: Any = "e", **more: Any) -> Any:
        return every_kind(a, b, c, *rest, d=d, e=e, **more)


# -- arguments


@inside
def test_arguments_of_every_kind_reach_the_function() -> None:
    for to in (OTHER, 0):
        ref = rpc.remote(to, Thing)
        for args, kwargs, expected in (
            ((1, 2), {"d": 3}, (1, 2, "c", (), 3, "e", {})),
            ((1,), {"b": 2, "d": 3}, (1, 2, "c", (), 3, "e", {})),
            ((1, 2, 3, 4, 5), {"d": 6, "e": 7, "f": 8}, (1, 2, 3, (4, 5), 6, 7, {"f": 8})),
            ((1, 2), {"d": 3, "c": 4, "a": 5}, (1, 2, 4, (), 3, "e", {"a": 5})),
        ):
            for fetch in VERBS:
                assert fetch(to, every_kind, args, kwargs) == expected
                assert fetch(to, Thing().every_kind, args, kwargs) == expected
            assert ref.rpc_sync().every_kind(*args, **kwargs) == expected
            assert ref.rpc_async().every_kind(*args, **kwargs).wait() == expected
            assert ref.remote().every_kind(*args, **kwargs).to_here() == expected
        with pytest.raises(TypeError, match="required keyword-only argument: 'd'"):
            rpc.rpc_sync(to, every_kind, args=(1, 2))


def take(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


@inside
def test_arguments_come_as_a_tuple_a_list_or_not_at_all() -> None:
    for fetch in VERBS:
        for given in ((1, [2]), [1, [2]]):
            assert fetch(OTHER, take, given) == ((1, [2]), {})
        none: tuple[Any, ...] = ((), [], None)
        for nothing in none:
            assert fetch(OTHER, take, nothing) == ((), {})
            assert fetch(OTHER, take, nothing, {}) == ((), {})
            assert fetch(OTHER, take, nothing, None) == ((), {})
        assert fetch(OTHER, take, None, collections.OrderedDict(b=1, a=2)) == ((), {"a": 2, "b": 1})
        for wrong in (torch.ones(2), "ab", 5, {"a": 1}, iter([1])):
            with pytest.raises(TypeError, match=r"args must be a tuple, not \w+; for one argument write args=\(x,\)"):
                fetch(OTHER, take, wrong)
        with pytest.raises(TypeError, match="kwargs must be a dict, not list"):
            fetch(OTHER, take, None, ["a"])
        with pytest.raises(TypeError, match="keywords must be strings"):
            fetch(OTHER, take, None, {1: 2})


@inside
def test_keywords_may_have_the_names_of_the_verbs_own() -> None:
    names = dict.fromkeys(("to", "func", "args", "kwargs", "timeout", "self", "worker", "name", "message"), 1)
    for fetch in VERBS:
        assert fetch(OTHER, take, None, names) == ((), names)
    group = rpc.Group([rpc.remote(OTHER, Taker)])
    assert group.rpc_sync().take(**names) == [((), names)]
    assert group[0].rpc_sync().take(**names) == ((), names)


class Taker:
    def take(self, /, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


@inside
def test_the_list_and_the_dict_that_were_given_are_left_alone() -> None:
    args, kwargs = [1, [2]], {"a": [3]}
    future = rpc.rpc_async(OTHER, take, args=args, kwargs=kwargs)
    args.append(4)
    kwargs["b"] = [5]
    assert future.wait() == ((1, [2]), {"a": [3]})


def first_and_last(small: torch.Tensor, large: torch.Tensor) -> list[float]:
    return [*small[[0, -1]].tolist(), *large[[0, -1]].tolist()]


@inside
def test_small_arguments_of_rpc_async_are_copied_at_the_call_and_large_ones_are_free_once_it_is_done() -> None:
    small, large = torch.zeros(16_000), torch.zeros(1 << 20)
    for n in range(30):
        futures = []
        for k in range(10):
            small.fill_(k)
            futures.append(rpc.rpc_async(OTHER, first_and_last, args=(small, large)))
        small.fill_(-1)
        got = [future.wait() for future in futures]
        assert got == [[k, k, n, n] for k in range(10)], got
        large.fill_(n + 1)


# -- functions


@inside
def test_builtins_operators_and_constructors_are_called() -> None:
    ones = torch.ones(2)
    for to in (OTHER, 0):
        for fetch in VERBS:
            assert fetch(to, torch.add, (ones, 3)).tolist() == [4, 4]
            assert fetch(to, torch.add, (ones,), {"other": ones, "alpha": 2}).tolist() == [3, 3]
            assert fetch(to, torch.Tensor.add, (ones, 1)).tolist() == [2, 2]
            assert fetch(to, torch.ones, (2,), {"dtype": torch.int64}).dtype is torch.int64
            assert fetch(to, torch.nn.functional.relu, (-ones,)).tolist() == [0, 0]
            assert fetch(to, min, (1, 2)) == 1
            assert fetch(to, max, ([1, 3],), {"key": operator.neg}) == 1
            assert fetch(to, operator.mul, (2, 3)) == 6
            assert fetch(to, Thing, (1,), {"x": 2}).made_of == ((1,), {"x": 2})
            assert fetch(to, torch.nn.Linear, (2, 3), {"bias": False}).weight.shape == (3, 2)
            assert fetch(to, collections.Counter, ("aab",)) == {"a": 2, "b": 1}
            assert fetch(to, int) == 0


@inside
def test_scripted_functions_go_by_name_with_keywords_and_defaults() -> None:
    ones = torch.ones(2)
    for to in (OTHER, 0):
        for fetch in VERBS:
            assert fetch(to, scripted.script_add, (ones, 3)).tolist() == [4, 4]
            assert fetch(to, scripted.script_add, None, {"t1": ones, "t2": 3}).tolist() == [4, 4]
            assert fetch(to, scripted.scale, (ones,)).tolist() == [2, 2]
            assert fetch(to, scripted.scale, (ones, 3.0)).tolist() == [3, 3]
            assert fetch(to, scripted.scale, (ones,), {"shift": 4}).tolist() == [6, 6]
            with pytest.raises(RuntimeError, match="Unknown keyword argument 'other'"):
                fetch(to, scripted.scale, (ones,), {"other": 4})
            with pytest.raises(torch.jit.Error, match="not today") as caught:
                fetch(to, scripted.refuse, (ones,))
            assert isinstance(caught.value, RuntimeError)


# -- errors of use


@inside
def test_a_plain_attribute_read_through_a_proxy_says_that_it_is_a_method() -> None:
    ref = rpc.remote(OTHER, torch.nn.Linear, args=(2, 3))
    for verb in ("rpc_sync", "rpc_async", "remote"):
        weight = getattr(ref, verb)().weight
        with pytest.raises(AttributeError, match=rf"{verb}\(\)\.weight is a method to be called.*'shape'.*'worker1'"):
            _ = weight.shape
        with pytest.raises(TypeError, match="ProxyMethod"):
            _ = weight + 1
        assert not hasattr(weight, "__torch_function__")


@inside
def test_a_failed_tell_is_logged_with_the_name_of_its_sender() -> None:
    rpc.rpc_sync(OTHER, catch_log)
    rpc.remote(OTHER, Thing).tell().no_such_method()
    until(lambda: rpc.rpc_sync(OTHER, caught))
    (line,) = rpc.rpc_sync(OTHER, caught)
    assert line.startswith('worker "worker1" (rank 1')
    assert ': a message from worker "worker0" (rank 0' in line
    rpc.rpc_sync(OTHER, stop_catching)


class Catcher(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


CATCHERS: list[Catcher] = []


def catch_log() -> None:
    CATCHERS.append(Catcher())
    logging.getLogger("actorrpc").addHandler(CATCHERS[-1])


def caught() -> list[str]:
    return CATCHERS[-1].lines


def stop_catching() -> None:
    logging.getLogger("actorrpc").removeHandler(CATCHERS.pop())


class Named(rpc.Actor):
    def __init__(self, taken: str, free: str) -> None:
        setattr(self, free, 1)
        assert vars(self)[free] == 1
        setattr(self, taken, 2)


class NamedModule(torch.nn.Module, rpc.Actor):
    """An actor of several bases: each has its say when an attribute is set."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)

    def count(self) -> int:
        return len(list(self.parameters()))


@inside
def test_a_name_that_an_actor_needs_itself_is_refused_with_all_the_others() -> None:
    for taken in ("name", "role", "index", "worker", "world", "rref"):
        with pytest.raises(AttributeError, match=rf"Named cannot have .*'{taken}'.* taken: name, role, index, .*rref$"):
            Named.spawn(OTHER, taken, "number").to_here()
    assert NamedModule.spawn(OTHER).rpc_sync().count() == 2
