"""Backends: the enumeration that grows, registering, and which one init_rpc takes."""

from __future__ import annotations

import copy
import enum
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.rpc
from torch.distributed.distributed_c10d import Store

import actorrpc as rpc
from actorrpc import BackendType, backends, session
from actorrpc.backends import choose
from actorrpc.process import foreign
from tests.worlds import Outcome, run_processes

theirs: Any = torch.distributed.rpc
TENSORPIPE = BackendType.TENSORPIPE


@pytest.fixture(autouse=True)
def _only_the_own_backend_afterwards() -> Iterator[None]:
    yield
    rpc.shutdown(graceful=False)
    for name in list(BackendType._by_name):
        if name != "TENSORPIPE":
            del BackendType._by_name[name]


class MyOptions(rpc.RpcBackendOptions):
    """The options of a backend of a program's own."""

    def __init__(self, rpc_timeout: float = 60, init_method: str = "env://", colour: str = "blue") -> None:
        super().__init__(rpc_timeout, init_method)
        self.colour = colour


class Agent:
    """What such a backend returns."""

    def __init__(self, **told: Any) -> None:
        self.told = told
        self.ends: list[Any] = []

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        self.ends.append(("join", shutdown, timeout))

    def shutdown(self) -> None:
        self.ends.append("shutdown")


def register(
    name: str = "MINE", construct: Callable[..., Any] = MyOptions, init: Callable[..., Any] = Agent
) -> BackendType:
    return rpc.register_backend(name, construct, init)


def fine(outcomes: list[Outcome]) -> list[Any]:
    for outcome in outcomes:
        assert not outcome.traceback, f"rank {outcome.rank}\n{outcome.traceback}\n{outcome.stderr}"
        assert outcome.returned
        assert outcome.problems == []
    return [outcome.value for outcome in outcomes]


# -- the enumeration


def test_the_enumeration_can_do_what_torchs_can() -> None:
    both: list[Any] = [rpc.BackendType, theirs.BackendType]
    for ours in both:
        assert repr(ours.TENSORPIPE) == str(ours.TENSORPIPE) == "BackendType.TENSORPIPE"
        assert [member.name for member in ours] == ["TENSORPIPE"]
        assert list(ours.__members__) == ["TENSORPIPE"]
        assert ours["TENSORPIPE"] is ours.TENSORPIPE is ours(ours.TENSORPIPE.value)
        assert ours.TENSORPIPE in ours
        assert len(ours) == 1
        assert isinstance(ours.TENSORPIPE, ours)
        assert callable(ours.TENSORPIPE.value.init_backend_handler)
        assert callable(ours.TENSORPIPE.value.construct_rpc_backend_options_handler)
        assert {ours.TENSORPIPE: 1}[ours.TENSORPIPE] == 1
        assert "TENSORPIPE" in dir(ours)
        with pytest.raises(KeyError):
            ours["NONE"]
        with pytest.raises(ValueError, match="3"):
            ours(3)
        with pytest.raises(AttributeError):
            ours.TENSORPIPE = 3


def test_who_imported_the_enumeration_early_sees_what_is_registered_later() -> None:
    early = BackendType
    mine = register()
    assert rpc.BackendType is early is backends.BackendType
    assert early.MINE is early["MINE"] is mine
    assert list(early) == [TENSORPIPE, mine]
    assert (mine.name, repr(mine), len(early)) == ("MINE", "BackendType.MINE", 2)
    assert early.__members__ == {"TENSORPIPE": TENSORPIPE, "MINE": mine}
    assert mine in early
    assert mine != TENSORPIPE


def test_a_member_stays_itself_when_copied_or_pickled() -> None:
    for member in (TENSORPIPE, register()):
        assert copy.copy(member) is copy.deepcopy(member) is pickle.loads(pickle.dumps(member)) is member


def test_the_process_group_backend_says_that_it_is_gone_and_what_to_write() -> None:
    words = r"PROCESS_GROUP.*gone.*write TensorPipeRpcBackendOptions.*BackendType.TENSORPIPE"
    with pytest.raises(AttributeError, match=words):
        BackendType.PROCESS_GROUP  # noqa: B018
    with pytest.raises(KeyError, match=words):
        BackendType["PROCESS_GROUP"]
    assert not hasattr(BackendType, "PROCESS_GROUP")
    assert not rpc.backend_registered("PROCESS_GROUP")


