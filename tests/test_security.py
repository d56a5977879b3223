"""A world with a token, and those who do not have it: none of them gets in, and each is told why (docs/security.md)."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

import actorrpc as rpc
from actorrpc import autograd, session
from actorrpc.errors import AuthenticationError, InvalidNameError
from actorrpc.services import sealed
from actorrpc.wire import dealer, folders, zeromq
from actorrpc.wire.curve import Keys
from actorrpc.wire.zeromq import ZmqTransport
from tests import attacks
from tests.attacks import Impostor, Middle, bring, closing, doors, forged, throw
from tests.chaos.strangers import PLAIN, TOKEN, strangers
from tests.chaos.table import Tally
from tests.joining import options
from tests.worlds import STANDING, Pairs, World, until

ROOT = Path(__file__).parents[1]
BYTES = [attacks.without_security, attacks.as_version_2, attacks.as_version_1]
_rounds = itertools.count()


@pytest.fixture(scope="module")
def _guarded() -> Iterator[Pairs]:
    pairs = Pairs({"security_token": TOKEN})
    yield pairs
    pairs.close()


@pytest.fixture
def guarded(_guarded: Pairs) -> Iterator[World]:
    """A standing world of two with a token, which must still work after the test."""
    with _guarded.lend() as world:
        yield world


@pytest.fixture(scope="module")
def processes() -> Iterator[World]:
    """Three processes that join worlds as they are told."""
    with World(3, join=False, timeout=60) as world:
        STANDING.update(world.pid(rank) for rank in range(3))
        yield world


@pytest.fixture
def method(processes: World) -> str:
    """A file to meet at."""
    return f"file://{processes.folder}/secure-{next(_rounds)}"


# -- with the right token


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, n: int) -> int:
        self.total += n
        return self.total


def back_and_forth(n: int) -> int:
    other = 1 - session.current().worker.id
    return n if n == 0 else 1 + int(rpc.rpc_sync(other, back_and_forth, args=(n - 1,)))


def fail() -> None:
    raise LookupError("not here")


def all_verbs() -> None:
    assert rpc.rpc_sync(1, abs, args=(-3,)) == 3
    assert rpc.rpc_async("worker1", abs, args=(-3,)).wait() == 3
    assert rpc.rpc_sync(1, back_and_forth, args=(5,)) == 5
    with pytest.raises(LookupError, match="not here"):
        rpc.rpc_sync(1, fail)
    counter = rpc.remote(1, Counter)
    counter.tell().add(2)  # an object that is no actor runs its calls in any order
    until(lambda: counter.rpc_sync().add(0) == 2, 20)
    assert counter.rpc_sync().add(3) == 5
    assert counter.rpc_async().add(1).wait() == 6
    assert counter.remote().add(1).to_here() == 7
    large = torch.arange(1 << 20, dtype=torch.float32)
    assert torch.equal(rpc.rpc_sync(1, torch.add, args=(large, 1)), large + 1)
    leaf = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync(1, torch.mul, args=(leaf, 3)).sum()])
        assert autograd.get_gradients(context)[leaf].tolist() == [3, 3, 3]


def mechanisms() -> list[int]:
    transport: Any = session.current().worker.transport
    dealers = [way.dealer for way in transport._ways.values() if isinstance(way, dealer.DealerWay)]
    sockets = [transport._inbox, *dealers]
    assert len(dealers) == len(transport._ways) or not transport._keys, "with a token there is no other way"
    return [socket.getsockopt(zmq.MECHANISM) for socket in sockets]


def test_all_verbs_work_in_a_world_with_a_token_and_all_its_sockets_have_curve(guarded: World) -> None:
    guarded.on(0, all_verbs)
    for found in guarded.everywhere(mechanisms):
        assert set(found) == {zmq.CURVE}


def test_a_world_without_a_token_has_neither_curve_nor_a_guard(pair: World) -> None:
    def look() -> tuple[list[int], bool]:
        return mechanisms(), any(t.name == "actorrpc-guard" for t in threading.enumerate())

    for found, guard in pair.everywhere(look):
        assert set(found) == {zmq.NULL}
        assert not guard


def test_str_bytes_and_the_environment_give_the_same_token_to_a_world_over_tcp() -> None:
    def program(rank: int, method: str) -> tuple[int, list[str]]:
        folders.AVAILABLE = False  # no ipc
        if rank == 2:
            os.environ["ACTORRPC_TOKEN"] = "geheimnis mit ü"
        token = ["geheimnis mit ü", "geheimnis mit ü".encode(), None][rank]
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=3, rpc_backend_options=options(method, security_token=token))
        value = sum(rpc.rpc_sync(to, abs, args=(-1,)) for to in range(3))
        endpoints = session.current().worker.transport.endpoints
        rpc.shutdown()
        return value, endpoints

    with World(3, join=False) as world:
        for rank in range(3):
            world.start(rank, program, rank, f"file://{world.folder}/x")
        for value, endpoints in world.results():
            assert value == 3
            assert [e[:6] for e in endpoints] == ["tcp://"]


# -- with another one, or none


class Came:
    """What came of one rank's `init_rpc`."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.took = 0.0
        self.log: list[str] = []


