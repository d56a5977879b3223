"""The options of a worker: defaults, properties, and what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.rpc

import actorrpc as rpc
from actorrpc.options import CHANNELS, TRANSPORTS, devices_of, own_options
from actorrpc.services.devices import Devices

theirs: Any = torch.distributed.rpc
BOTH: list[type[rpc.RpcBackendOptions]] = [rpc.RpcBackendOptions, rpc.TensorPipeRpcBackendOptions]
CUDA = [torch.device("cuda", i) for i in range(9)]
CPU = torch.device("cpu")


def made(**more: Any) -> rpc.TensorPipeRpcBackendOptions:
    return rpc.TensorPipeRpcBackendOptions(**more)


# -- defaults and properties


def test_the_defaults_are_torchs() -> None:
    ours, torchs = made(), theirs.TensorPipeRpcBackendOptions()
    for name in ("num_worker_threads", "rpc_timeout", "init_method", "device_maps", "devices"):
        assert getattr(ours, name) == getattr(torchs, name)
    assert (ours.num_worker_threads, ours.rpc_timeout, ours.init_method) == (16, 60.0, "env://")
    assert (ours.device_maps, ours.devices) == ({}, [])
    base, torchs_base = rpc.RpcBackendOptions(), theirs.RpcBackendOptions()
    assert (base.rpc_timeout, base.init_method) == (torchs_base.rpc_timeout, torchs_base.init_method)


def test_the_options_of_tensorpipe_are_of_the_common_kind() -> None:
    assert isinstance(made(), rpc.RpcBackendOptions)
    assert type(made()).__name__ == "TensorPipeRpcBackendOptions"


def test_the_options_of_tensorpipe_are_given_by_keyword_as_torchs() -> None:
    kinds: list[Any] = [rpc.TensorPipeRpcBackendOptions, theirs.TensorPipeRpcBackendOptions]
    for kind in kinds:
        with pytest.raises(TypeError, match="positional"):
            kind(8)
    assert rpc.RpcBackendOptions(5, "tcp://h:1").init_method == "tcp://h:1"
    assert theirs.RpcBackendOptions(5, "tcp://h:1").init_method == "tcp://h:1"


def test_every_option_is_a_property_that_can_be_set_as_torchs_can() -> None:
    values: dict[str, Any] = {
        "num_worker_threads": 8,
        "rpc_timeout": 20.0,
        "init_method": "tcp://127.0.0.1:29500",
        "device_maps": {"w": {CUDA[0]: CUDA[1]}},
        "devices": [CUDA[0]],
    }
    for options in (made(), theirs.TensorPipeRpcBackendOptions()):
        for name, value in values.items():
            setattr(options, name, value)
            assert getattr(options, name) == value
    extra = made(**values, init_timeout=7, switch_interval=None, security_token="s")
    assert {name: getattr(extra, name) for name in values} == values
    assert (extra.init_timeout, extra.switch_interval, extra.security_token) == (7.0, None, "s")


@pytest.mark.parametrize("kind", BOTH)
def test_an_option_that_is_spelt_wrong_is_refused(kind: type[rpc.RpcBackendOptions]) -> None:
    options = kind()
    with pytest.raises(AttributeError, match=r"no option 'rpc_timeuot'; there are: .*report_leaks, rpc_timeout"):
        options.rpc_timeuot = 5.0  # type: ignore[attr-defined]
    options.report_leaks = True

    class Own(kind):  # type: ignore[misc, valid-type]
        pass

    own = Own()
    own.color = "red"
    assert own.color == "red"


@pytest.mark.parametrize("kind", BOTH)
def test_a_timeout_of_0_means_never_and_one_below_is_refused(kind: type[rpc.RpcBackendOptions]) -> None:
    assert kind(rpc_timeout=0).rpc_timeout == 0.0
    with pytest.raises(ValueError, match=r"rpc_timeout must be 0 \(never\)"):
        kind(rpc_timeout=-0.1)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "name, value, error",
    [
        ("rpc_timeout", -1, ValueError),
        ("rpc_timeout", float("nan"), ValueError),
        ("rpc_timeout", float("inf"), ValueError),
        ("rpc_timeout", "60", TypeError),
        ("rpc_timeout", None, TypeError),
        ("num_worker_threads", 0, ValueError),
        ("num_worker_threads", -4, ValueError),
        ("num_worker_threads", 2.5, TypeError),
        ("num_worker_threads", "8", TypeError),
        ("init_method", None, TypeError),
        ("init_method", 29500, TypeError),
        ("init_timeout", 0, ValueError),
        ("init_timeout", "soon", TypeError),
        ("switch_interval", 0, ValueError),
        ("security_token", 5, TypeError),
        ("security_token", "", ValueError),
        ("address", 5, TypeError),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name_when_made_and_when_set(
    kind: type[rpc.RpcBackendOptions], name: str, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=name):
        kind(**{name: value})
    options = kind()
    before = getattr(options, name)
    with pytest.raises(error, match=name):
        setattr(options, name, value)
    assert getattr(options, name) == before


def test_the_time_for_joining_comes_from_the_environment_where_it_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACTORRPC_INIT_TIMEOUT", raising=False)
    assert made().init_timeout == 300.0
    monkeypatch.setenv("ACTORRPC_INIT_TIMEOUT", "12.5")
    assert made().init_timeout == 12.5
    assert made(init_timeout=3).init_timeout == 3.0
    monkeypatch.setenv("ACTORRPC_INIT_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="ACTORRPC_INIT_TIMEOUT='soon'"):
        made()


def test_the_options_of_the_practitioners_notes_can_be_made() -> None:
    options = made(
        num_worker_threads=8,
        rpc_timeout=10000,
        init_method="tcp://127.0.0.1:29500",
        device_maps={"worker1": {0: 1}, "worker2": {1: 0}},
        security_token="my_rpc_token",
    )
    assert options.rpc_timeout == 10000.0  # seconds; the notes' comment says 10
    assert options.device_maps == {"worker1": {CUDA[0]: CUDA[1]}, "worker2": {CUDA[1]: CUDA[0]}}


# -- device maps


def test_a_device_is_given_by_number_name_or_torch_device_also_where_there_is_no_gpu() -> None:
    options = made(device_maps={"a": {0: 1, "cuda:1": torch.device("cuda:2"), CPU: 0}}, devices=[2, "cuda:0", CUDA[1]])
    assert options.device_maps == {"a": {CUDA[0]: CUDA[1], CUDA[1]: CUDA[2], CPU: CUDA[0]}}
    assert options.devices == [CUDA[2], CUDA[0], CUDA[1]]


def test_a_device_map_is_set_in_several_steps() -> None:
    options = made(num_worker_threads=8, device_maps={"worker1": {0: 1}})
    options.set_device_map("worker1", {1: 2})
    options.set_device_map("worker2", {0: 0})
    options.set_device_map("worker1", {0: 1, 2: 0})  # what is said once more changes nothing
    assert options.device_maps == {
        "worker1": {CUDA[0]: CUDA[1], CUDA[1]: CUDA[2], CUDA[2]: CUDA[0]},
        "worker2": {CUDA[0]: CUDA[0]},
    }


@pytest.mark.parametrize("step", [{0: 2}, {3: 1}, {3: 4, 5: 4}, {3: 4, "cuda:3": 5}])
def test_a_step_that_would_not_be_one_to_one_is_refused_and_adds_nothing(step: dict[Any, Any]) -> None:
    options = made(device_maps={"w": {0: 1}})
    with pytest.raises(ValueError, match=r'device map for "w" must be one to one.*cuda:'):
        options.set_device_map("w", step)
    assert options.device_maps == {"w": {CUDA[0]: CUDA[1]}}
    with pytest.raises(ValueError, match="one to one"):
        made(device_maps={"w": {0: 1, **step}}) if 0 not in step else options.set_device_map("w", step)


def test_set_devices_replaces_the_list() -> None:
    options = made(devices=[0])
    options.set_devices(["cuda:3", 1])
    assert options.devices == [CUDA[3], CUDA[1]]
    options.set_devices([])
    assert options.devices == []


@pytest.mark.parametrize(
    "attempt, error, words",
    [
        (lambda: made(devices=["cpu"]), ValueError, "CUDA devices, not cpu"),
        (lambda: made(devices=["cuda"]), ValueError, "which CUDA device"),
        (lambda: made(devices=["gpu0"]), ValueError, "'gpu0' is no device"),
        (lambda: made(devices=[-1]), ValueError, "-1"),
        (lambda: made(devices=[1.0]), TypeError, "float"),
        (lambda: made(devices=[True]), TypeError, "bool"),
        (lambda: made(devices="cuda:0"), TypeError, "list of devices"),
        (lambda: made(devices=3), TypeError, "list of devices"),
        (lambda: made().set_devices(["cpu"]), ValueError, "CUDA devices, not cpu"),
        (lambda: made(device_maps={"w": {"meta": 0}}), ValueError, "meta"),
        (lambda: made(device_maps={"w": [0, 1]}), TypeError, '"w" must be a dict'),
        (lambda: made(device_maps={0: {0: 1}}), TypeError, "by its name"),
        (lambda: made(device_maps=[("w", {0: 1})]), TypeError, "device_maps must be a dict"),
        (lambda: made().set_device_map(1, {0: 1}), TypeError, "by its name"),  # type: ignore[arg-type]
        (lambda: made().set_device_map("w", 1), TypeError, "dict of devices"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_device_or_no_map_is_refused(attempt: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        attempt()


def test_what_is_read_is_a_copy_so_that_no_map_goes_unchecked() -> None:
    options = made(device_maps={"w": {0: 1}}, devices=[0])
    options.device_maps["w"][CUDA[1]] = CUDA[1]
    options.devices.append(CUDA[0])
    assert (options.device_maps, options.devices) == ({"w": {CUDA[0]: CUDA[1]}}, [CUDA[0]])


def test_copies_of_options_go_their_own_ways() -> None:
    options = made(device_maps={"w": {0: 1}}, devices=[0], security_token=b"s")
    for other in (copy.copy(options), copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert vars(other) == vars(options)
        other.set_device_map("w", {1: 2})
        other.rpc_timeout = 1
    assert options.device_maps == {"w": {CUDA[0]: CUDA[1]}}
    assert options.rpc_timeout == 60.0


def test_what_a_worker_says_of_its_devices_comes_from_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    options = made(device_maps={"w": {0: 1, "cpu": "cuda:0"}}, devices=[2])
    assert devices_of(options) == Devices(3, {"w": {"cuda:0": "cuda:1", "cpu": "cuda:0"}}, ("cuda:2",))
    assert devices_of(rpc.RpcBackendOptions()) == Devices(3)


# -- transports and channels


@pytest.mark.parametrize("name, known", [("_transports", TRANSPORTS), ("_channels", CHANNELS)])
def test_known_transports_and_channels_are_taken_and_unknown_ones_refused(name: str, known: tuple[str, ...]) -> None:
    assert getattr(made(), name) is None
    assert getattr(made(**{name: [*known]}), name) == known
    assert getattr(made(**{name: []}), name) == ()
    with pytest.raises(ValueError, match=f"unknown name 'carrier-pigeon' in {name}; known are: {', '.join(known)}"):
        made(**{name: [known[0], "carrier-pigeon"]})
    for wrong in ("shm", 3):
        with pytest.raises(TypeError, match=f"{name} must be a list"):
            made(**{name: wrong})


def test_whatever_torch_knows_of_transports_and_channels_is_known_here() -> None:
    for name in ("ibv", "shm", "uv", "tcp"):
        assert name in TRANSPORTS
    for name in ("basic", "cma", "mpt_uv", "cuda_ipc", "cuda_basic", "cuda_gdr", "cuda_xth", "shm"):
        assert name in CHANNELS
    for name in TRANSPORTS:
        try:
            theirs.TensorPipeRpcBackendOptions(_transports=[name])
        except RuntimeError:
            assert name == "tcp"  # the notes list it; torch's own name for it is uv


# -- the token


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("token", ["my_rpc_token", b"my_rpc_token"])
def test_a_security_token_is_kept_and_never_shown(kind: type[rpc.RpcBackendOptions], token: str | bytes) -> None:
    options = kind(security_token=token)
    assert options.security_token == token
    assert "my_rpc_token" not in repr(options) + str(options) + f"{options}"
    assert "security_token='(not shown)'" in repr(options)
    with pytest.raises(TypeError) as caught:
        kind(security_token=("my_rpc_token",))  # type: ignore[arg-type]
    assert "my_rpc_token" not in str(caught.value)


def test_options_show_what_they_are() -> None:
    text = repr(made(rpc_timeout=3, device_maps={"w": {0: 1}}))
    for part in ("TensorPipeRpcBackendOptions(", "rpc_timeout=3.0", "'w'", "cuda", "security_token=None"):
        assert part in text


# -- torch's own options


def test_options_made_by_torch_are_taken_over() -> None:
    torchs = theirs.TensorPipeRpcBackendOptions(
        num_worker_threads=3,
        rpc_timeout=7,
        init_method="tcp://h:1",
        device_maps={"w": {"cuda:0": "cuda:1"}},
        devices=["cuda:0"],
    )
    own = own_options(torchs)
    assert type(own) is rpc.TensorPipeRpcBackendOptions
    assert (own.num_worker_threads, own.rpc_timeout, own.init_method) == (3, 7.0, "tcp://h:1")
    assert (own.device_maps, own.devices) == ({"w": {CUDA[0]: CUDA[1]}}, [CUDA[0]])
    base = own_options(theirs.RpcBackendOptions(rpc_timeout=9, init_method="file:///x"))
    assert (base.rpc_timeout, base.init_method, base.num_worker_threads) == (9.0, "file:///x", 16)


def test_what_torch_lets_pass_is_refused_when_it_is_taken_over() -> None:
    torchs = theirs.TensorPipeRpcBackendOptions()
    torchs.rpc_timeout = -3
    with pytest.raises(ValueError, match="rpc_timeout"):
        own_options(torchs)


def test_options_of_the_library_are_taken_as_they_are_and_others_refused() -> None:
    class Mine(rpc.TensorPipeRpcBackendOptions):
        """Derived for convenience."""

    class Strange(rpc.RpcBackendOptions):
        """Of another backend."""

    for options in (rpc.RpcBackendOptions(), made(), Mine()):
        assert own_options(options) is options
    for wrong in (Strange(), 3, None, {"rpc_timeout": 5}):
        with pytest.raises(TypeError, match=rf"for BackendType.TENSORPIPE; not .*{type(wrong).__name__}"):
            own_options(wrong)


# -- long gone


def test_the_options_of_the_process_group_backend_say_that_they_are_gone() -> None:
    from actorrpc import ProcessGroupRpcBackendOptions

    with pytest.raises(RuntimeError, match=r"gone.*write TensorPipeRpcBackendOptions.*BackendType.TENSORPIPE"):
        ProcessGroupRpcBackendOptions(num_send_recv_threads=4)
