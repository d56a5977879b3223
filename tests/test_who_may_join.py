"""What `init_rpc` refuses, at once and on every rank: names, sizes, versions, options, device maps. Real processes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.rpc

import actorrpc as rpc
from actorrpc import session
from actorrpc.process import foreign
from actorrpc.runtime import router
from actorrpc.services import roster
from actorrpc.services.devices import Placement
from actorrpc.wire import envelope
from tests.joining import free_port
from tests.worlds import STANDING, World, until

theirs: Any = torch.distributed.rpc
_SOON = 8.0
"""Seconds in which a refusal comes; the worlds below would wait for 20."""
_rounds = itertools.count()

Choice = dict[str, Any]
"""What one rank is told: keywords of `init_rpc` and, under "options", of its options; under "here", what to patch."""


@pytest.fixture(scope="module")
def processes() -> Iterator[World]:
    with World(3, join=False, timeout=60) as world:
        STANDING.update(world.pid(rank) for rank in range(3))
        yield world


@pytest.fixture
def meet(processes: World) -> Callable[..., list[Any]]:
    """Has three processes call `init_rpc` as they are told; see `_attempt` for what comes back."""

    def together(*choices: Choice, then: Callable[[], Any] | None = None, **common: Any) -> list[Any]:
        method = f"file://{processes.folder}/round-{next(_rounds)}"
        for rank in range(3):
            choice = {**(choices[rank] if rank < len(choices) else {})}
            choice["options"] = {**common, **choice.get("options", {})}
            processes.start(rank, _attempt, rank, method, choice, then)
        return processes.results()

    return together


class Came:
    """What came of one rank's `init_rpc`."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.took = 0.0
        self.log: list[str] = []
        self.value: Any = None

    @property
    def text(self) -> str:
        assert self.error is not None
        return str(self.error)


def _attempt(rank: int, method: str, choice: Choice, then: Callable[[], Any] | None) -> Came:
    came, options, choice = Came(), {"init_method": method, "init_timeout": 20, **choice["options"]}, dict(choice)
    make = choice.pop("make", rpc.TensorPipeRpcBackendOptions)
    told = {
        "name": f"w{rank}",
        "rank": rank,
        "world_size": 3,
        **{k: v for k, v in choice.items() if k not in ("options", "here")},
    }
    with _patched(choice.get("here", {})), _log() as came.log:
        began = time.monotonic()
        try:
            rpc.init_rpc(**told, rpc_backend_options=make(**options))
        except Exception as e:
            came.error = e
            assert not session.is_available()
            assert foreign() is None
        came.took = time.monotonic() - began
        if came.error is None:
            came.value = then() if then is not None else None
        rpc.shutdown()  # after a failure it does nothing
    return came