def attempt(rank: int, method: str, token: str | None, seconds: float, name: str = "", tcp: bool = False) -> Came:
    came = Came()

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            came.log.append(record.getMessage())

    handler = Keeping(logging.DEBUG)
    log = logging.getLogger("actorrpc")
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.DEBUG)
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sealed, "_PATIENCE_SECONDS", 1.0)
        if tcp:
            patch.setattr(folders, "AVAILABLE", False)
        try:
            told = options(method, security_token=token, init_timeout=seconds)
            rpc.init_rpc(name or f"w{rank}", rank=rank, world_size=3, rpc_backend_options=told)
            rpc.rpc_sync((rank + 1) % 3, abs, args=(-1,))
        except Exception as e:
            came.error = e
    came.took = time.monotonic() - began
    rpc.shutdown()
    log.removeHandler(handler)
    log.setLevel(level)
    return came


def come_together(
    processes: World, method: str, tokens: list[str | None], seconds: list[float], tcp: bool = False
) -> list[Came]:
    for rank in range(3):
        processes.start(rank, attempt, rank, method, tokens[rank], seconds[rank], "", tcp)
    found: list[Came] = processes.results()
    for came in found:  # nowhere is one to be seen
        text = "\n".join([*came.log, str(came.error), repr(came.error)])
        assert not any(token and token in text for token in tokens), text
    return found


@pytest.mark.parametrize("tcp", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_who_has_another_token_or_none_is_refused_soon_and_rank_0_tells_of_it_once(
    tcp: bool, processes: World, method: str
) -> None:
    first, other, without = come_together(processes, method, ["token-a", "token-b", None], [5, 50, 50], tcp)
    for came, word in ((other, "with another security_token"), (without, "this worker has none")):
        assert isinstance(came.error, AuthenticationError)
        assert word in str(came.error)
        assert "ACTORRPC_TOKEN" in str(came.error)
        assert came.took < 25, "long before its time was up"
    assert isinstance(first.error, AuthenticationError)
    for word in ("missing ranks 1, 2", "Strangers were turned away", "127.0.0.1" if tcp else "of this host"):
        assert word in str(first.error)
    lines = [line for line in first.log if line.startswith("turned away")]
    assert lines
    peers = [line.split(", who")[0] for line in lines]
    assert len(set(peers)) == len(peers), "once per address"
    assert all("has another security_token" in line or "has no security_token" in line for line in lines)


def test_a_token_that_rank_0_does_not_have_is_an_error_on_every_rank_soon(processes: World, method: str) -> None:
    first, with_one, without = come_together(processes, method, [None, "token-b", None], [50, 50, 50])
    assert isinstance(with_one.error, AuthenticationError)
    assert "without a security_token, and this worker has one" in str(with_one.error)
    for came in (first, without):
        assert isinstance(came.error, rpc.RendezvousError)
        assert 'worker "w1" (rank 1, ' in str(came.error)
        assert "it has a security_token, and rank 0 has none" in str(came.error)
    assert max(came.took for came in (first, with_one, without)) < 25


def test_that_rank_0_had_another_token_is_told_although_it_has_ended_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = b'{"session": "s", "endpoints": ["ipc:///nowhere"]}'
    there: list[bytes | None] = [foreign]
    monkeypatch.setattr("actorrpc.services.store.HintStore.read", lambda *_: there[0])
    monkeypatch.setattr(sealed, "knock", lambda *_, **__: True)
    store = sealed.SealedStore(f"file://{tmp_path}/store", 1, Keys.of(TOKEN))
    later = time.monotonic() + 60
    assert store.read(later) is None
    there[0] = None
    assert store.read(later) is None, "another one may come"
    ours = Keys.of(TOKEN).seal(b"{}")
    for found in (ours, None, foreign):
        there[0] = found
        assert store.read(time.monotonic() + (0.5 if found != foreign else 60)) == (b"{}" if found == ours else None)
    there[0] = None
    with pytest.raises(AuthenticationError, match="without a security_token, and this worker has one"):
        store.read(time.monotonic() + 0.5)


def test_a_world_goes_on_while_one_without_its_token_tries_to_join(processes: World, method: str) -> None:
    folder = Path(processes.folder)
    done = folder / f"done-{next(_rounds)}"

    def member(rank: int) -> int:
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options(method, security_token=TOKEN))
        until(done.exists, 30)
        value: int = rpc.rpc_sync(1 - rank, abs, args=(-4,))
        rpc.shutdown()
        return value

    def stranger() -> Came:
        try:
            return attempt(1, method, "another", 50)
        finally:
            done.touch()

    processes.start(0, member, 0)
    processes.start(1, member, 1)
    processes.start(2, stranger)
    one, two, came = processes.results()
    assert (one, two) == (4, 4)
    assert isinstance(came.error, AuthenticationError)


