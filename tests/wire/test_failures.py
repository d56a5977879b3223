"""Exceptions through the wire: writing never fails, reading always gives one, and the remote traceback is there."""

from __future__ import annotations

import builtins
import dataclasses
import sys
import threading
import traceback
import types
from typing import Any

import pytest
import torch

from actorrpc.errors import GROUPS, DeserializationError, RemoteError, RemoteTraceback
from actorrpc.wire import failures
from actorrpc.wire.codec import Codec
from actorrpc.wire.failures import read_failure, write_failure

WHERE = {"worker": "observer:0", "rank": 1, "host": "h", "pid": 42}


@pytest.fixture
def codec() -> Codec:
    return Codec()


def raised(exc: BaseException) -> BaseException:
    try:
        raise exc
    except BaseException as caught:
        return caught


def journey(codec: Codec, exc: BaseException, where: Any = WHERE) -> BaseException:
    frames = [bytes(frame) for frame in write_failure(raised(exc), where, codec)]
    back = read_failure(frames, Codec())
    assert isinstance(back.__cause__, RemoteTraceback)
    "".join(traceback.format_exception(back))  # can be printed
    return back


class TwoArguments(Exception):
    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"{code}: {what}")
        self.code = code
        self.what = what


class Decorating(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(f"<{text}>")


class Locked(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text, threading.Lock())
        self.lock = threading.Lock()
        self.tensor = torch.ones(3)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


class Unreducible(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not me")


class NotHere(Exception):
    def __new__(cls) -> Any:
        raise TypeError("never")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Quitting(SystemExit):
    pass


class Stopping(KeyboardInterrupt):
    pass


class Needy(Exception):
    def __new__(cls, *, needed: int) -> Needy:
        return super().__new__(cls)

    def __init__(self, *, needed: int) -> None:
        pass


class Fighting(Exception):
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("nor my attributes")

    def __reduce__(self) -> Any:
        raise RecursionError

    def __repr__(self) -> str:
        raise RuntimeError("nor my looks")

    __str__ = __repr__


@pytest.mark.parametrize(
    "exc",
    [
        ValueError("bad", 3),
        KeyError("k"),
        FileNotFoundError(2, "No such file", "name"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "why"),
        StopIteration(4),
        TwoArguments(5, "five"),
        Decorating("x"),
        Unreducible("hello"),
        Frozen(3),
        Quitting(3),
        Stopping(),
        RemoteError("x", type_name="a.B", text="x", where="here"),
    ],
    ids=lambda exc: type(exc).__name__,
)
def test_an_importable_exception_keeps_type_arguments_and_text(codec: Codec, exc: BaseException) -> None:
    back = journey(codec, exc)
    assert type(back) is type(exc)
    assert (back.args, str(back)) == (exc.args, str(exc))
    assert {k: v for k, v in vars(back).items() if k != "__notes__"} == vars(exc)


def test_what_cannot_travel_of_an_exception_stays_behind_and_the_rest_arrives(codec: Codec) -> None:
    back = journey(codec, Locked("why"))
    assert type(back) is Locked
    assert back.args[0] == "why"
    assert "lock" in back.args[1]
    assert not hasattr(back, "lock")
    assert back.tensor.sum() == 3


def test_an_exception_whose_str_raises_arrives_as_one_that_can_be_printed(codec: Codec) -> None:
    back = journey(codec, Unprintable("x"))
    assert isinstance(back, RemoteError)
    assert back.type_name.endswith("test_failures.Unprintable")
    assert "str() fails" in str(back)


def test_an_exception_that_resists_in_every_way_is_reported_all_the_same(codec: Codec) -> None:
    back = journey(codec, Fighting(threading.Lock()))
    assert isinstance(back, RemoteError)
    assert back.type_name.endswith("test_failures.Fighting")
    assert "Fighting" in str(back.__cause__)


def test_a_local_exception_class_arrives(codec: Codec) -> None:
    class Local(Exception):
        pass

    back = journey(codec, Local("here"))
    assert type(back).__name__ == "Local"
    assert str(back) == "here"


def test_an_exception_that_cannot_be_made_without_its_constructor_is_a_remote_error(codec: Codec) -> None:
    back = journey(codec, Needy(needed=3))
    assert isinstance(back, RemoteError)
    assert back.type_name.endswith("test_failures.Needy")


def test_an_exception_type_that_the_reader_lacks_is_a_remote_error_with_its_name_and_text(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("only_there")
    exec("class Odd(Exception): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_there", module)
    frames = write_failure(raised(module.Odd("strange")), WHERE, codec)
    monkeypatch.delitem(sys.modules, "only_there")
    back = read_failure(frames, codec)
    assert type(back) is RemoteError
    assert (back.type_name, back.text) == ("only_there.Odd", "strange")
    assert str(back) == "only_there.Odd: strange"
    assert back.where == 'worker "observer:0" (rank 1, host h, pid 42)'


def test_an_argument_that_the_reader_cannot_read_does_not_cost_the_type(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("only_there")
    exec("class Value: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_there", module)
    frames = write_failure(raised(ValueError("text", module.Value())), WHERE, codec)
    monkeypatch.delitem(sys.modules, "only_there")
    back = read_failure(frames, codec)
    assert type(back) is ValueError
    assert "text" in str(back)


def test_the_cause_shows_where_it_happened_and_the_remote_chain(codec: Codec) -> None:
    def fail() -> None:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error

    with pytest.raises(ValueError, match="second") as caught:
        fail()
    back = read_failure(write_failure(caught.value, WHERE, codec), codec)
    text = "".join(traceback.format_exception(back))
    assert 'On worker "observer:0" (rank 1, host h, pid 42):' in text
    assert "KeyError: 'first'" in text
    assert "in fail" in text
    assert text.rstrip().endswith("ValueError: second")


def test_where_may_be_words(codec: Codec) -> None:
    assert "On the far side:" in str(journey(codec, ValueError(1), where="the far side").__cause__)
    assert "On a worker (pid 3):" in str(journey(codec, ValueError(1), where={"pid": 3}).__cause__)


def test_long_texts_lose_their_middle(codec: Codec) -> None:
    class Shouting(Exception):
        def __str__(self) -> str:
            return "a" * 5_000_000 + "end"

        def __reduce__(self) -> Any:
            raise TypeError

    frames = write_failure(Shouting(), WHERE, codec)
    assert sum(len(frame) for frame in frames) < 3 * failures.TEXT_LIMIT
    assert "characters left out" in str(read_failure(frames, codec).__cause__)


def test_a_failure_can_be_passed_on_to_a_third_worker(codec: Codec) -> None:
    first = journey(codec, TwoArguments(1, "one"))
    second = journey(codec, first, where="the second worker")
    assert type(second) is TwoArguments
    text = str(second.__cause__)
    assert text.index('On worker "observer:0"') > text.index("On the second worker")


def test_frames_that_hold_no_failure_are_refused(codec: Codec) -> None:
    with pytest.raises(DeserializationError):
        read_failure(codec.dumps("something else"), codec)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are of Python 3.11")
def test_exception_groups_arrive_with_their_members(codec: Codec) -> None:
    group: Any = getattr(builtins, "ExceptionGroup")  # noqa: B009 - Python 3.10 has none
    easy = journey(codec, group("all", [ValueError(1), KeyError("k")]))
    assert type(easy) is group
    assert [type(member) for member in easy.exceptions] == [ValueError, KeyError]  # type: ignore[attr-defined]
    hard = journey(codec, group("all", [Locked("x"), group("inner", [TwoArguments(1, "a"), Unprintable()])]))
    assert type(hard) is group
    locked, inner = hard.exceptions  # type: ignore[attr-defined]
    assert type(locked) is Locked
    assert [type(member) for member in inner.exceptions] == [TwoArguments, RemoteError]


# -- whose frames are shown


def ours(name: str, source: str) -> Any:
    """Compiles a function as if it were one of the package's."""
    space: dict[str, Any] = {}
    exec(compile(source, f"{failures._PACKAGE}runtime/{name}.py", "exec"), space)
    return space[name]


through = ours("through", "def through(f):\n    return f()")
failing = ours("failing", "def failing():\n    raise ValueError('of the package')")


def theirs() -> None:
    raise KeyError("of the user")


def theirs_from_ours() -> None:
    try:
        through(failing)
    except ValueError as e:
        raise KeyError("of the user") from e


def text_of(codec: Codec, run: Any) -> str:
    try:
        run()
    except Exception as e:
        back = read_failure([bytes(frame) for frame in write_failure(e, WHERE, codec)], Codec())
        return str(back.__cause__)
    raise AssertionError("it did not raise")


def test_a_remote_traceback_shows_the_users_frames_and_not_the_packages(codec: Codec) -> None:
    text = text_of(codec, lambda: through(lambda: through(theirs)))
    assert "in theirs" in text
    assert "runtime/through.py" not in text
    assert text.count("<lambda>") == 2
    text = text_of(codec, lambda: through(theirs_from_ours))
    assert "of the package" in text  # the cause is told, with the user's part of its frames
    assert text.count("in theirs_from_ours") == 2
    assert "in failing" not in text


def test_an_error_of_the_packages_own_keeps_its_frames(codec: Codec) -> None:
    with pytest.raises(ValueError, match="of the package") as caught:
        failing()
    trace = caught.value.__traceback__
    assert trace is not None
    error = caught.value.with_traceback(trace.tb_next)
    assert "in failing" in str(read_failure(write_failure(error, WHERE, codec), Codec()).__cause__)


@pytest.mark.parametrize("value,full", [("1", True), ("0", False), ("", False)])
def test_all_frames_are_shown_to_who_wants_them(
    value: str, full: bool, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTORRPC_FULL_TRACEBACKS", value)
    text = text_of(codec, lambda: through(theirs))
    assert ("runtime/through.py" in text) is full


def test_the_frames_of_a_groups_members_are_cut_too(codec: Codec) -> None:
    def group() -> None:
        try:
            through(theirs)
        except KeyError as e:
            raise GROUPS("several", [e]) from None

    text = text_of(codec, group)
    assert "runtime/through.py" not in text