def test_a_name_that_nobody_registered_is_answered_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match=r"no backend 'GLOO'; there are: TENSORPIPE"):
        BackendType.GLOO  # noqa: B018


# -- registering


def test_a_registered_backend_is_known_and_not_registered_twice() -> None:
    assert rpc.backend_registered("TENSORPIPE")
    assert not rpc.backend_registered("MINE")
    register()
    assert rpc.backend_registered("MINE")
    for name in ("MINE", "TENSORPIPE"):
        with pytest.raises(RuntimeError, match=f"^RPC backend {name}: already registered$"):
            register(name)


def test_what_cannot_be_a_backend_is_refused() -> None:
    for name, construct, init in ((5, MyOptions, Agent), ("X", None, Agent), ("X", MyOptions, "agent")):
        with pytest.raises(TypeError, match="backend"):
            rpc.register_backend(name, construct, init)  # type: ignore[arg-type]
    assert list(BackendType) == [TENSORPIPE]


def test_the_options_of_a_backend_are_made_by_its_handler() -> None:
    own = rpc.construct_rpc_backend_options(TENSORPIPE)
    assert type(own) is rpc.TensorPipeRpcBackendOptions
    assert (own.rpc_timeout, own.init_method, own.num_worker_threads) == (60.0, "env://", 16)
    own = rpc.construct_rpc_backend_options(
        TENSORPIPE, 5, "tcp://h:1", num_worker_threads=3, device_maps={"w": {0: 1}}, _transports=["shm"]
    )
    assert (own.rpc_timeout, own.init_method, own.num_worker_threads) == (5.0, "tcp://h:1", 3)
    assert list(own.device_maps) == ["w"]  # torch's drops them
    mine = rpc.construct_rpc_backend_options(register(), rpc_timeout=9, colour="red")
    assert (type(mine), mine.rpc_timeout, mine.init_method, mine.colour) == (MyOptions, 9.0, "env://", "red")
    with pytest.raises(TypeError, match="colour"):
        rpc.construct_rpc_backend_options(TENSORPIPE, colour="red")
    with pytest.raises(TypeError, match="must be a member of BackendType"):
        rpc.construct_rpc_backend_options("TENSORPIPE")  # type: ignore[arg-type]


def test_init_backend_calls_the_handler_with_what_it_is_given() -> None:
    mine = register(init=lambda *args, **kwargs: (args, kwargs))
    assert rpc.init_backend(mine, 1, 2, store=None, name="w") == ((1, 2), {"store": None, "name": "w"})
    with pytest.raises(TypeError, match="must be a member of BackendType"):
        rpc.init_backend("MINE", name="w")  # type: ignore[arg-type]