def test_no_trace_of_a_token_in_options_keys_or_errors() -> None:
    keys = Keys.of(TOKEN)
    for text in (repr(keys), str(keys), repr(rpc.RpcBackendOptions(security_token=TOKEN))):
        assert TOKEN not in text
        assert "not shown" in text
    with pytest.raises(TypeError, match="do not travel"):
        pickle.dumps(keys)


def test_an_empty_token_is_an_error_and_not_a_world_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORRPC_TOKEN", "")
    with pytest.raises(ValueError, match="ACTORRPC_TOKEN"):
        rpc.RpcBackendOptions()


@pytest.mark.parametrize("half", [0xD800, 0xDFFF, 0xD83D])
def test_a_token_that_is_no_text_is_refused_without_being_shown(half: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"security_token is a str that cannot be written in UTF-8") as caught:
        rpc.RpcBackendOptions(security_token=f"secret{chr(half)}")
    assert type(caught.value) is ValueError  # a UnicodeEncodeError holds the token
    assert "secret" not in repr(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None
    set_options = rpc.RpcBackendOptions()
    with pytest.raises(ValueError, match="UTF-8"):
        set_options.security_token = chr(half)
    monkeypatch.setenv("ACTORRPC_TOKEN", os.fsdecode(b"secret\xff"))  # no text, but bytes
    token = rpc.RpcBackendOptions().security_token
    assert token is not None
    assert Keys.of(token)._mac == Keys.of(b"secret\xff")._mac


def test_the_environment_gives_the_token_unless_the_options_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORRPC_TOKEN", "of all")
    assert rpc.RpcBackendOptions().security_token == "of all"
    assert rpc.TensorPipeRpcBackendOptions(security_token="own").security_token == "own"
    theirs: Any = __import__("torch.distributed.rpc").distributed.rpc
    assert rpc.options.own_options(theirs.TensorPipeRpcBackendOptions()).security_token == "of all"


def test_where_zeromq_lacks_curve_a_token_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, meet: str) -> None:
    monkeypatch.setattr(zmq, "has", lambda what: what != "curve")
    with pytest.raises(AuthenticationError, match=r"CURVE.*built without it"):
        rpc.init_rpc("w", rank=0, world_size=1, rpc_backend_options=options(meet, security_token=TOKEN))
    assert not session.is_available()


# -- keys


