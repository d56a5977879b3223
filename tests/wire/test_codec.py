"""Objects through the codec: what goes by name, what by value, what is refused and with which words."""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import fnmatch
import functools
import importlib
import operator
import pickle
import re
import socket
import subprocess
import sys
import textwrap
import threading
import timeit
import types
import warnings
import weakref
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import zmq

from actorrpc.errors import DeserializationError, SerializationError, UnknownNameError
from actorrpc.wire.codec import Codec, mentions_main, reading, writing


@pytest.fixture
def codec() -> Codec:
    return Codec()


class Reference:
    """Stands for a reference type, which counts how often it was written."""

    def __init__(self, key: int) -> None:
        self.key = key


class Noted:
    def __init__(self) -> None:
        self.keys: list[int] = []
        self.restarts = 0

    def restart(self) -> None:
        self.keys.clear()
        self.restarts += 1


def reduce_reference(reference: Reference) -> tuple[Any, ...]:
    notes = writing()
    if notes is not None:
        notes.keys.append(reference.key)
    return make_reference, (reference.key,)


def make_reference(key: int) -> Reference:
    notes = reading()
    if notes is not None:
        notes.keys.append(key)
    return Reference(key)


def load_nested(frames: list[bytes]) -> Any:
    notes = reading()
    result = Codec().loads(frames)
    assert reading() is notes
    return result


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: float
    other: Any = None


def roundtrip(codec: Codec, obj: Any) -> Any:
    return codec.loads(codec.dumps(obj))


@pytest.mark.parametrize(
    "obj",
    [
        None,
        (operator.add, (1, 2.5), {"key": "word"}),
        Point(1.0, [Point(2.0)]),
        Color.RED,
        1 + 2j,
        re.compile("a+"),
        b"x" * 100_000,
        bytearray(b"y" * 100_000),
        torch.float8_e5m2,
        torch.device("cpu"),
        torch.Size([2, 3]),
        torch.strided,
        {1, 2},
        types.SimpleNamespace(a=1),
    ],
    ids=lambda obj: type(obj).__name__,
)
def test_what_plain_pickle_takes_arrives_equal(codec: Codec, obj: Any) -> None:
    back = roundtrip(codec, obj)
    assert back == obj
    assert type(back) is type(obj)


def test_a_generator_of_random_numbers_keeps_its_state(codec: Codec) -> None:
    source = torch.Generator().manual_seed(3)
    assert torch.equal(torch.rand(3, generator=roundtrip(codec, source)), torch.rand(3, generator=source))


def test_lambdas_closures_local_classes_and_partials_arrive(codec: Codec) -> None:
    weight = torch.full((20_000,), 2.0)

    class Local:
        factor = 3

        def scale(self, x: int) -> int:
            return self.factor * x

    frames = codec.dumps([lambda x: weight[0] * x, Local(), functools.partial(lambda a, b: a - b, 5)])
    assert len(frames) == 2  # the closure's tensor goes out of band
    double, local, minus = codec.loads(frames)
    assert double(4) == 8
    assert local.scale(2) == 6
    assert minus(1) == 4


def test_functions_with_a_cache_arrive_by_name_or_with_a_new_cache(codec: Codec) -> None:
    assert roundtrip(codec, [fnmatch._compile_pattern, lambda: 0])[0] is fnmatch._compile_pattern  # type: ignore[attr-defined]
    local = functools.lru_cache(maxsize=5, typed=True)(lambda x: [x])
    local(1)
    back = roundtrip(codec, local)
    assert back.cache_parameters() == {"maxsize": 5, "typed": True}
    assert back.cache_info().currsize == 0
    assert back(2) == [2]


def test_cloudpickle_uses_the_same_reducers_and_keeps_aliases(codec: Codec) -> None:
    codec.register(Reference, reduce_reference)
    notes = Noted()
    base = torch.zeros(100)
    _, reference, a, b = codec.loads(codec.dumps([lambda: 0, Reference(7), base, base[1:]], notes))
    a.fill_(1)
    assert reference.key == 7
    assert b.eq(1).all()
    assert (notes.keys, notes.restarts) == ([7], 1)


