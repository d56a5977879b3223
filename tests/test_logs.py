"""`forward_logs`: what others print and log, in one terminal. Real processes."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import actorrpc as rpc
from actorrpc import session
from actorrpc.logs import ForwardedLogs
from actorrpc.runtime.clock import LockGate
from actorrpc.services import forwarding
from actorrpc.services.forwarding import Tee
from actorrpc.services.lines import Allowance, shown
from tests.joining import options
from tests.worlds import World, inside, until

PACKAGE = Path(__file__).parent.parent / "actorrpc"
mine = logging.getLogger("mine")


class Shown(io.StringIO):
    """A terminal."""

    @property
    def lines(self) -> list[str]:
        return self.getvalue().splitlines()

    def wait_for(self, text: str) -> None:
        until(lambda: text in self.getvalue(), 20, f"{text!r} did not come: {self.getvalue()[-2000:]}")


def front(rank: int = 1) -> str:
    record = session.current().worker.peers[rank].record
    return f"[{record.name} {record.host} {record.pid}] "


def quiet_streams() -> None:
    """Has what this process writes go nowhere: it is forwarded all the same."""
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()


def usual_streams() -> tuple[str, str]:
    """Gives this process its streams back; returns what was written to the others."""
    out: Any = sys.stdout
    errors: Any = sys.stderr
    texts = out.getvalue(), errors.getvalue()
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    return texts


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    rpc.rpc_sync("worker1", quiet_streams)
    try:
        yield
    finally:
        rpc.rpc_sync("worker1", usual_streams)


def speak() -> None:
    print("a", "b", end=" ")
    print("c\nd")
    print("an error", file=sys.stderr)
    mine.warning("a warning\nof two lines")
    mine.info("nobody asked for this")
    print("the last line")


def count(n: int) -> None:
    for i in range(n):
        print(f"line {i}")


def is_captured() -> bool:
    handlers = logging.getLogger().handlers
    return isinstance(sys.stdout, Tee) or any(isinstance(one, forwarding._Records) for one in handlers)


# -- what comes


@inside
def test_prints_and_records_come_in_order_with_their_worker_in_front() -> None:
    terminal = Shown()
    with quietly(), rpc.forward_logs(stream=terminal):
        rpc.rpc_sync("worker1", speak)
        terminal.wait_for("the last line")
    expected = ["a b c", "d", "an error", "WARNING mine: a warning", "of two lines", "the last line"]
    assert terminal.lines == [front() + line for line in expected]


@inside
def test_what_is_forwarded_is_written_by_its_worker_as_well() -> None:
    with contextlib.ExitStack() as ended:
        rpc.rpc_sync("worker1", quiet_streams)
        with rpc.forward_logs(stream=Shown()):
            rpc.rpc_sync("worker1", speak)
        ended.pop_all()
        out, errors = rpc.rpc_sync("worker1", usual_streams)
    assert out == "a b c\nd\nthe last line\n"
    assert errors.startswith("an error\n")


def set_up_logging() -> None:
    handler = logging.StreamHandler()  # to the stderr of the moment, whichever that is
    logging.getLogger().addHandler(handler)


def take_down_logging() -> None:
    logging.getLogger().handlers.clear()


@inside
def test_a_record_comes_once_where_its_worker_writes_it_to_stderr() -> None:
    terminal = Shown()
    with quietly(), rpc.forward_logs(stream=terminal):
        rpc.rpc_sync("worker1", set_up_logging)  # its stream is what forwards
        try:
            rpc.rpc_sync("worker1", mine.warning, args=("only once",))
            rpc.rpc_sync("worker1", print, args=("end",))
            terminal.wait_for("end")
        finally:
            rpc.rpc_sync("worker1", take_down_logging)
    assert sum("only once" in line for line in terminal.lines) == 1


@inside
def test_levels_below_the_one_asked_for_stay_away() -> None:
    terminal = Shown()
    with quietly(), rpc.forward_logs("ERROR", stream=terminal):
        rpc.rpc_sync("worker1", mine.warning, args=("low",))
        rpc.rpc_sync("worker1", mine.error, args=("high",))
        terminal.wait_for("high")
    assert terminal.lines == [f"{front()}ERROR mine: high"]


@inside
def test_what_logging_writes_to_stderr_stays_there_once_whoever_forwards_it() -> None:
    rpc.rpc_sync("worker1", quiet_streams)
    try:
        with rpc.forward_logs("ERROR", stream=Shown()), rpc.forward_logs("ERROR", stream=Shown()):
            rpc.rpc_sync("worker1", mine.warning, args=("low",))
            rpc.rpc_sync("worker1", mine.error, args=("high",))
    finally:
        _, errors = rpc.rpc_sync("worker1", usual_streams)
    assert errors == "low\nhigh\n"


@inside
def test_characters_that_the_terminal_does_not_have_cost_no_lines() -> None:
    plain = io.BytesIO()
    terminal = io.TextIOWrapper(plain, encoding="ascii")
    with quietly(), rpc.forward_logs(stream=terminal):
        rpc.rpc_sync("worker1", print, args=("a snowman: \N{SNOWMAN}",))
        until(lambda: b"\\u2603" in plain.getvalue(), 20, "it did not come")
        rpc.rpc_sync("worker1", print, args=("after it",))
        until(lambda: b"after it" in plain.getvalue(), 20, "what is after it did not come")


@inside
def test_threads_do_not_mix_their_lines() -> None:
    terminal = Shown()
    with quietly(), rpc.forward_logs(stream=terminal, lines_per_second=10_000):
        rpc.rpc_sync("worker1", speak_in_threads)
        for word in "abcd":
            terminal.wait_for(f"{word} end")
    assert {line.removeprefix(front()) for line in terminal.lines} == {
        *(f"{word} {i} {word}" for word in "abcd" for i in range(50)), *(f"{word} end" for word in "abcd")
    }  # fmt: skip


def speak_in_threads() -> None:
    def run(word: str) -> None:
        for i in range(50):
            print(word, i, end=" ")
            time.sleep(0)
            print(word)
        print(word, "end")

    threads = [threading.Thread(target=run, args=(word,)) for word in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@inside
def test_how_many_lines_were_left_out_is_said_and_the_rest_is_in_order() -> None:
    terminal = Shown()
    with quietly(), rpc.forward_logs(stream=terminal, lines_per_second=20):
        rpc.rpc_sync("worker1", count, args=(1000,))
        terminal.wait_for("lines left out, of more than 20 a second")
    numbers = [int(line.rsplit(" ", 1)[1]) for line in terminal.lines if " line " in line]
    assert numbers == sorted(numbers)
    left_out = sum(int(line.split("...")[1].split()[0]) for line in terminal.lines if "left out" in line)
    assert len(numbers) + left_out == 1000
    assert len(numbers) < 900


@inside
def test_two_who_forward_to_each_other_come_to_an_end() -> None:
    terminal = Shown()
    with quietly(), rpc.forward_logs(stream=terminal):
        rpc.rpc_sync("worker1", forward_back)
        try:
            print("of rank 0")
            until(lambda: rpc.rpc_sync("worker1", has_shown, args=("of rank 0",)))
            rpc.rpc_sync("worker1", print, args=("once",))
            terminal.wait_for("once")
            rpc.rpc_sync("worker1", print, args=("end",))
            terminal.wait_for("end")
        finally:
            rpc.rpc_sync("worker1", stop_forwarding)
    assert [line.removeprefix(front()) for line in terminal.lines] == ["once", "end"]


_BACK: list[ForwardedLogs] = []


def has_shown(text: str) -> bool:
    out: Any = sys.stdout
    return text in out.getvalue()


def forward_back() -> None:
    _BACK.append(rpc.forward_logs())


def stop_forwarding() -> None:
    _BACK.pop().stop()


# -- beginning and end


@inside
def test_everything_is_as_before_when_it_has_stopped() -> None:
    assert not rpc.rpc_sync("worker1", is_captured)
    forwarded = rpc.forward_logs(stream=Shown())
    assert rpc.rpc_sync("worker1", is_captured)
    assert not is_captured()
    forwarded.stop()
    forwarded.stop()
    assert not rpc.rpc_sync("worker1", is_captured)


@inside
def test_a_stream_that_was_replaced_meanwhile_stays() -> None:
    with quietly():
        with rpc.forward_logs(stream=Shown()):
            assert rpc.rpc_sync("worker1", replace_stdout)
        assert rpc.rpc_sync("worker1", has_replaced)


def replace_stdout() -> bool:
    captured = isinstance(sys.stdout, Tee)
    sys.stdout = _REPLACED
    return captured


def has_replaced() -> bool:
    return sys.stdout is _REPLACED


_REPLACED = io.StringIO()


@pytest.mark.parametrize("wrong", [{"level": "LOUD"}, {"lines_per_second": 0}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"LOUD|lines_per_second"):
        rpc.forward_logs(**wrong)


def test_outside_of_a_world_there_is_nothing_to_forward() -> None:
    with pytest.raises(rpc.NotAMemberError):
        rpc.forward_logs()


_rounds = itertools.count()
_KEPT: list[Any] = []


def come(rank: int, method: str) -> None:
    rpc.init_rpc(f"w{rank}", rank=rank, rpc_backend_options=options(method))


def begin() -> None:
    terminal = Shown()
    _KEPT[:] = [terminal, rpc.forward_logs(stream=terminal)]


def hear(text: str) -> list[str]:
    terminal: Shown = _KEPT[0]
    terminal.wait_for(text)
    return terminal.lines


def test_one_who_joins_later_is_heard_and_one_who_asked_and_died_is_forgotten(tmp_path: Path) -> None:
    method = f"file://{tmp_path}/meet"
    with World(3, join=False, timeout=60) as world:
        world.let_die(1)
        for rank in (0, 1):
            world.on(rank, come, rank, method)
        world.on(1, begin)
        world.on(2, come, 2, method)
        world.on(2, until, is_captured, 20)
        world.on(2, print, "late words")
        assert any("late words" in line and "[w2 " in line for line in world.on(1, hear, "late words"))
        world.kill(1)
        for rank in (2, 0):
            world.on(rank, until, lambda: not is_captured(), 20)
        for rank in (2, 0):
            world.on(rank, rpc.shutdown, False)


def shut_down_and_speak() -> None:
    print("before the end")
    rpc.shutdown(graceful=False)
    print("after it", type(sys.stdout).__name__)
    assert not is_captured()


def test_a_worker_that_leaves_gives_its_streams_back(tmp_path: Path) -> None:
    with World(2, timeout=60) as world:
        world.on(0, begin)
        assert world.on(1, is_captured)
        world.on(1, shut_down_and_speak)
        assert world.on(0, hear, "before the end")
        world.on(0, rpc.shutdown, False)


# -- pieces


def test_an_allowance_says_what_it_left_out_at_most_once_a_second() -> None:
    allowance = Allowance(10, 3)
    assert [allowance.take(0.0) for _ in range(5)] == [True, True, True, False, False]
    assert allowance.notice(0.0) is None  # there is no room yet
    assert allowance.notice(0.05, at_once=True) == "... 2 lines left out, of more than 10 a second"
    assert allowance.notice(5.0) is None
    assert [allowance.take(5.0) for _ in range(4)] == [True, True, True, False]
    assert allowance.notice(5.5) == "... 1 lines left out, of more than 10 a second"
    assert [allowance.take(5.5) for _ in range(4)] == [True, True, True, False]
    assert allowance.notice(6.0) is None
    assert allowance.notice(6.5) is not None


def test_of_a_progress_bar_the_last_state_is_shown_and_long_lines_are_cut() -> None:
    assert shown("10%\r50%\r100%") == "100%"
    assert shown("done\r") == "done"
    assert len(shown("x" * 100_000)) < 10_000
    assert "100000 characters" in shown("x" * 100_000)


def test_a_captured_stream_is_still_what_it_was() -> None:
    given: list[str] = []
    with open(os.devnull, "w") as plain:
        tee = Tee(plain, given.append)
        assert (tee.fileno(), tee.isatty(), tee.encoding) == (plain.fileno(), False, plain.encoding)
        print("(Pdb) ", end="", file=tee)
        tee.flush()
        assert given == []
        tee.writelines(["a\n", "b\nc"])
        tee.finish()
    assert given == ["(Pdb) a", "b", "c"]


def test_a_terminal_is_still_one_for_a_debugger() -> None:
    """input() asks the stream for its descriptor, and edits lines only where that is the terminal's."""
    controller, terminal = os.openpty()
    try:
        with os.fdopen(terminal, "w") as plain:
            tee = Tee(plain, lambda line: None)
            assert tee.isatty()
            assert tee.fileno() == plain.fileno()
    finally:
        os.close(controller)


