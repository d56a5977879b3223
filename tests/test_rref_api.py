"""The interface of references, method by method: what each gives before and after the object is there, its errors and
its limits; proxies; what is refused; and what still works after shutdown."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import re
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
import torch

import actorrpc as rpc
from actorrpc.session import current
from tests import worlds
from tests.worlds import World, counts, inside, raised_within, run_world, until

OTHER = "worker1"
GATES: dict[str, threading.Event] = {}


class Box:
    """An object to refer to, which can also be called."""

    color = "red"

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, more: Any = 0) -> Any:
        return self.value + more

    def get(self) -> Any:
        return self.value

    def add(self, ref: Any) -> Any:
        return self.value + ref.to_here()

    def where(self) -> str:
        return rpc.get_worker_info().name

    def slow(self, seconds: float) -> Any:
        time.sleep(seconds)
        return self.value

    def missing_inside(self) -> None:
        raise KeyError("no key")

    @rpc.functions.async_execution
    def later(self, more: int) -> Any:
        return rpc.rpc_async("worker0", int, args=(self.value + more,))


class Count(rpc.Actor):
    """An actor that can be called as a whole; it fails when two calls overlap."""

    def __init__(self) -> None:
        self.count, self.inside = 0, False

    def __call__(self, n: int) -> int:
        assert not self.inside
        self.inside = True
        self.count += n
        time.sleep(0.001)
        self.inside = False
        return self.count


def gate(name: str) -> threading.Event:
    return GATES.setdefault(name, threading.Event())


def open_gate(name: str) -> None:
    gate(name).set()


def gated(name: str, value: Any = None) -> Box:
    """Makes a box once somebody has opened a gate."""
    assert gate(name).wait(20)
    return Box(value)


def gated_failure(name: str) -> None:
    assert gate(name).wait(20)
    raise LookupError("no box")


@contextmanager
def opened(name: str, to: Any = OTHER) -> Iterator[None]:
    """Has a gate there opened at the end of the block, whatever happens in it."""
    try:
        yield
    finally:
        rpc.rpc_sync(to, open_gate, args=(name,))


def fails(text: str) -> None:
    raise LookupError(text)


class TwoArguments(LookupError):
    """Cannot be copied, nor pickled."""

    def __init__(self, a: int, b: str) -> None:
        super().__init__(f"{a} and {b}")


def fails_oddly() -> None:
    raise TwoArguments(1, "no box")


def fails_with(ref: Any) -> None:
    raise LookupError("no box")


def make_ref(value: Any) -> Any:
    return rpc.RRef(value)


def identity(value: Any) -> Any:
    return value


def value_of(ref: Any) -> Any:
    return ref.to_here().value


def type_of(ref: Any) -> Any:
    return ref._get_type()


def future_of(ref: Any) -> Any:
    return ref._get_future().wait()


def called(method: Any, *args: Any) -> Any:
    return method(*args)


# -- who owns it, and whether the owner knows


@inside
def test_confirmed_by_owner_is_false_while_the_object_is_being_made_and_then_true() -> None:
    with opened("confirm"):
        ref = rpc.remote(OTHER, gated, args=("confirm",))
        again = ref.remote().get()
        for _ in range(3):
            assert rpc.rpc_sync(OTHER, abs, args=(-1,)) == 1  # the owner answers; but it is not there
            assert not ref.confirmed_by_owner()
            assert not again.confirmed_by_owner()
    until(ref.confirmed_by_owner)
    until(again.confirmed_by_owner)


@inside
def test_confirmed_by_owner_is_true_once_the_creation_has_failed() -> None:
    with opened("confirm-failure"):
        ref = rpc.remote(OTHER, gated_failure, args=("confirm-failure",))
        assert not ref.confirmed_by_owner()
    until(ref.confirmed_by_owner)
    with pytest.raises(LookupError, match="no box"):
        ref.to_here()


@inside
def test_owner_and_owner_name_and_is_owner_do_not_wait_for_the_object() -> None:
    for to, name in ((OTHER, OTHER), (0, "worker0")):
        with opened("who", to):
            ref = rpc.remote(to, gated, args=("who", 1))
            assert ref.owner() == rpc.get_worker_info(name)
            assert ref.owner_name() == name
            assert ref.is_owner() == (to == 0)
            assert ref.confirmed_by_owner() == (to == 0)  # on the owner it is always true
        assert ref.to_here().value == 1


@inside
def test_to_here_on_the_owner_is_the_very_object() -> None:
    value = Box(1)
    ref = rpc.RRef(value)
    assert ref.to_here() is value
    assert ref.to_here(timeout=0.001) is value
    assert ref.local_value() is value
    made = rpc.remote(0, Box, args=(2,))
    assert made.to_here() is made.local_value()
    home = rpc.rpc_sync(OTHER, identity, args=(ref,))
    assert home.to_here() is value


@inside
def test_to_here_takes_a_timeout_on_both_sides() -> None:
    for to in (OTHER, 0):
        with opened("late", to):
            ref = rpc.remote(to, gated, args=("late", 5))
            with raised_within(5), pytest.raises(rpc.RPCTimeoutError, match=r"more than set timeout \(50 ms\)"):
                ref.to_here(timeout=0.05)
            with raised_within(5), pytest.raises(rpc.RPCTimeoutError, match="_get_type"):
                ref._get_type(timeout=0.05)
        assert ref.to_here(timeout=0).value == 5
        GATES.clear()
        rpc.rpc_sync(OTHER, GATES.clear)


@inside
def test_the_owners_wait_for_an_object_is_bounded_by_the_default_timeout() -> None:
    with opened("bounded", 0):
        made = rpc.remote(0, gated, args=("bounded", 5), timeout=0)
        ref = rpc.rpc_sync(OTHER, identity, args=(made,))  # a reference that has not made the object
        assert ref.is_owner()
        rpc._set_rpc_timeout(0.05)
        try:
            for use in (ref.local_value, ref.to_here, made.to_here):
                with raised_within(5), pytest.raises(rpc.RPCTimeoutError, match=r"\(50 ms\)"):
                    use()
        finally:
            rpc._set_rpc_timeout(60)
    assert made.local_value().value == ref.local_value().value == 5


@inside
def test_local_value_elsewhere_says_who_the_owner_is() -> None:
    ref = rpc.remote(OTHER, Box, args=(1,))
    with pytest.raises(RuntimeError, match=r"Call it on owner .*name=worker1.*to_here"):
        ref.local_value()


# -- names, equality, help


@inside
def test_str_has_torchs_form_and_repr_names_the_owner() -> None:
    unique = r"GloballyUniqueId\(created_on=0, local_id=\d+\)"
    mine, far, made = rpc.RRef(1), rpc.remote(OTHER, int), rpc.remote(0, int)
    assert re.fullmatch(rf"OwnerRRef\({unique}\)", str(mine))
    assert re.fullmatch(rf"OwnerRRef\({unique}\)", str(made))
    assert re.fullmatch(rf"UserRRef\(RRefId = {unique}, ForkId = {unique}\)", str(far))
    assert re.fullmatch(r"OwnerRRef\(\(0, \d+\), owner='worker0'\)", repr(mine))
    assert re.fullmatch(r"UserRRef\(\(0, \d+\), owner='worker1'\)", repr(far))
    theirs = rpc.rpc_sync(OTHER, make_ref, args=(1,))
    assert "created_on=1" in str(theirs)


@inside
def test_str_tells_every_two_references_apart() -> None:
    refs = [rpc.RRef(n) for n in range(20)] + [rpc.remote(to, int) for n in range(20) for to in (0, OTHER)]
    refs += [rpc.rpc_sync(OTHER, make_ref, args=(n,)) for n in range(20)]
    assert len({str(ref) for ref in refs}) == len(refs)
    assert len({repr(ref) for ref in refs}) == len(refs)


@inside
def test_equality_and_hash_are_those_of_the_python_object() -> None:
    value = Box(1)
    a, b = rpc.RRef(value), rpc.RRef(value)
    home = rpc.rpc_sync(OTHER, identity, args=(a,))
    assert a == a
    assert hash(a) == hash(a)
    assert a not in (b, home)
    assert len({a, b, home, a}) == 3
    assert home.local_value() is value


@inside
def test_every_reference_is_an_rref_and_a_pyrref() -> None:
    for ref in (rpc.RRef(1), rpc.remote(OTHER, int), rpc.remote(0, int), rpc.rpc_sync(OTHER, make_ref, args=(1,))):
        assert isinstance(ref, rpc.RRef)
        assert isinstance(ref, rpc.PyRRef)
    assert str(rpc.RRef[int]).endswith("RRef[int]")  # it can be subscribed, for annotations


def test_every_method_of_torchs_references_is_there_and_has_a_help_text() -> None:
    theirs = {name for name in dir(torch._C._distributed_rpc.PyRRef) if not name.startswith("_")}
    theirs |= {"_get_future", "_get_type"}
    for name in theirs - {"backward"}:
        assert len(inspect.getdoc(getattr(rpc.RRef, name)) or "") > 30, name
        at_hand = inspect.signature(getattr(rpc.RRef, name)).parameters
        assert {"timeout", "blocking"} & set(at_hand) or list(at_hand) == ["self"], name
    text = inspect.getdoc(rpc.RRef) or ""
    assert all(word in text for word in ("owner", "type_hint", "to_here", "shutdown"))


# -- the future of its creation, and the type of its object


@inside
def test_get_future_is_done_when_the_object_has_been_made() -> None:
    for to in (OTHER, 0):
        with opened(f"future {to}", to):
            ref = rpc.remote(to, gated, args=(f"future {to}", 5))
            future = ref._get_future()
            assert isinstance(future, torch.futures.Future)
            assert future is ref._get_future()
            assert not future.done()
            ran: list[Any] = []
            future.then(lambda f: f.wait()).add_done_callback(ran.append)
        assert future.wait() is None
        until(ran.__len__)
        assert ran[0].wait() is None
        assert ref.to_here().value == 5
        assert ref._get_future().wait() is None


@inside
def test_get_future_raises_the_error_of_the_creation() -> None:
    for to in (OTHER, 0):
        with opened(f"failure {to}", to):
            ref = rpc.remote(to, gated_failure, args=(f"failure {to}",))
            future = ref._get_future()
        for _ in range(2):
            with pytest.raises(LookupError, match="no box"):
                future.wait()
            with pytest.raises(LookupError, match="no box"):  # and so does every later use
                ref.to_here()
        late = rpc.remote(to, fails, args=("no box",))
        until(late._get_future().done)
        with pytest.raises(LookupError, match="no box"):
            late._get_future().wait()
    with opened("timeout"):
        slow: rpc.RRef[Any] = rpc.remote(OTHER, gated, args=("timeout",), timeout=0.05)
        with pytest.raises(rpc.RPCTimeoutError, match="RPC ran for more than"):
            slow._get_future().wait()


@inside
def test_get_future_of_a_reference_that_was_not_made_by_remote() -> None:
    mine = rpc.RRef(Box(5))
    assert mine._get_future().done()
    assert mine._get_future().wait() is None
    assert rpc.rpc_sync(OTHER, future_of, args=(mine,)) is None
    theirs = rpc.rpc_sync(OTHER, make_ref, args=(1,))
    assert theirs._get_future().done()
    assert theirs._get_future().wait() is None


@inside
def test_get_type_is_the_type_of_the_object_on_its_owner() -> None:
    for ref in (rpc.RRef(Box(1)), rpc.remote(OTHER, Box, args=(1,)), rpc.remote(0, Box, args=(1,))):
        assert ref._get_type() is Box
        assert ref._get_type(blocking=True) is Box
        assert ref._get_type(blocking=False).wait() is Box
        assert ref._get_type(1.0, False).wait() is Box
    assert rpc.remote(OTHER, torch.ones, args=(2,))._get_type() is torch.Tensor
    assert rpc.remote(OTHER, Count)._get_type() is Count
    assert rpc.rpc_sync(OTHER, type_of, args=(rpc.RRef([1]),)) is list


@inside
def test_get_type_asks_the_owner_once() -> None:
    ref = rpc.remote(OTHER, Box, args=(1,))
    first = ref._get_type(blocking=False)
    first.wait()
    assert ref._get_type(blocking=False) is first
    sent = current().worker.peers[1].sent
    assert ref._get_type() is Box
    assert current().worker.peers[1].sent == sent


def ask_type(ref: Any, blocking: bool, timeout: float = -1.0) -> Any:
    """Asks for a type; without blocking, what is raised must come from the future."""
    asked = ref._get_type(timeout, blocking)
    assert not blocking
    return asked.wait()


@inside
def test_get_type_raises_the_error_of_the_creation() -> None:
    for to in (OTHER, 0):
        for blocking in (True, False):
            ref = rpc.remote(to, fails, args=("no box",))
            with pytest.raises(LookupError, match="no box"):
                ask_type(ref, blocking)


@inside
def test_get_type_that_ran_out_of_time_may_be_asked_for_again() -> None:
    with opened("type"):
        ref = rpc.remote(OTHER, gated, args=("type", 1))
        for blocking in (True, False):
            with pytest.raises(rpc.RPCTimeoutError, match="RPC ran for more than"):
                ask_type(ref, blocking, 0.05)
    assert ref._get_type() is Box


# -- type_hint and scripted modules


def _interface_and_module() -> Any:
    class Interface(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[empty-body]
            pass

    class Other(torch.nn.Module):
        def backward_only(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[empty-body]
            pass

    class Plus(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    return torch.jit.interface(Interface), torch.jit.interface(Other), torch.jit.script(Plus())


@inside
def test_type_hint_of_a_scripted_module_is_an_interface_that_it_has() -> None:
    interface, other, module = _interface_and_module()
    for ref in (rpc.RRef(module, type_hint=interface), rpc.RRef(module, interface), rpc.RRef(module)):
        assert ref.local_value() is module
        assert ref.rpc_sync().forward(torch.ones(1)) == 2
        assert rpc.rpc_sync(OTHER, type_of, args=(ref,)) is type(module)
    for wrong in (other, int, torch.nn.Module):
        with pytest.raises(RuntimeError, match=r"Plus.*does not have the interface.*torch.jit.interface"):
            rpc.RRef(module, type_hint=wrong)


@inside
def test_type_hint_of_any_other_value_is_a_type() -> None:
    for hint in (int, list[int], dict[str, torch.Tensor], None):
        assert rpc.RRef(3, type_hint=hint).to_here() == 3
    for wrong in (3, "int"):
        with pytest.raises(TypeError, match="type_hint must be a type"):
            rpc.RRef(3, type_hint=wrong)


# -- proxies


@inside
def test_a_call_of_a_proxy_is_a_call_of_the_object() -> None:
    for ref in (rpc.remote(OTHER, Box, args=(5,)), rpc.RRef(Box(5))):
        assert ref.rpc_sync()(2) == 7
        assert ref.rpc_sync()(more=3) == 8
        assert ref.rpc_sync().__call__(2) == 7
        assert ref.rpc_async()(2).wait() == 7
        assert ref.rpc_async().__call__(2).wait() == 7
        assert ref.remote()(2).to_here() == 7
        assert ref.remote().__call__().to_here() == 5
    module = rpc.remote(OTHER, torch.nn.Linear, args=(3, 2))
    assert module.rpc_sync()(torch.ones(4, 3)).shape == (4, 2)
    with pytest.raises(AttributeError, match="'int' object has no attribute '__call__'"):
        rpc.remote(OTHER, int).rpc_sync()()  # type: ignore[operator]


@inside
def test_a_call_of_an_actor_through_a_proxy_goes_through_its_mailbox() -> None:
    ref = Count.spawn(OTHER)
    futures = [ref.rpc_async()(1) for _ in range(30)]
    assert sorted(f.wait() for f in futures) == list(range(1, 31))
    ref.tell()(10)
    assert ref.rpc_sync()(0) == 40


@inside
def test_an_attribute_that_is_no_method_says_how_to_fetch_it() -> None:
    for ref in (rpc.remote(OTHER, Box, args=(5,)), rpc.RRef(Box(5))):
        for name in ("value", "color"):
            with pytest.raises(TypeError, match=rf"'{name}' of the Box on .*cannot be called.*ref.local_value"):
                getattr(ref.rpc_sync(), name)()
        assert rpc.rpc_sync(ref.owner(), lambda ref: ref.local_value().value, args=(ref,)) == 5  # as it says


@inside
def test_an_attribute_that_does_not_exist_is_the_objects_attribute_error() -> None:
    for ref in (rpc.remote(OTHER, Box, args=(5,)), Count.spawn(OTHER)):
        for attempt in uses("nothing_such")[1:4]:
            with pytest.raises(AttributeError, match=r"'(Box|Count)' object has no attribute 'nothing_such'") as caught:
                attempt(ref)
            assert "worker1" in str(caught.value.__cause__)
            assert "getattr" in str(caught.value.__cause__)
    with pytest.raises(KeyError, match="no key") as failed:
        rpc.remote(OTHER, Box, args=(5,)).rpc_sync().missing_inside()
    assert "in missing_inside" in str(failed.value.__cause__)


@inside
def test_a_reference_itself_says_how_the_objects_methods_are_called() -> None:
    with pytest.raises(AttributeError, match=r"rpc_sync\(\).get"):
        rpc.remote(OTHER, Box, args=(5,)).get()


@inside
def test_looking_at_a_proxy_asks_its_owner_nothing() -> None:
    ref = rpc.remote(OTHER, Box, args=(5,))
    ref.to_here()
    worker = current().worker
    sent = worker.peers[1].sent
    proxy = ref.rpc_sync()
    assert callable(proxy)
    assert not hasattr(proxy, "_wrapped_async_rpc_function")
    assert not hasattr(proxy, "__wrapped__")
    assert not hasattr(proxy, "__torch_function__")
    assert "UserRRef" in repr(proxy)
    assert "rpc_sync().get" in repr(proxy.get)
    assert inspect.unwrap(proxy) is proxy
    assert copy.copy(proxy) is proxy
    assert worker.peers[1].sent == sent


@inside
def test_an_asynchronous_method_answers_later_through_each_proxy() -> None:
    ref = rpc.remote(OTHER, Box, args=(5,))
    assert ref.rpc_sync().later(1) == 6
    assert ref.rpc_async().later(1).wait() == 6
    assert ref.remote().later(1).to_here() == 6
    assert rpc.rpc_sync(OTHER, ref.rpc_sync().later, args=(1,)) == 6


@inside
def test_a_proxys_method_sent_as_a_function_may_call_its_own_owner() -> None:
    ref = rpc.remote(OTHER, Box, args=(5,))
    mine = rpc.RRef(2)
    assert rpc.rpc_async(ref.owner(), ref.rpc_sync().where).wait() == OTHER
    assert rpc.rpc_async(ref.owner(), ref.rpc_sync().add, args=(mine,)).wait() == 7  # which calls back the caller
    assert rpc.rpc_sync(ref.owner(), ref.rpc_sync().add, args=(ref.remote().get(),)) == 10
    assert rpc.rpc_sync(0, ref.rpc_sync().where) == OTHER  # by way of the caller itself
    own = rpc.RRef(Box(1))
    assert rpc.rpc_sync(OTHER, own.rpc_sync().where) == "worker0"
    actor = Count.spawn(OTHER)
    assert rpc.rpc_sync(actor.owner(), actor.rpc_sync(), args=(3,)) == 3


@inside
def test_a_proxys_method_sent_as_a_function_keeps_its_timeout() -> None:
    ref = rpc.remote(OTHER, Box, args=(5,))
    assert rpc.rpc_sync(OTHER, ref.rpc_sync(timeout=5).slow, args=(0.01,)) == 5
    with raised_within(5), pytest.raises(rpc.RPCTimeoutError, match=r"\(50 ms\).*slow on worker .worker1"):
        rpc.rpc_sync(OTHER, ref.rpc_sync(timeout=0.05).slow, args=(0.4,))
    # the call and what its handler calls run out of time together, and either may be the first to say so
    with raised_within(5), pytest.raises(rpc.RPCTimeoutError, match=r"\(50 ms\)|that its handler had left"):
        rpc.rpc_sync(0, ref.rpc_sync().slow, args=(0.4,), timeout=0.05)
    time.sleep(0.4)


@inside
def test_a_proxys_method_is_sent_as_a_function_through_each_verb() -> None:
    ref = rpc.remote(OTHER, Box, args=(5,))
    for to in (OTHER, 0):
        made = rpc.remote(to, ref.rpc_sync().get)
        assert made.to_here() == 5
        assert rpc.remote(to, ref.rpc_sync()).to_here() == 5
        assert rpc.rpc_sync(to, ref.rpc_sync(), args=(1,)) == 6  # the proxy itself
        assert rpc.rpc_sync(to, called, args=(ref.rpc_sync().get,)) == 5  # as an argument
        assert rpc.rpc_sync(to, called, args=(ref.rpc_sync(), 2)) == 7
        assert rpc.rpc_sync(to, ref.remote().get).to_here() == 5  # a reference comes back
        rpc.rpc_sync(to, ref.tell().get)
    with pytest.raises(AttributeError, match="nothing_such"):
        rpc.rpc_sync(OTHER, ref.rpc_sync().nothing_such)  # type: ignore[attr-defined]


# -- what is refused


class Module(torch.nn.Module):
    def __init__(self, ref: Any) -> None:
        super().__init__()
        self.layer, self.ref = torch.nn.Linear(2, 2), ref


@inside
def test_pickle_save_and_copy_of_a_reference_say_what_to_do() -> None:
    attempts: list[Callable[[Any], Any]] = [
        pickle.dumps,
        lambda what: pickle.dumps(what, protocol=2),
        cloudpickle.dumps,
        copy.deepcopy,
        lambda what: torch.save(what, io.BytesIO()),
    ]
    refs: tuple[rpc.RRef[Any], ...] = (rpc.RRef(1), rpc.remote(OTHER, int))
    for ref in refs:
        for what in (ref, [ref], {"a": (1, [ref])}, Module(ref), ref.rpc_sync().get, [ref.rpc_sync()]):
            for attempt in attempts:
                with pytest.raises(RuntimeError, match=r"Can not pickle .*RRef.* cannot be saved.*to_here\(\)"):
                    attempt(what)
        with pytest.raises(RuntimeError, match=r"Can not pickle .* cannot be saved or copied.*to_here\(\)"):
            copy.copy(ref)
    assert counts()["forks"] == counts()["children"] == 0


@inside
def test_a_containers_shallow_copy_and_a_modules_state_are_no_copies_of_the_reference() -> None:
    ref = rpc.remote(OTHER, int)
    assert copy.copy([ref])[0] is ref
    state = Module(ref).state_dict()
    assert sorted(state) == ["layer.bias", "layer.weight"]
    torch.save(state, io.BytesIO())


# -- the arguments of remote


def seen_after(name: str, values: list[Any]) -> list[Any]:
    assert gate(name).wait(20)
    return values


@inside
def test_small_arguments_of_remote_are_copied_at_the_call() -> None:
    for to in (OTHER, 0):
        tensor, numbers, plain = torch.zeros(8000), torch.zeros(2, dtype=torch.int64), [1]
        with opened(f"small {to}", to):
            ref = rpc.remote(to, seen_after, args=(f"small {to}", [tensor, numbers, plain]))
            tensor.fill_(7)
            numbers.fill_(7)
            plain.append(2)
        got = ref.to_here()
        assert torch.count_nonzero(got[0]) == torch.count_nonzero(got[1]) == 0
        assert got[2] == [1]


@inside
def test_large_arguments_of_remote_may_be_changed_once_the_owner_has_confirmed() -> None:
    for n in range(5):
        tensor = torch.zeros(1 << 20)
        ref = rpc.remote(OTHER, identity, args=(tensor,))
        until(ref.confirmed_by_owner)
        tensor.fill_(7)
        assert torch.count_nonzero(ref.to_here()) == 0, n


@inside
def test_arguments_of_remote_to_oneself_are_copied_at_the_call() -> None:
    tensor = torch.zeros(1 << 20)
    with opened("own arguments", 0):
        ref = rpc.remote(0, seen_after, args=("own arguments", [tensor]))
        tensor.fill_(7)
    assert torch.count_nonzero(ref.to_here()[0]) == 0


# -- a creation that is late, or fails: the next use raises


def uses(method: str = "get") -> list[Callable[[Any], Any]]:
    return [
        lambda ref: ref.to_here(),
        lambda ref: getattr(ref.rpc_sync(), method)(),
        lambda ref: getattr(ref.rpc_async(), method)().wait(),
        lambda ref: getattr(ref.remote(), method)().to_here(),
        lambda ref: ref._get_type(),
        lambda ref: ref._get_future().wait(),
    ]


def passes() -> list[Callable[[Any], Any]]:
    return [
        lambda ref: rpc.rpc_sync(OTHER, value_of, args=(ref,)),
        lambda ref: rpc.rpc_async(OTHER, identity, args=({"a": [ref]},)).wait(),
        lambda ref: rpc.remote(OTHER, value_of, kwargs={"ref": ref}).to_here(),
        lambda ref: rpc.rpc_sync(0, value_of, args=(ref,)),
        lambda ref: rpc.rpc_sync(OTHER, ref.rpc_sync().get),
    ]


def has_given_up(ref: Any) -> Callable[[], bool]:
    def given_up() -> bool:
        try:
            ref._handle.check()
        except rpc.RPCTimeoutError:
            return True
        return False

    return given_up


@inside
def test_a_timeout_of_remote_is_raised_at_the_next_use_and_when_passed_on() -> None:
    for to in (OTHER, 0):
        with opened("remote timeout", to):
            ref = rpc.remote(to, gated, args=("remote timeout", 5), timeout=0.05)
            until(has_given_up(ref))
            for attempt in [*uses()[: 6 if to else 5], *passes()]:  # on the owner, the future is the object's own
                with raised_within(5), pytest.raises(rpc.RPCTimeoutError, match=r"set timeout \(50 ms\).*gated"):
                    attempt(ref)
        until(lambda: counts()["children"] == 0)


@inside
def test_the_owners_first_use_waits_no_longer_than_the_creations_time() -> None:
    first_uses: list[Callable[[Any], Any]] = [
        lambda ref: ref.local_value(),
        lambda ref: ref.to_here(),
        lambda ref: ref.to_here(timeout=0),
    ]
    for use in first_uses:
        with opened("own timeout", 0):
            ref = rpc.remote(0, gated, args=("own timeout", 5), timeout=0.05)
            with raised_within(5), pytest.raises(rpc.RPCTimeoutError, match=r"set timeout \(50 ms\).*gated"):
                use(ref)
        GATES.clear()


def failure_of(ref: Any, use: Callable[[Any], Any]) -> str:
    with pytest.raises(LookupError, match="no box") as caught:
        use(ref)
    return "".join(traceback.format_exception(caught.value))


@inside
def test_an_error_of_creation_that_cannot_be_copied_is_raised_all_the_same() -> None:
    own = rpc.remote(0, fails_oddly)
    for use in (lambda ref: ref.local_value(), *uses()[:5]):
        with pytest.raises(TwoArguments):
            use(own)
        assert "in fails_oddly" in failure_of(own, use)
    there = rpc.remote(OTHER, fails_oddly)
    for use in (*uses(), *uses()):
        assert "in fails_oddly" in failure_of(there, use)


@inside
def test_an_error_of_creation_tells_the_owner_and_others_where_it_happened_and_holds_no_frames() -> None:
    argument = Box(1)
    gone = weakref.ref(argument)
    own = rpc.remote(0, gated_failure, args=("frames",))
    holder = rpc.RRef(argument)
    failed = rpc.remote(0, fails_with, args=(holder,))
    del argument, holder
    open_gate("frames")
    for ref in (own, failed):
        for use in (*uses()[:5], *passes()):
            text = failure_of(ref, use)
            assert "in gated_failure" in text or "in fails_with" in text, text
    gc.disable()
    try:
        until(lambda: gone() is None, 3)  # although the error is kept, and without the collector
    finally:
        gc.enable()


@inside
def test_an_error_of_creation_is_raised_when_the_reference_is_passed_on() -> None:
    for to in (OTHER, 0):
        ref = rpc.remote(to, fails, args=("no box",))
        with pytest.raises(LookupError, match="no box"):
            ref._get_future().wait()
        for attempt in passes():
            with pytest.raises(LookupError, match="no box"):
                attempt(ref)


def try_all(ref: Any) -> list[str]:
    texts = []
    for use in uses()[:5]:
        with pytest.raises(LookupError) as caught:
            use(ref)
        texts.append(f"{caught.value} {caught.value.__cause__}")
    return texts


def test_a_third_worker_meets_the_error_of_creation_at_every_use() -> None:
    def program(rank: int) -> None:
        if rank != 0:
            return
        with opened("third", 1):
            ref = rpc.remote(1, gated_failure, args=("third",))
            future = rpc.rpc_async(2, try_all, args=(ref,))  # while it is being made
            assert not ref.confirmed_by_owner()
        texts = future.wait()
        assert len(texts) == 5
        assert all("no box" in text and "gated_failure" in text for text in texts), texts
        kept = rpc.remote(2, identity, args=(rpc.remote(1, gated, args=("third", 1)),)).to_here()
        assert kept.to_here().value == 1

    run_world(program, 3)


def test_a_third_worker_waits_for_an_object_whose_maker_has_given_up() -> None:
    def program(rank: int) -> None:
        if rank != 0:
            return
        with opened("given up", 1):
            ref = rpc.remote(1, gated, args=("given up", 5), timeout=0.3)
            future = rpc.rpc_async(2, value_of, args=(ref,))  # passed on in time
            with pytest.raises(rpc.RPCTimeoutError, match="gated"):
                ref._get_future().wait()
        assert future.wait() == 5
        with pytest.raises(rpc.RPCTimeoutError, match="gated"):
            ref.to_here()

    run_world(program, 3)


# -- after shutdown


LEFT: dict[str, Any] = {}


def leave_behind(name: str, value: Any) -> None:
    LEFT[name] = value


uses_by_message: list[Callable[[Any], Any]] = [
    *uses()[1:4],
    lambda ref: ref.tell().get(),
    *uses()[:1],
    lambda ref: ref._get_type(),
    lambda ref: ref._get_type(blocking=False),
]


def _use_after_shutdown(rank: int, plan: Any) -> None:
    worlds.join(rank, plan)
    mine, far, own = rpc.RRef(Box(1)), rpc.remote(1 - rank, Box, args=(2,)), rpc.remote(rank, Box, args=(3,))
    failed = rpc.remote(1 - rank, fails, args=("no box",))
    far.to_here()
    with pytest.raises(LookupError):
        failed.to_here()
    until(far.confirmed_by_owner)
    asked = rpc.remote(1 - rank, Box, args=(2,))
    assert asked._get_type() is Box
    futures = [mine._get_future(), far._get_future()]
    rpc.shutdown()

    assert (mine.is_owner(), far.is_owner()) == (True, False)
    assert (mine.owner_name(), far.owner_name()) == (f"worker{rank}", f"worker{1 - rank}")
    assert far.owner().id == 1 - rank
    assert (mine.confirmed_by_owner(), far.confirmed_by_owner()) == (True, True)
    assert (repr(mine)[:5], str(far)[:4]) == ("Owner", "User")
    for ref, value in ((mine, 1), (own, 3)):
        assert ref.local_value() is ref.to_here()
        assert ref.local_value().value == value
        assert ref._get_type() is ref._get_type(blocking=False).wait() is Box
        assert ref._get_future().wait() is None
    assert asked._get_type() is Box
    assert [f.wait() for f in futures] == [None, None]
    with pytest.raises(RuntimeError, match="Call it on owner"):
        far.local_value()
    for ref in (mine, far):
        for attempt in uses_by_message[:4]:
            with raised_within(5), pytest.raises(rpc.NotAMemberError, match=r"worker\d.*has shut down"):
                attempt(ref)
    for attempt in uses_by_message[4:]:
        with raised_within(5), pytest.raises(rpc.NotAMemberError, match=r"worker\d.*has shut down"):
            attempt(far)
    with pytest.raises(LookupError, match="no box"):
        failed.to_here()
    with pytest.raises(rpc.NotAMemberError, match="init_rpc"):
        rpc.RRef(1)
    with pytest.raises(RuntimeError, match="Cannot call fork an UserRRef after deletion"):
        pickle.dumps(far)


def test_after_shutdown_a_reference_tells_what_is_known_here_and_the_rest_raises() -> None:
    with World(2, join=False) as world:
        for rank in range(2):
            world.start(rank, _use_after_shutdown, rank, world.plan)
        world.results()


def _use_in_the_next_session(rank: int, plan: Any) -> None:
    worlds.join(rank, plan)
    mine, far = rpc.RRef(Box(1)), rpc.remote(1 - rank, Box, args=(2,))
    far.to_here()
    rpc.shutdown()
    plan.init_method += "-again"
    worlds.join(rank, plan)
    for ref in (mine, far):
        with pytest.raises(rpc.NotAMemberError, match="references are to be made anew"):
            rpc.rpc_sync(1 - rank, identity, args=([ref],))
        with pytest.raises(rpc.NotAMemberError, match="has shut down"):
            ref.rpc_sync().get()
    assert rpc.remote(1 - rank, Box, args=(2,)).rpc_sync().get() == 2
    rpc.shutdown()


def test_a_reference_of_an_earlier_session_is_not_taken_into_the_next() -> None:
    with World(2, join=False) as world:
        for rank in range(2):
            world.start(rank, _use_in_the_next_session, rank, world.plan)
        world.results()


def _held_up(rank: int, plan: Any) -> None:
    worlds.join(rank, plan)
    ref = rpc.remote(0, gated, args=("shutdown", 1), timeout=0)
    home = rpc.rpc_sync(0, identity, args=(ref,))
    errors: list[BaseException] = []

    def wait_for(use: Callable[[], Any]) -> None:
        try:
            use()
        except BaseException as e:
            errors.append(e)

    rpc._set_rpc_timeout(0)
    waits: list[Callable[[], Any]] = [ref.local_value, home.local_value, ref._get_future().wait, home.to_here]
    threads = [threading.Thread(target=wait_for, args=(use,)) for use in waits]
    for thread in threads:
        thread.start()
    closing = threading.Thread(target=rpc.shutdown, kwargs={"graceful": False})
    closing.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    open_gate("shutdown")
    closing.join(20)
    assert [type(e) for e in errors] == [rpc.NotAMemberError] * len(waits), errors
    for use in waits:
        with raised_within(5), pytest.raises(rpc.NotAMemberError, match="shut down"):
            use()


def test_whoever_waits_for_an_object_at_shutdown_is_told() -> None:
    with World(1, join=False) as world:
        world.on(0, _held_up, 0, world.plan)


class Stopped(rpc.Actor):
    pass


def _left_in_globals_and_cycles(rank: int, plan: Any) -> None:
    worlds.join(rank, plan)
    values = [Box(1), Box(2), torch.nn.Linear(2, 2)]
    freed = [weakref.ref(value) for value in values]
    refs: list[Any] = [rpc.RRef(value) for value in values]
    made: list[rpc.RRef[Any]] = [rpc.remote(rank, Box, args=(3,)), rpc.remote(rank, Stopped), rpc.RRef(Stopped())]
    freed += [weakref.ref(ref.local_value()) for ref in made]
    far = [rpc.remote(1 - rank, Box, args=(4,)), rpc.remote(1 - rank, Stopped)]
    for ref in [*refs, *made]:
        rpc.rpc_sync(1 - rank, leave_behind, args=(f"theirs {id(ref)}", ref))  # the other one never drops it
    LEFT["far"] = far
    ring: list[Any] = [*refs, far[0]]
    ring.append(ring)
    LEFT["ring"] = ring
    rpc.shutdown()

    LEFT["mine"] = [refs, made]
    del values, refs, made, ring, ref
    gc.collect()
    assert all(one() is not None for one in freed)  # this process holds them itself
    del LEFT["ring"], LEFT["mine"]

    def gone() -> bool:
        gc.collect()
        return all(one() is None for one in freed)

    until(gone, 5)
    assert LEFT["far"] is far  # and what it holds of the other's does not keep its own


def test_after_shutdown_an_object_that_its_process_does_not_hold_is_freed() -> None:
    with World(2, join=False) as world:
        for rank in range(2):
            world.start(rank, _left_in_globals_and_cycles, rank, world.plan)
        world.results()


def _ordinary_script(rank: int, plan: Any) -> None:
    worlds.join(rank, plan)
    LEFT["held"] = [rpc.remote(1 - rank, Box, args=(n,)) for n in range(100)]
    assert LEFT["held"][99].rpc_sync().get() == 99
    LEFT["held"].append(LEFT["held"])
    rpc.shutdown()


def _late(rank: int, plan: Any) -> None:
    worlds.join(rank, plan)
    if rank == 0:
        with opened("late replies"):
            ref = rpc.remote(OTHER, gated, args=("late replies", 5), timeout=0.05)
            kept = rpc.rpc_async(OTHER, gated, args=("late replies", 5))
            with pytest.raises(rpc.RPCTimeoutError):
                ref._get_future().wait()
            with pytest.raises(rpc.RPCTimeoutError):
                rpc.rpc_sync(OTHER, gated, args=("late replies",), timeout=0.05)
            made = rpc.remote(OTHER, Box, args=(1,))
            with pytest.raises(rpc.RPCTimeoutError):
                made.rpc_sync(timeout=0.05).add(rpc.remote(OTHER, gated, args=("late replies", 5)))
        kept.wait()
        assert made.rpc_sync().get() == 1
    rpc.shutdown()


def test_late_answers_and_late_objects_are_dropped_quietly() -> None:
    with World(2, join=False) as world:
        for rank in range(2):
            world.start(rank, _late, rank, world.plan)
        outcomes = world.outcomes()
    assert [o.traceback for o in outcomes] == ["", ""]
    assert [o.stderr for o in outcomes] == ["", ""]


def test_references_that_are_held_at_shutdown_are_no_error_and_no_warning() -> None:
    with World(2, join=False) as world:
        for rank in range(2):
            world.start(rank, _ordinary_script, rank, world.plan)
        outcomes = world.outcomes()
    assert [o.traceback for o in outcomes] == ["", ""]
    assert [o.stderr for o in outcomes] == ["", ""]