def test_reducers_find_the_notes_of_their_own_message_and_nested_ones_restore_them(codec: Codec) -> None:
    inner_notes, outer_notes = Noted(), Noted()

    def reduce_nesting(reference: Reference) -> tuple[Any, ...]:
        if reference.key:
            inner = codec.dumps(Reference(reference.key - 1), inner_notes)
            assert writing() is (outer_notes if reference.key == 2 else inner_notes)
            return load_nested, ([bytes(frame) for frame in inner],)
        return make_reference, (reference.key,)

    codec.register(Reference, reduce_nesting)
    frames = codec.dumps([Reference(2), torch.zeros(3)], outer_notes)
    assert writing() is None
    assert codec.loads(frames, outer_notes)[0].key == 0
    assert reading() is None
    assert (inner_notes.keys, outer_notes.keys) == ([], [])  # the innermost message was read without notes
    with pytest.raises(SerializationError):
        codec.dumps(threading.Lock(), outer_notes)
    assert writing() is None
    with pytest.raises(DeserializationError):
        codec.loads([b"\x80\x05nonsense"], outer_notes)
    assert reading() is None


def test_notes_reach_the_functions_that_load(codec: Codec) -> None:
    codec.register(Reference, reduce_reference)
    notes = Noted()
    codec.loads(codec.dumps([Reference(1), Reference(2)]), notes)
    assert notes.keys == [1, 2]


def test_a_registered_reducer_goes_before_the_class_and_before_copyreg(codec: Codec) -> None:
    codec.dumps(1)
    copyreg.pickle(Point, lambda point: (Point, (-1.0,)))
    try:
        assert roundtrip(codec, Point(1.0)).x == -1.0
        codec.register(Point, lambda point: (Point, (point.x * 10,)))
        assert roundtrip(codec, Point(1.0)).x == 10.0
        assert pickle.loads(pickle.dumps(Point(1.0))).x == -1.0
    finally:
        del copyreg.dispatch_table[Point]


def test_two_codecs_do_not_share_reducers(codec: Codec) -> None:
    codec.register(Reference, lambda reference: (make_reference, (99,)))
    assert roundtrip(codec, Reference(1)).key == 99
    assert roundtrip(Codec(), Reference(1)).key == 1


def test_an_error_does_not_spoil_the_next_message(codec: Codec) -> None:
    for _ in range(3):
        with pytest.raises(SerializationError):
            codec.dumps([torch.zeros(20_000), np.zeros(20_000), threading.Lock()])
        assert len(codec.dumps(1)) == 1
        assert roundtrip(codec, [torch.ones(2)])[0].sum() == 2


class Watched:
    pass


def test_a_codec_keeps_nothing_of_a_message_alive(codec: Codec) -> None:
    for large in (False, True):
        tensor, base, watched = torch.zeros(20_000 if large else 3), torch.zeros(100_000), Watched()
        notes = Noted()
        gone = [weakref.ref(item) for item in (tensor, base, watched, notes)]
        frames = codec.dumps([tensor, base[7], watched], notes)
        copies = [bytes(frame) for frame in frames]
        del tensor, base, watched, notes, frames
        assert [reference() for reference in gone] == [None] * 4
        gone = [weakref.ref(item) for item in codec.loads(copies)]
        assert [reference() for reference in gone] == [None] * 3


def test_keys_that_cannot_be_shown_do_not_hide_the_error(codec: Codec) -> None:
    class Shy:
        def __repr__(self) -> str:
            raise ValueError

    with pytest.raises(SerializationError, match=r"_thread\.lock"):
        codec.dumps({Shy(): threading.Lock()})