@contextlib.contextmanager
def _patched(what: dict[Any, Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for (where, name), value in what.items():
            patch.setattr(where, name, value)
        yield


@contextlib.contextmanager
def _log() -> Iterator[list[str]]:
    lines: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keeping(logging.WARNING)
    logging.getLogger("actorrpc").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("actorrpc").removeHandler(handler)


def gpus(count: int) -> dict[Any, Any]:
    """What makes a process believe that it has so many GPUs."""
    return {(torch.cuda, "device_count"): functools.partial(int, count)}


def refused(outcomes: list[Came], *words: str, kind: type[BaseException] = rpc.RendezvousError) -> None:
    """All ranks raised soon, and every text has all the words."""
    for came in outcomes:
        assert isinstance(came.error, kind), came.error
        assert came.took < _SOON
        for word in words:
            assert word in came.text, (word, came.text)


def joined(outcomes: list[Came]) -> list[Any]:
    for came in outcomes:
        assert came.error is None, came.error
    return [came.value for came in outcomes]


Meet = Callable[..., list[Any]]


# -- names, ranks, sizes


@pytest.mark.parametrize("name, rank", [("a b", 0), ("x" * 128, 0), ("x" * 128, 1), ("tränen", 1), ("", 2), (5, 2)])
def test_a_bad_name_is_refused_at_once_on_every_rank(name: Any, rank: int, meet: Meet) -> None:
    outcomes = meet(*({"name": name} if i == rank else {} for i in range(3)))
    refused([came for i, came in enumerate(outcomes) if i != rank], f"(rank {rank}, ", "InvalidNameError: ")
    (own,) = outcomes[rank : rank + 1]
    refused([own], "orker name", kind=ValueError)
    assert not isinstance(own.error, rpc.RendezvousError)


def test_a_name_of_127_characters_with_all_kinds_of_them_is_taken(meet: Meet) -> None:
    long = "aZ09_:-".ljust(127, "x")
    assert joined(meet({"name": long}, then=lambda: rpc.rpc_sync(long, abs, args=(-1,)))) == [1, 1, 1]


@pytest.mark.parametrize("pair", [(0, 1), (0, 2), (1, 2)])
def test_a_name_of_two_workers_is_refused_on_every_rank_naming_both(pair: tuple[int, int], meet: Meet) -> None:
    low, high = pair
    refused(
        meet(*({"name": "same"} if i in pair else {} for i in range(3))),
        'name "same" is not unique',
        f"Workers {low} and {high} share the same name",
    )


def test_another_world_size_is_refused_on_every_rank_naming_whose(meet: Meet) -> None:
    refused(meet({}, {}, {"world_size": 4}), '"w2" (rank 2, ', "world_size=4, rank 0 world_size=3")


def test_who_comes_to_a_world_that_is_complete_is_refused_alone(processes: World) -> None:
    folder = Path(tempfile.mkdtemp(dir=processes.folder))
    method = f"file://{folder}/meet"
    options = functools.partial(rpc.RpcBackendOptions, init_method=method, init_timeout=20)

    def member(rank: int) -> int:
        rpc.init_rpc(f"m{rank}", rank=rank, world_size=2, rpc_backend_options=options())
        (folder / f"in-{rank}").touch()
        until((folder / "refused").exists, 30)
        value: int = rpc.rpc_sync(1 - rank, abs, args=(-4,))
        rpc.shutdown()
        return value

    def late() -> str:
        until(lambda: all((folder / f"in-{rank}").exists() for rank in range(2)), 30)
        try:
            with pytest.raises(rpc.RendezvousError) as caught:
                rpc.init_rpc("late", rank=1, world_size=2, rpc_backend_options=options())
        finally:
            (folder / "refused").touch()
        return str(caught.value)

    for rank in range(2):
        processes.start(rank, member, rank)
    processes.start(2, late)
    one, other, text = processes.results()
    assert (one, other) == (4, 4)
    assert "two workers have rank 1" in text
    assert '"late"' in text


# -- versions


def other_protocol(version: int) -> dict[Any, Any]:
    """What makes a process speak another version of the protocol."""
    mark = b"a" + bytes([version])
    return {(envelope, "PROTOCOL"): version, (envelope, "MARK"): mark, (router, "MARK"): mark}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_of_another_protocol_version_is_refused_at_once_on_every_rank(rank: int, meet: Meet) -> None:
    other = {"here": {**other_protocol(77), (session, "VERSION"): "7.7"}}
    outcomes = meet(*(other if i == rank else {} for i in range(3)))
    comer, first = (77, envelope.PROTOCOL) if rank else (envelope.PROTOCOL, 77)
    refused(outcomes, f"speaks version {comer} of the protocol, rank 0 version {first}", "install one version", "7.7")


def test_other_versions_of_python_and_torch_are_one_warning_on_rank_0_that_names_who_has_what(meet: Meet) -> None:
    def versions(**more: str) -> Choice:
        return {"here": {(session, "versions_here"): lambda package: {**roster.versions_here(package), **more}}}

    outcomes = meet({}, versions(torch="1.2.3"), versions(python="3.99.1"))
    joined(outcomes)
    (line,) = outcomes[0].log
    for word in ("different versions", '1.2.3 on "w1" (rank 1)', '3.99 on "w2" (rank 2)', '"w0" (rank 0)'):
        assert word in line
    assert outcomes[1].log == outcomes[2].log == []


def test_workers_of_one_version_are_not_warned_of(meet: Meet) -> None:
    outcomes = meet()
    joined(outcomes)
    assert [came.log for came in outcomes] == [[], [], []]


# -- options


def bad_torch_options(**told: Any) -> Any:
    made = theirs.TensorPipeRpcBackendOptions(init_method=told["init_method"])
    made.rpc_timeout = -3
    return made


def of_another_backend(**told: Any) -> Any:
    class Strange(rpc.RpcBackendOptions):
        """Not for this library's own backend."""

    return Strange(init_method=told["init_method"])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "choice, error, words",
    [
        ({"backend": "TENSORPIPE"}, TypeError, "must be a member of BackendType"),
        ({"make": bad_torch_options}, ValueError, "rpc_timeout must be 0"),
        ({"make": of_another_backend}, TypeError, "Strange"),
    ],
)
def test_what_init_rpc_finds_wrong_on_one_rank_is_told_to_all_at_once(
    choice: Choice, error: type[Exception], words: str, rank: int, meet: Meet
) -> None:
    outcomes = meet(*(choice if i == rank else {} for i in range(3)))
    refused([outcomes[rank]], words, kind=error)
    refused([came for i, came in enumerate(outcomes) if i != rank], f"(rank {rank}, ", error.__name__, words)


def options_that_raise(**told: Any) -> Any:
    return rpc.TensorPipeRpcBackendOptions(rpc_timeout=-1)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_whose_options_cannot_be_made_fails_at_once_and_the_others_name_it_when_their_time_is_up(
    rank: int, meet: Meet
) -> None:
    outcomes = meet(*({"make": options_that_raise} if i == rank else {} for i in range(3)), init_timeout=2.5)
    own = outcomes.pop(rank)
    assert isinstance(own.error, ValueError)
    assert own.took < 2.5
    refused(outcomes, "missing rank 2; joined: " if rank else "rank 0 has published no address")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_finds_something_wrong_and_nobody_to_tell_raises_soon(rank: int, meet: Meet) -> None:
    outcomes = meet(*({"name": "a b"} if i == rank else {"make": options_that_raise} for i in range(3)))
    refused([outcomes[rank]], "'a b' does not", kind=ValueError)


def test_an_address_that_leads_nowhere_does_not_hide_what_is_wrong(meet: Meet) -> None:
    methods = ("nonsense", "tcp://127.0.0.1:1", "env://")
    outcomes = meet(*({"name": "a b", "options": {"init_method": method}} for method in methods))
    refused(outcomes, "'a b' does not", kind=ValueError)


def test_a_security_token_is_taken_without_a_word_and_shown_nowhere(meet: Meet) -> None:
    outcomes = meet(security_token="my_rpc_token")
    joined(outcomes)
    assert [came.log for came in outcomes] == [[], [], []]


@pytest.mark.parametrize("backend", [None, rpc.BackendType.TENSORPIPE, "torch's"])
@pytest.mark.parametrize("kind", ["ours", "torch's", "base"])
def test_options_take_effect_whoevers_class_they_are_of(kind: str, backend: Any, meet: Meet) -> None:
    def make(**told: Any) -> Any:
        del told["init_timeout"]
        kinds = {
            "ours": rpc.TensorPipeRpcBackendOptions,
            "torch's": theirs.TensorPipeRpcBackendOptions,
            "base": rpc.RpcBackendOptions,
        }
        return kinds[kind](**told, num_worker_threads=8, rpc_timeout=20)

    def then() -> Any:
        return rpc.get_rpc_timeout(), rpc.rpc_sync("w1", abs, args=(-1,))

    choice = {"make": make, "backend": theirs.BackendType.TENSORPIPE if backend == "torch's" else backend}
    if backend is None:
        del choice["backend"]
    assert joined(meet(choice, choice, choice, then=then)) == [(20.0, 1)] * 3


def test_a_world_meets_by_the_environment_with_the_options_of_the_reference(meet: Meet) -> None:
    port = free_port()

    def make(**told: Any) -> Any:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
        return rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=20)

    assert joined(meet(*[{"make": make}] * 3, then=rpc.get_rpc_timeout)) == [20.0] * 3