# -- the library's own logs


def test_every_logger_of_the_package_is_in_one_tree() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger"):
                arguments = [ast.unparse(one) for one in node.args]
                allowed = {"'actorrpc'", "'actorrpc.failures'", "__name__"}
                if path.name == "forwarding.py":  # which looks at the loggers of others
                    allowed |= {"name"}
                    arguments = arguments or ["name"]
                assert set(arguments) <= allowed, f"{path}: {ast.unparse(node)}"
                assert arguments, f"{path}: {ast.unparse(node)}"


SECRET = "a-very-secret-token-of-this-test"


def say_all(rank: int, method: str) -> str:
    """Logs all that there is to log while a world with a token comes and goes; returns it, with what is shown of things
    that hold the token.
    """
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        chosen = options(method, security_token=SECRET)
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=chosen)
        current = session.current()
        rpc.rpc_sync(1 - rank, abs, args=(-1,))
        things = [chosen, current, current.options, current.worker, current.worker.record, current.worker.transport]
        text = repr(things) + " ".join(map(str, things)) + repr(current._store) + str(rpc.debug.dump())
        rpc.shutdown()
        wrong = options(method, security_token=SECRET + "!", init_timeout=0.5)
        with pytest.raises(rpc.RendezvousError) as raised:
            rpc.init_rpc("w0", rank=0, world_size=2, rpc_backend_options=wrong)
        return text + str(raised.value) + stream.getvalue()
    finally:
        root.removeHandler(handler)
        root.setLevel(logging.WARNING)


def test_no_token_is_in_a_log_or_in_what_is_shown_of_things() -> None:
    with World(2, join=False, timeout=60) as world:
        for rank in range(2):
            world.start(rank, say_all, rank, f"file://{world.folder}/secret-{rank // 2}")
        for text in world.results():
            assert "w0" in text
            assert SECRET not in text


def test_a_signal_handler_may_print_in_the_midst_of_the_taking_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(gate=LockGate, start=lambda run, name: None)
    worker: Any = SimpleNamespace(clock=clock, record=SimpleNamespace(name="a"))
    plain, took = Allowance.take, threading.Event()

    def take(allowance: Allowance, now: float) -> bool:
        if not took.is_set():
            took.set()
            source.give("the handler's")
        return plain(allowance, now)

    source = forwarding._Source(worker, "key", 0, logging.INFO, 100.0)
    try:
        monkeypatch.setattr(Allowance, "take", take)
        thread = threading.Thread(target=source.give, args=("first",), daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "a thread waits for itself"
        assert sorted(source._queue) == ["first", "the handler's"]
    finally:
        source._restore()