@pytest.mark.parametrize("times", [2, 99])
def test_what_another_threads_import_came_in_the_way_of_is_read_again_some_times(
    codec: Codec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Python does so within an instant of its imports only, which cannot be hit at will."""
    error = importlib._bootstrap._DeadlockError("detected")  # type: ignore[attr-defined]
    left = [error] * times
    monkeypatch.setitem(sys.modules, "left_to_raise", cast(Any, left))
    (tmp_path / "comes_later.py").write_text(
        "import left_to_raise\nif left_to_raise: raise left_to_raise.pop()\ndef f(): return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    message = [b"ccomes_later\nf\n."]
    if times > 9:
        with pytest.raises(DeserializationError, match="detected"):
            codec.loads(message)
    else:
        assert codec.loads(message)() == 1
        sys.modules.pop("comes_later")


def test_threads_may_share_a_codec(codec: Codec) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(100):
                message = [torch.full((50,), float(seed + i)), lambda i=i: i, Point(seed)]
                tensor, function, point = roundtrip(codec, message if i % 10 == 0 else [message[0], None, message[2]])
                assert tensor[0] == seed + i
                assert function is None or function() == i
                assert point.x == seed
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_frames_of_zeromq_become_the_memory_of_what_is_read(codec: Codec) -> None:
    context = zmq.Context()
    left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    try:
        port = left.bind_to_random_port("tcp://127.0.0.1")
        right.connect(f"tcp://127.0.0.1:{port}")
        sent: list[Any] = [torch.randn(50_000), np.arange(50_000.0), torch.randn(1000, 1000)[7:30]]
        right.send_multipart(codec.dumps(sent), copy=False)
        frames = left.recv_multipart(copy=False)
        tensor, array, rows = codec.loads(frames)
        assert torch.equal(tensor, sent[0])
        assert np.array_equal(array, sent[1])
        assert torch.equal(rows, sent[2])
        tensor.add_(1)
        array += 1
        address = np.frombuffer(frames[1].buffer, np.uint8).ctypes.data
        assert tensor.data_ptr() == address
    finally:
        context.destroy(linger=0)


def test_the_first_frame_may_be_a_part_of_a_larger_one(codec: Codec) -> None:
    head, *rest = codec.dumps([1, torch.zeros(20_000)])
    whole = memoryview(b"header" + bytes(head))
    assert codec.loads([whole[6:], *rest])[0] == 1


def numbers() -> Generator[int, None, None]:
    yield 1


async def coroutine() -> None:
    pass


def test_what_lives_in_one_process_is_refused_by_its_type(codec: Codec) -> None:
    pending = coroutine()
    with socket.socket() as sock, Path(__file__).open() as file:
        for obj, name in (
            (numbers(), "generator"),
            (pending, "coroutine"),
            (threading.Lock(), "_thread.lock"),
            (sock, "socket.socket"),
            (file, "_io.TextIOWrapper"),
        ):
            with pytest.raises(SerializationError, match=f"type {name}") as caught:
                codec.dumps({"deep": [1, Point(1.0, obj)]})
            assert "message['deep'][1].other" in str(caught.value)
            assert ("list(it)" if name in ("generator", "coroutine") else "__getstate__") in str(caught.value)
            assert caught.value.__cause__ is not None
    pending.close()


def test_the_way_to_a_bad_closure_variable_is_named(codec: Codec) -> None:
    lock = threading.Lock()
    with pytest.raises(SerializationError, match=r"message\[0\]\.<closure variable lock>"):
        codec.dumps([lambda: lock])


def test_an_object_too_deep_to_write_is_an_error_not_a_crash(codec: Codec) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(SerializationError, match="recursion"):
        codec.dumps(deep)
    while deep:  # taken apart step by step
        deep = deep[0]


def test_a_serialization_error_of_a_reducer_is_passed_on_unchanged(codec: Codec) -> None:
    def refuse(reference: Reference) -> Any:
        raise SerializationError("references stay at home")

    codec.register(Reference, refuse)
    with pytest.raises(SerializationError, match=r"^references stay at home$"):
        codec.dumps([Reference(1)])


class Explosive:
    def __setstate__(self, state: Any) -> None:
        raise AttributeError("no such luck")

    def __init__(self) -> None:
        self.x = 1


def test_an_object_that_cannot_be_loaded_is_not_taken_for_a_missing_name(codec: Codec) -> None:
    with pytest.raises(DeserializationError, match="no such luck") as caught:
        roundtrip(codec, Explosive())
    assert type(caught.value) is DeserializationError
    assert isinstance(caught.value.__cause__, AttributeError)


@pytest.mark.parametrize("data", [b"", b"\x80\x05", b"nonsense", b"\x80\x05\x97."])
def test_broken_frames_give_an_error_of_ours(codec: Codec, data: bytes) -> None:
    with pytest.raises(DeserializationError):
        codec.loads([data])


def test_a_missing_module_or_name_is_named(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("here_only")
    exec("def f(): pass\nclass A:\n  class B: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "here_only", module)
    function, inner = codec.dumps([operator.add, module.f]), codec.dumps([module.A.B(), module.A.B])
    local = codec.dumps(lambda: module)
    del module.A.B
    with pytest.raises(UnknownNameError, match=r"'here_only' has no 'A\.B'") as caught:
        codec.loads(inner)
    assert (caught.value.module, caught.value.name) == ("here_only", "A.B")
    monkeypatch.delitem(sys.modules, "here_only")
    with pytest.raises(UnknownNameError, match="'here_only' cannot be imported") as caught:
        codec.loads(function)
    assert (caught.value.module, caught.value.name) == ("here_only", "f")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    with pytest.raises(UnknownNameError) as caught:
        codec.loads(local)
    assert caught.value.module == "here_only"


def test_the_same_object_twice_is_one_object(codec: Codec) -> None:
    shared = Point(1.0)
    a, b = roundtrip(codec, [shared, shared])
    assert a is b
    loop: list[Any] = []
    loop.append(loop)
    back = roundtrip(codec, loop)
    assert back[0] is back


MAIN = """
    import multiprocessing, sys
    from actorrpc.errors import UnknownNameError
    from actorrpc.wire.codec import Codec, mentions_main

    SCALE = 3

    def triple(x):
        return SCALE * x

    class Thing:
        def __init__(self, x): self.x = x
        def get(self): return triple(self.x)

    def frames_for(kind):
        codec, by_value = Codec(), kind == "value"
        obj = [triple, Thing(4), (lambda y: triple(y)) if kind == "mixed" else None]
        frames = [bytes(frame) for frame in codec.dumps(obj, by_value=by_value)]
        assert mentions_main(frames)
        return __name__, frames

    def read(frames):
        f, thing, _ = Codec().loads(frames)
        return f(2), thing.get(), type(thing) is Thing, f is triple

    if __name__ == "__main__":
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            for kind in ("name", "mixed", "value"):
                child, frames = pool.apply(frames_for, (kind,))
                assert child == "__mp_main__", child
                known = kind != "value"
                assert read(frames) == (6, 12, known, known), (kind, "from child", read(frames))
                own = frames_for(kind)[1]
                assert pool.apply(read, (own,)) == (6, 12, known, known), (kind, "to child")
            values = pool.apply(frames_for, ("value",))[1], frames_for("value")[1]
            names = pool.apply(frames_for, ("name",))[1], frames_for("mixed")[1]
        sys.modules["__main__"].__dict__.pop("triple")
        del sys.modules["__main__"].__dict__["Thing"]
        for frames in values:
            f, thing, _ = Codec().loads(frames)
            assert (f(2), thing.get()) == (6, 12)
        for frames in names:
            try:
                Codec().loads(frames)
            except UnknownNameError as error:
                assert (error.module in ("__main__", "__mp_main__"), error.name in ("triple", "Thing")) == (True, True)
            else:
                raise AssertionError("the names were found")
        print("fine")
"""


def test_things_of_main_go_by_name_and_on_request_by_value_from_and_to_spawned_processes(tmp_path: Path) -> None:
    script = tmp_path / "main_program.py"
    script.write_text(textwrap.dedent(MAIN))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == ("fine", "")


def test_only_messages_that_name_main_are_said_to(codec: Codec) -> None:
    assert not mentions_main(codec.dumps((operator.add, (1, 2), {})))
    assert mentions_main([memoryview(b"..__mp_main__..")])
    assert mentions_main([b"..__main__.."])


def plain_add(x: torch.Tensor, y: int) -> torch.Tensor:
    return x + y


def jit(function: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


scripted_add = jit(plain_add)


class Doubler(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_scripted_functions_go_by_name_and_scripted_modules_by_value(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__, types.ModuleType(__name__)))
    assert roundtrip(codec, [scripted_add])[0] is scripted_add
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert roundtrip(codec, jit(Doubler()))(torch.ones(1)) == 2


def test_a_scripted_function_that_no_module_holds_is_refused(codec: Codec) -> None:
    def hidden(x: int) -> int:
        return x

    with pytest.raises(SerializationError, match=r"hidden.*goes by name"):
        codec.dumps([jit(hidden)])


def test_pickling_a_small_call_costs_little_more_than_pickle(codec: Codec) -> None:
    call: Any = (operator.add, (1, 2), {})

    def best(function: Callable[[], Any]) -> float:
        return min(timeit.repeat(function, number=500, repeat=20)) / 500

    # Generous, so that only a change of kind fails it.
    assert best(lambda: codec.dumps(call)) < best(lambda: pickle.dumps(call, 5)) + 10e-6