def test_a_token_gives_the_same_keys_everywhere_and_another_one_others() -> None:
    one, same, other = Keys.of("a"), Keys.of(b"a"), Keys.of("b")
    assert (one._server, one._client, one._mac) == (same._server, same._client, same._mac)
    of_all = [pair for keys in (one, other) for pair in (keys._server, keys._client)]
    assert len({key for pair in of_all for key in pair}) == 8
    assert same.unseal(one.seal(b"words")) == b"words"
    assert other.unseal(one.seal(b"words")) is None
    sealed_words = one.seal(b"words")
    for i in range(len(sealed_words)):
        changed = bytearray(sealed_words)
        changed[i] ^= 1
        assert one.unseal(bytes(changed)) is None
    assert one.unseal(b"words") is None


def test_keys_may_be_made_while_contexts_end(processes: World) -> None:
    def make() -> int:
        def come_and_go() -> None:
            for _ in range(40):
                with closing(ZmqTransport(keys=Keys(os.urandom(32)))) as transport:
                    transport.dial(1, transport.endpoints)
                    transport.send(1, [b"x"])

        threads = [threading.Thread(target=come_and_go) for _ in range(3)]
        for thread in threads:
            thread.start()
        made = {Keys(os.urandom(32))._server for _ in range(2000)}
        for thread in threads:
            thread.join()
        return len(made)

    assert processes.on(2, make) == 2000  # in a process of its own, since it was an abort


# -- at the door


def test_the_attacks_reach_a_world_without_a_token(tmp_path: Path) -> None:
    """Else the tests below would show nothing."""
    with World(2, strict=False) as world:
        context = zmq.Context()
        for number, door in enumerate(doors(world)):
            mark = tmp_path / f"zeromq-{number}"
            assert bring(context, door, forged(world, mark), attacks.nothing, "") == "in"
            until(mark.exists)
        context.term()
        for write in BYTES:
            for number, door in enumerate(doors(world)):
                mark = tmp_path / f"{write.__name__}-{number}"
                throw(door, *write(forged(world, mark)))
                until(mark.exists, what=str(mark))
        for rank in range(2):
            world.kill(rank)


@pytest.mark.parametrize("prepare", PLAIN, ids=lambda p: p.__name__)
def test_a_peer_of_zeromq_without_the_worlds_keys_reaches_no_handler(
    prepare: Callable[..., None], guarded: World, tmp_path: Path
) -> None:
    frames, context = forged(guarded, tmp_path / "mark"), zmq.Context()
    for rank in range(2):
        for door in doors(guarded, rank):
            for message in (frames, [b"b\1" + frames[0]], [b"a\1\5", b"{}"], frames * 3):
                assert bring(context, door, message, prepare, TOKEN) == "turned away"
    context.term()
    guarded.everywhere(lambda: rpc.rpc_sync(1 - session.current().worker.id, abs, args=(-1,)))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("write", BYTES, ids=lambda w: w.__name__)
def test_bytes_of_a_peer_without_security_reach_no_handler(
    write: Callable[..., list[bytes]], guarded: World, tmp_path: Path
) -> None:
    for door in doors(guarded):
        said = throw(door, *write(forged(guarded, tmp_path / "mark")))
        assert TOKEN.encode() not in said
    guarded.on(1, lambda: rpc.rpc_sync(0, abs, args=(-1,)))
    assert not (tmp_path / "mark").exists()


def test_garbage_reaches_no_handler_and_the_world_goes_on(guarded: World, tmp_path: Path) -> None:
    frames, chance = forged(guarded, tmp_path / "mark"), random.Random(1)
    for door in doors(guarded):
        for _ in range(300):
            throw(door, attacks.garbled(frames, chance), wait=False)
    guarded.on(1, lambda: rpc.rpc_sync(0, abs, args=(-1,), timeout=20))
    assert not (tmp_path / "mark").exists()


def test_without_its_guard_a_door_lets_nobody_in() -> None:
    """CU1: ZeroMQ alone would let in whoever knows the key of the servers."""
    context, keys = zmq.Context(), Keys(os.urandom(32))
    door = context.socket(zmq.ROUTER)
    keys.serve(door)
    door.bind("tcp://127.0.0.1:*")
    outcome = bring(
        context, door.getsockopt_string(zmq.LAST_ENDPOINT), [b"x"], lambda way, _: keys.show(way), "", seconds=0.5
    )
    assert outcome != "in"
    assert not door.poll(100)
    door.close(0)
    context.term()