# -- device maps


@pytest.mark.parametrize(
    "rank, options, words",
    [
        (0, {"device_maps": {"nobody": {0: 0}}}, ['"w0"', 'map for "nobody"', '"w0", "w1", "w2"']),
        (1, {"device_maps": {"w2": {0: 2}}}, ['"w1"', "cuda:2", '"w2"', "2 CUDA devices"]),
        (2, {"device_maps": {"w0": {2: 0}}}, ['"w2"', "from cuda:2", '"w0"', "2 CUDA devices"]),
        (1, {"devices": [0, 0]}, ['"w1"', "cuda:0 twice"]),
        (0, {"devices": [2]}, ['"w0"', "cuda:2", "2 CUDA devices"]),
        (2, {"devices": [1], "device_maps": {"w0": {0: 0}}}, ['"w2"', "from cuda:0", "among its devices: cuda:1"]),
    ],
)
def test_a_device_map_that_does_not_fit_is_refused_on_every_rank(
    rank: int, options: dict[str, Any], words: list[str], meet: Meet
) -> None:
    choices = [{"here": gpus(2), "options": options if i == rank else {}} for i in range(3)]
    outcomes = meet(*choices)
    refused(outcomes, *words, kind=rpc.DeviceMapError)
    refused(outcomes, kind=ValueError)  # as torch's is