def test_init_backend_of_the_own_one_joins_a_world(tmp_path: Path) -> None:
    def program(rank: int) -> Any:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/m", init_timeout=20)
        rpc.init_backend(TENSORPIPE, store=None, name=f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        value = rpc.rpc_sync(1 - rank, abs, args=(-4,))
        rpc.shutdown()
        return value

    assert fine(run_processes(program, 2)) == [4, 4]


# -- which one, with which options


def test_the_backend_is_inferred_from_the_type_of_the_options() -> None:
    mine = register()
    assert choose(None, None)[0] is TENSORPIPE
    assert type(choose(None, None)[1]) is rpc.TensorPipeRpcBackendOptions
    for options in (rpc.RpcBackendOptions(), rpc.TensorPipeRpcBackendOptions()):
        assert choose(None, options) == (TENSORPIPE, options)
    own = MyOptions()
    assert choose(None, own) == (mine, own)
    assert choose(None, theirs.TensorPipeRpcBackendOptions())[0] is TENSORPIPE
    assert choose(None, theirs.RpcBackendOptions())[0] is TENSORPIPE
    chosen, made = choose(mine, None)
    assert (chosen, type(made)) == (mine, MyOptions)


def test_of_two_backends_the_one_whose_options_are_nearer_is_meant_and_of_two_alike_the_older() -> None:
    class Nearer(rpc.TensorPipeRpcBackendOptions):
        """Options of a backend that adds to the own one's."""

    nearer = register("NEARER", lambda t, m: Nearer(rpc_timeout=t, init_method=m))
    register("ALIKE", lambda t, m: rpc.TensorPipeRpcBackendOptions(rpc_timeout=t, init_method=m))
    assert choose(None, Nearer())[0] is nearer
    assert choose(None, rpc.TensorPipeRpcBackendOptions())[0] is TENSORPIPE
    assert choose(None, rpc.RpcBackendOptions())[0] is TENSORPIPE


def test_a_backend_that_makes_no_options_by_itself_does_not_get_in_the_way() -> None:
    def construct(rpc_timeout: float, init_method: str, *, colour: str) -> MyOptions:
        return MyOptions(rpc_timeout, init_method, colour)

    mine = register(construct=construct)
    assert choose(None, rpc.TensorPipeRpcBackendOptions())[0] is TENSORPIPE
    given = MyOptions()
    assert choose(mine, given) == (mine, given)
    with pytest.raises(TypeError, match=r"Could not infer backend for options of type tests.*MyOptions"):
        choose(None, given)


def test_torchs_member_names_the_own_backend() -> None:
    assert choose(theirs.BackendType.TENSORPIPE, None)[0] is TENSORPIPE
    options = rpc.TensorPipeRpcBackendOptions()
    assert choose(theirs.BackendType.TENSORPIPE, options) == (TENSORPIPE, options)
    torchs = theirs.TensorPipeRpcBackendOptions(num_worker_threads=3)
    assert choose(theirs.BackendType.TENSORPIPE, torchs)[1].num_worker_threads == 3


def test_a_backend_registered_with_torch_is_refused_with_what_to_do() -> None:
    make: Any = enum.Enum
    other = make("BackendType", {"OTHER": theirs.BackendType.TENSORPIPE.value})
    with pytest.raises(TypeError, match=r"registered with torch.*actorrpc\.register_backend"):
        choose(other["OTHER"], None)


@pytest.mark.parametrize(
    "backend, options, words",
    [
        ("TENSORPIPE", None, r"must be a member of BackendType, not 'TENSORPIPE'.*write BackendType\['TENSORPIPE'\]"),
        (3, None, "must be a member of BackendType, not 3 of type int"),
        (None, 3, "must be an instance of RpcBackendOptions.*not builtins.int"),
        (TENSORPIPE, {"rpc_timeout": 3}, "must be an instance of RpcBackendOptions.*not builtins.dict"),
        (None, rpc.RpcBackendOptions, "must be an instance of RpcBackendOptions.*not builtins.type"),
        (TENSORPIPE, MyOptions(), r"for BackendType\.TENSORPIPE; not tests.*MyOptions"),
        ("mine", rpc.TensorPipeRpcBackendOptions(), r"TensorPipeRpcBackendOptions do not fit BackendType\.MINE.*MyOpt"),
        ("mine", theirs.TensorPipeRpcBackendOptions(), r"torch.*do not fit BackendType\.MINE, which takes .*MyOptions"),
    ],
)
def test_what_does_not_fit_is_a_type_error_that_names_both(backend: Any, options: Any, words: str) -> None:
    mine = register()
    with pytest.raises(TypeError, match=words):
        rpc.init_rpc("w", mine if backend == "mine" else backend, 0, 1, options)
    assert not session.is_available()
    rpc.shutdown()


# -- a backend of the program's own


def test_init_rpc_starts_a_registered_backend_with_torchs_arguments_and_keeps_what_it_returns(tmp_path: Path) -> None:
    mine = register()
    for backend, options in (
        (mine, MyOptions(5, f"file://{tmp_path}/a")),
        (None, MyOptions(5, f"file://{tmp_path}/b")),
    ):
        rpc.init_rpc("w", backend, rank=0, world_size=1, rpc_backend_options=options)
        kept = foreign()
        assert kept is not None
        agent = kept.agent
        assert set(agent.told) == {"store", "name", "rank", "world_size", "rpc_backend_options"}
        assert isinstance(agent.told["store"], Store)
        agent.told["store"].set("key", "value")
        assert agent.told["store"].get("key") == b"value"
        assert (agent.told["name"], agent.told["rank"], agent.told["world_size"]) == ("w", 0, 1)
        assert agent.told["rpc_backend_options"] is options
        with pytest.raises(rpc.NotAMemberError, match=r"BackendType\.MINE.*Agent"):
            rpc.rpc_sync("w", abs, args=(1,))
        with pytest.raises(RuntimeError, match=r"already initialized.*BackendType\.MINE"):
            rpc.init_rpc("w", rank=0, world_size=1)
        rpc.shutdown(timeout=3)
        assert agent.ends == [("join", True, 3), "shutdown"]
        assert foreign() is None
    rpc.shutdown()


def test_its_options_are_made_where_none_are_given(tmp_path: Path) -> None:
    mine = register(construct=lambda t, m: MyOptions(t, f"file://{tmp_path}/m"), init=lambda **told: told)
    rpc.init_rpc("w", mine, rank=0, world_size=1)
    kept = foreign()
    assert kept is not None
    assert kept.agent["rpc_backend_options"].rpc_timeout == 60.0
    rpc.shutdown(graceful=False)  # an agent that has neither join nor shutdown
    assert foreign() is None


def test_a_local_shutdown_does_not_join_and_an_agent_that_fails_to_is_shut_down_all_the_same(tmp_path: Path) -> None:
    class Failing(Agent):
        def join(self, shutdown: bool = False, timeout: float = 0) -> None:
            raise KeyError("not now")

    mine, agents = register(init=Failing), []
    for graceful in (False, True):
        rpc.init_rpc("w", mine, 0, 1, MyOptions(5, f"file://{tmp_path}/{graceful}"))
        kept = foreign()
        assert kept is not None
        agents.append(kept.agent)
        if graceful:
            with pytest.raises(KeyError, match="not now"):
                rpc.shutdown()
        else:
            rpc.shutdown(graceful=False)
        assert foreign() is None
    assert [agent.ends for agent in agents] == [["shutdown"], ["shutdown"]]


def test_a_handler_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(**told: Any) -> None:
        raise KeyError("no agent today")

    mine = register(init=fail)
    with pytest.raises(KeyError, match="no agent today"):
        rpc.init_rpc("w", mine, 0, 1, MyOptions(5, f"file://{tmp_path}/m"))
    assert foreign() is None
    rpc.shutdown()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_handler_may_start_the_own_backend_so_that_calls_work(wrapped: bool, tmp_path: Path) -> None:
    def program(rank: int) -> Any:
        agents = []

        def init(rpc_backend_options: MyOptions, **told: Any) -> Any:
            own = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/own", init_timeout=20)
            session = rpc.init_backend(TENSORPIPE, rpc_backend_options=own, **told)
            agents.append(Agent() if wrapped else session)
            return agents[0]

        mine = rpc.register_backend("MINE", MyOptions, init)
        options = MyOptions(5, f"file://{tmp_path}/m")
        rpc.init_rpc(f"w{rank}", mine, rank=rank, world_size=2, rpc_backend_options=options)
        value = rpc.rpc_sync(1 - rank, abs, args=(-4,))
        rpc.shutdown()
        assert not session.is_available()
        return value, agents[0].ends if wrapped else None

    ends = [("join", True, 0), "shutdown"] if wrapped else None
    assert fine(run_processes(program, 2)) == [(4, ends)] * 2


def test_a_handler_that_fails_after_it_started_the_own_backend_leaves_no_worker(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        def init(rpc_backend_options: MyOptions, **told: Any) -> Any:
            own = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/own")
            rpc.init_backend(TENSORPIPE, rpc_backend_options=own, **told)
            raise KeyError("second thoughts")

        mine = rpc.register_backend("MINE", MyOptions, init)
        with pytest.raises(KeyError, match="second thoughts"):
            rpc.init_rpc("w", mine, 0, 1, MyOptions(5, f"file://{tmp_path}/m"))
        assert not session.is_available()

    fine(run_processes(program, 1))