def test_a_server_without_the_worlds_keys_is_sent_nothing() -> None:
    """It takes a worker's place, at its port, say."""
    for keys in (None, Keys.of_nobody()):
        with closing(ZmqTransport(keys=keys)) as fake, closing(ZmqTransport(keys=Keys(b"k" * 32))) as worker:
            worker.dial(1, fake.endpoints)
            worker.send(1, [b"for the world alone"])
            assert fake.receive(0.5) is None


@pytest.mark.parametrize("ours, theirs", [(b"k" * 32, None), (None, b"k" * 32), (b"k" * 32, b"l" * 32)])
def test_sending_to_a_door_that_turns_us_away_is_no_error(ours: bytes | None, theirs: bytes | None) -> None:
    """ZeroMQ gives such a way up for good, and then says that a send would block; ZQ7."""
    here_keys, there_keys = (None if root is None else Keys(root) for root in (ours, theirs))
    with closing(ZmqTransport(keys=there_keys)) as there, closing(ZmqTransport(keys=here_keys)) as here:
        here.dial(1, there.endpoints)
        for number in range(60):
            here.send(1, [b"x"], hold=number % 3 == 0)
            here.send(1, [b"x", b"y"])
            assert there.receive(0.01) is None


def test_strangers_are_told_of_once_per_address(caplog: pytest.LogCaptureFixture) -> None:
    with closing(ZmqTransport(ipc=False, keys=Keys(b"k" * 32))) as transport, caplog.at_level(logging.WARNING):
        context = zmq.Context()
        for prepare in (attacks.nothing, attacks.another_token) * 5:
            assert bring(context, transport.endpoints[0], [b"x"], prepare, "") == "turned away"
        context.term()
        until(lambda: "127.0.0.1" in transport.strangers)
        lines = [r.getMessage() for r in caplog.records if "from 127.0.0.1" in r.getMessage()]
        assert len(lines) == 1
        assert "has no security_token" in lines[0] or "another security_token" in lines[0]


# -- in the middle


def numbered(i: int) -> bytes:
    return b"message %d " % i + bytes(200)


@contextlib.contextmanager
def through(change: Callable[[int, bytes], bytes] = lambda _, data: data) -> Iterator[tuple[Any, Any, Middle]]:
    """Two workers' transports with a man in the middle."""
    keys = Keys(b"k" * 32)
    with closing(ZmqTransport(ipc=False, keys=keys)) as there, closing(ZmqTransport(keys=keys)) as here:
        with closing(Middle(there.endpoints[0], change)) as middle:
            here.dial(1, [middle.endpoint])
            yield here, there, middle
            here.hang_up(1)


def test_what_is_recorded_says_nothing_and_replayed_changes_nothing() -> None:
    with through() as (here, there, middle):
        for i in range(20):
            here.send(1, [numbered(i)])
        assert [there.receive(10) for _ in range(20)] == [[numbered(i)] for i in range(20)]
        (taken,) = middle.taken
        assert len(taken) > 20 * 200
        assert b"message" not in taken
        for start in (0, 64, 64 + 202):  # all of it; without the greeting; without the hello
            throw(there.endpoints[0], taken[start:])
            throw(there.endpoints[0], attacks.greeting(b"CURVE") + taken[start:])
        assert there.receive(0.3) is None


def test_what_is_sent_again_within_a_connection_does_not_come_twice() -> None:
    sent: list[bytes] = []

    def twice(passed: int, data: bytes) -> bytes:
        sent.append(data)
        return data if passed < 1000 else data + data

    with through(twice) as (here, there, _):
        here.send(1, [numbered(0)])
        assert there.receive(10) == [numbered(0)]
        came = [0]
        for i in range(1, 20):
            here.send(1, [numbered(i)])
            while (frames := there.receive(0.05)) is not None:
                came.append(int(bytes(frames[0]).split()[1]))
        assert came == sorted(set(came))
        assert len(sent) > 2


