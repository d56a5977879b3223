"""Other libraries' calls beside ours, where they are installed: Pyro5, RPyC, Xoscar and Ray.

None of them is among the requirements; each that cannot be imported is left out, with a line that says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from benchmarks.pairs import OURS, Lane, Measures, Plan, compare, latency, rpc_world, say
from benchmarks.rows import Result, Row, result_of

LARGE = 16 << 20
KEYS = {"noop": "noop", "echo": "echo of 10 doubles", "send": "send 16 MiB"}


class Service:
    """What is called."""

    def noop(self) -> None:
        pass

    def echo(self, value: Any) -> Any:
        return value

    def send(self, value: Any) -> None:
        len(value)


def _measures(call: Callable[..., object], ten: Any, large: Any) -> Measures:
    return {
        "noop": latency(lambda: call("noop")),
        "echo": latency(lambda: call("echo", ten)),
        "send": latency(lambda: call("send", large), 1),
    }


@contextlib.contextmanager
def ours(lane: Lane, rank: int, port: int) -> Generator[Measures]:
    """The same service through a reference of ours."""
    with rpc_world(lane, rank, port) as rpc:
        if rank:
            yield {}
            return
        service = rpc.remote("w1", Service)
        call = lambda name, *args: getattr(service.rpc_sync(), name)(*args)  # noqa: E731
        yield _measures(call, np.arange(10.0), np.ones(LARGE, np.uint8))


def _patiently(connect: Callable[[], Any]) -> Any:
    """Tries until the other process listens, for a while."""
    end = time.monotonic() + 30
    while True:
        try:
            return connect()
        except Exception:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


@contextlib.contextmanager
def pyro(lane: Lane, rank: int, port: int) -> Generator[Measures]:
    """Pyro5, whose serializers know no arrays: lists and bytes in their place."""
    api: Any = importlib.import_module("Pyro5.api")
    if rank:
        daemon = api.Daemon(host="127.0.0.1", port=port)
        daemon.register(api.expose(Service), "service")
        threading.Thread(target=daemon.requestLoop, daemon=True).start()
        yield {}
        return
    with api.Proxy(f"PYRO:service@127.0.0.1:{port}") as proxy:
        _patiently(proxy._pyroBind)
        yield _measures(lambda name, *args: getattr(proxy, name)(*args), [float(i) for i in range(10)], bytes(LARGE))


@contextlib.contextmanager
def rpyc(lane: Lane, rank: int, port: int) -> Generator[Measures]:
    """RPyC, which sends tuples and bytes by value and all else by reference."""
    module: Any = importlib.import_module("rpyc")
    server: Any = importlib.import_module("rpyc.utils.server")
    if rank:
        exposed = {f"exposed_{name}": getattr(Service, name) for name in KEYS}
        kind = type("ServiceOfRpyc", (module.Service,), exposed)
        listening = server.ThreadedServer(kind, hostname="127.0.0.1", port=port)
        threading.Thread(target=listening.start, daemon=True).start()
        yield {}
        return
    connection = _patiently(lambda: module.connect("127.0.0.1", port))
    root = connection.root
    yield _measures(lambda name, *args: getattr(root, name)(*args), tuple(map(float, range(10))), bytes(LARGE))
    connection.close()


@contextlib.contextmanager
def xoscar(lane: Lane, rank: int, port: int) -> Generator[Measures]:
    """Xoscar: an actor in another process of one pool; the calls are made from an event loop, one by one."""
    module: Any = importlib.import_module("xoscar")
    kind = type("ServiceOfXoscar", (module.Actor, Service), {})
    globals()[kind.__name__] = kind  # the pool's process finds it by name
    with asyncio.Runner() if hasattr(asyncio, "Runner") else contextlib.nullcontext(_Loop()) as runner:

        async def begin() -> tuple[Any, Any]:
            pool = await module.create_actor_pool(f"127.0.0.1:{port}", n_process=1)
            strategy = importlib.import_module("xoscar.backends.allocate_strategy").ProcessIndex(1)
            return pool, await module.create_actor(
                kind, address=pool.external_address, uid="service", allocate_strategy=strategy
            )

        pool, actor = runner.run(begin())
        yield _measures(
            lambda name, *args: runner.run(getattr(actor, name)(*args)), np.arange(10.0), np.ones(LARGE, np.uint8)
        )
        runner.run(pool.stop())


class _Loop:
    """What `asyncio.Runner` is, before Python 3.11."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def run(self, task: Any) -> Any:
        return self.loop.run_until_complete(task)


@contextlib.contextmanager
def ray(lane: Lane, rank: int, port: int) -> Generator[Measures]:
    """Ray: an actor in a process of its own."""
    module: Any = importlib.import_module("ray")
    module.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        actor = module.remote(Service).remote()
        call = lambda name, *args: module.get(getattr(actor, name).remote(*args))  # noqa: E731
        yield _measures(call, np.arange(10.0), np.ones(LARGE, np.uint8))
    finally:
        module.shutdown()


LIBRARIES: dict[str, tuple[str, Any, int]] = {
    "Pyro5": ("Pyro5", pyro, 2),
    "RPyC": ("rpyc", rpyc, 2),
    "Xoscar": ("xoscar", xoscar, 1),
    "Ray": ("ray", ray, 1),
}
"""By name: the module, the program, and how many processes of ours it takes."""


def peers(plan: Plan) -> list[Result]:
    """The same few calls with other libraries; theirs stand in torch's column."""
    found = []
    for name, (module, program, size) in LIBRARIES.items():
        if importlib.util.find_spec(module) is None:
            say(f"{name} is not installed; its rows are left out")
            continue
        lanes = [Lane("torch", program, size=size), Lane("ours", ours, OURS)]
        samples = compare(lanes, list(KEYS), plan, name)
        found += [result_of(Row(f"{name} {key}", f"{name}: {KEYS[key]}"), samples[key]) for key in KEYS]
    return found