def test_without_a_gpu_every_cuda_device_is_out_of_range(meet: Meet) -> None:
    outcomes = meet({"options": {"device_maps": {"w1": {0: 1}}}}, *[{"here": gpus(0)}] * 2)
    refused(outcomes, '"w0"', "cuda:0", "no CUDA device", kind=rpc.DeviceMapError)


def test_a_map_of_the_cpu_alone_needs_no_gpu(meet: Meet) -> None:
    joined(meet({"options": {"device_maps": {"w1": {"cpu": "cpu"}}}}))


def test_sound_maps_are_known_on_both_sides_with_their_inverse_and_the_devices(meet: Meet) -> None:
    def then() -> Any:
        return session.current().worker.services[Placement]

    first, second, third = joined(
        meet(
            {"here": gpus(3), "options": {"device_maps": {"w1": {0: 1, 2: 0}}}},
            {"here": gpus(2), "options": {"device_maps": {"w0": {"cuda:1": "cuda:0"}}}},
            {"here": gpus(1), "options": {"devices": [0]}},
            then=then,
        )
    )
    there = {"cuda:0": "cuda:1", "cuda:2": "cuda:0"}
    assert first == Placement({"w1": there}, {"w1": {"cuda:0": "cuda:1"}}, ("cuda:0", "cuda:2"))
    assert second == Placement(
        {"w0": {"cuda:1": "cuda:0"}}, {"w0": {"cuda:1": "cuda:0", "cuda:0": "cuda:2"}}, ("cuda:0", "cuda:1")
    )
    assert third == Placement({}, {}, ("cuda:0",))


def test_the_notes_example_is_refused_for_the_worker_that_it_does_not_have(meet: Meet) -> None:
    maps = {"w1": {0: 1}, "worker2": {1: 0}}
    outcomes = meet({"here": gpus(2), "options": {"device_maps": maps}}, *[{"here": gpus(2)}] * 2)
    refused(outcomes, '"w0"', 'map for "worker2"', "there is no such worker", kind=rpc.DeviceMapError)