@pytest.mark.parametrize("place", [5, 30, 70, 200, 300, 400, 700, 1500, 3000])
def test_an_altered_byte_never_arrives(place: int) -> None:
    """Whatever comes is what was sent, in order: once the connection is cut, later ones may come by the next."""
    altered = threading.Event()

    def flip(passed: int, data: bytes) -> bytes:
        if altered.is_set() or not passed <= place < passed + len(data):
            return data
        altered.set()
        changed = bytearray(data)
        changed[place - passed] ^= 0x40
        return bytes(changed)

    with through(flip) as (here, there, _):
        for i in range(20):
            here.send(1, [numbered(i)])
        assert altered.wait(10)
        came, end = [], time.monotonic() + 0.6
        while time.monotonic() < end:
            if (frames := there.receive(0.1)) is not None:
                assert len(frames) == 1
                i = int(bytes(frames[0]).split()[1])
                assert frames == [numbered(i)]
                came.append(i)
        assert came == sorted(set(came))


# -- the store


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


def test_the_impostor_takes_in_a_worker_without_a_token(processes: World, method: str, mark: Path) -> None:
    """Else the tests below would show nothing."""

    def member() -> None:
        rpc.init_rpc("w1", rank=1, world_size=2, rpc_backend_options=options(method))
        until(mark.exists)
        rpc.shutdown(graceful=False)

    with closing(Impostor(method, mark)):
        processes.on(1, member)


@pytest.mark.parametrize("name", ["", "a bad name"])
@pytest.mark.parametrize("has_keys", [False, True])
def test_a_poisoned_store_leads_nowhere(name: str, has_keys: bool, processes: World, method: str, mark: Path) -> None:
    """Also where a worker only wants to say that it cannot join."""
    with closing(Impostor(method, mark, Keys.of_nobody() if has_keys else None)) as impostor:
        came = processes.on(1, attempt, 1, method, TOKEN, 20, name)
        assert isinstance(came.error, AuthenticationError if not name else InvalidNameError)
        assert came.took < 15
        for frames in impostor.heard:
            assert b"it has a security_token" in frames[1]
            assert TOKEN.encode() not in frames[1]
        assert bool(impostor.heard) is not has_keys
    assert not mark.exists()


class Trap:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_nothing_in_the_store_is_unpickled(processes: World, method: str, mark: Path) -> None:
    trap = pickle.dumps(Trap(str(mark)))
    for token in (None, TOKEN):
        with closing(Impostor(method, mark, hint=trap)):
            came = processes.on(1, attempt, 1, method, token, 2)
            assert isinstance(came.error, rpc.RendezvousError)
    assert not mark.exists()


@pytest.mark.parametrize("left", ["of another token", "without one", "of an earlier run"])
def test_what_an_earlier_run_left_does_not_keep_a_world_from_coming_about(
    left: str, processes: World, method: str, mark: Path
) -> None:
    old = b'{"session": "old", "endpoints": ["tcp://127.0.0.1:1"]}'
    keys = {"of another token": Keys.of_nobody(), "without one": None, "of an earlier run": Keys.of(TOKEN)}[left]
    seen = Path(processes.folder) / f"seen-{next(_rounds)}"

    def late(rank: int) -> Came:
        until(seen.exists, 30)
        return attempt(rank, method, TOKEN, 30)

    def early(rank: int) -> Came:
        with pytest.MonkeyPatch.context() as patch:
            looked = sealed.SealedStore.read

            def read(store: Any, deadline: float) -> Any:
                found = looked(store, deadline)
                seen.touch()
                return found

            patch.setattr(sealed.SealedStore, "read", read)
            return attempt(rank, method, TOKEN, 30)

    with closing(Impostor(method, mark, hint=old if keys is None else keys.seal(old))):
        for rank in range(3):
            processes.start(rank, late if rank == 0 else early, rank)
        for came in processes.results():
            assert came.error is None, came.error


# -- same-host paths


def test_the_folder_of_an_ipc_socket_is_this_users_alone() -> None:
    with closing(ZmqTransport()) as transport:
        folder = os.path.dirname(transport.endpoints[0][6:])
        assert os.stat(folder).st_mode & 0o777 == 0o700


def test_an_ipc_path_that_others_could_have_made_is_not_taken(tmp_path: Path) -> None:
    with closing(ZmqTransport()) as transport:
        ipc, tcp = transport.endpoints
        assert zeromq.reachable([ipc, tcp]) == ipc
        folder = os.path.dirname(ipc[6:])
        os.chmod(folder, 0o750)
        assert zeromq.reachable([ipc, tcp]) == tcp
        os.chmod(folder, 0o700)
        (tmp_path / "link").symlink_to(folder)
        assert zeromq.reachable([f"ipc://{tmp_path}/link/inbox", tcp]) == tcp
        if os.geteuid() == 0:
            os.chown(folder, 12345, -1)
            assert zeromq.reachable([ipc, tcp]) == tcp
            os.chown(folder, 0, -1)


def test_a_folder_that_another_user_has_put_there_is_not_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, mode in (("actorrpc-own", 0o700), ("actorrpc-open", 0o777)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
        (tmp_path / name).chmod(mode)
    (tmp_path / "elsewhere").touch()
    (tmp_path / "actorrpc-linked").mkdir(0o700)
    (tmp_path / "actorrpc-linked" / "lock").symlink_to(tmp_path / "elsewhere")
    folders.HeldFolder().close()
    assert {p.name for p in tmp_path.iterdir()} == {"actorrpc-open", "actorrpc-linked", "elsewhere"}


# -- slow


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_launched_processes_have_the_token_and_it_is_in_no_command_line(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        """
import os, sys
import actorrpc as rpc
from actorrpc import session

class Helper(rpc.Actor):
    def mechanism(self):
        return session.current().worker.transport._inbox.MECHANISM, os.getpid()

class Driver(rpc.Actor):
    def main(self):
        import psutil
        mechanism, pid = self.world.helper.rpc_sync().mechanism()[0]
        lines = [" ".join(psutil.Process(p).cmdline()) for p in (pid, os.getpid(), os.getppid())]
        return mechanism, [word for line in lines for word in line.split()]

if __name__ == "__main__":
    token = sys.stdin.read() or None
    found, words = rpc.launch(driver=Driver, helper=Helper, options=rpc.RpcBackendOptions(security_token=token))
    print(int(found), any("sesame" in word for word in words))
"""
    )
    for given, environment in (("open sesame", {}), ("", {"ACTORRPC_TOKEN": "open sesame"})):
        done = subprocess.run(
            [sys.executable, str(script)],
            input=given, env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, f"{int(zmq.CURVE)} False\n"), done.stderr
        assert "sesame" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("tokens", [("a", "a"), ("a", "b")])
def test_a_program_for_torch_under_the_stand_in_takes_the_token_of_the_environment(
    tokens: tuple[str, str], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch.distributed.rpc as rpc\n"
        "rank = int(sys.argv[1])\n"
        f"told = rpc.TensorPipeRpcBackendOptions(init_method='file://{tmp_path}/meet')\n"
        "rpc.init_rpc(f'w{rank}', rank=rank, world_size=2, rpc_backend_options=told)\n"
        "print(rpc.rpc_sync(f'w{1 - rank}', abs, args=(-5,)))\n"
        "rpc.shutdown()\n"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "actorrpc", "run", str(program), str(rank)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "ACTORRPC_TOKEN": token, "ACTORRPC_INIT_TIMEOUT": "20"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, token in enumerate(tokens)
    ]  # fmt: skip
    said = [process.communicate(timeout=150) for process in running]
    if tokens[0] == tokens[1]:
        assert [out for out, _ in said] == ["5\n", "5\n"], said
    else:
        assert all("AuthenticationError" in err for _, err in said), said
        assert [process.returncode for process in running] == [1, 1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_tries_reach_no_handler(capsys: pytest.CaptureFixture[str]) -> None:
    """60,000 of bytes and 40,000 of ZeroMQ, at both doors of a worker that makes calls all the while."""
    tally = Tally()
    strangers(tally, 100_000)
    with capsys.disabled():
        print("", *tally.notes, sep="\n")
    assert tally.good
