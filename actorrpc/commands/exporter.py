"""The figures of a world for Prometheus: `actorrpc top --prometheus`. One process serves those of all workers."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from actorrpc.commands.failing import CommandError
from actorrpc.commands.top import say_end
from actorrpc.commands.watching import Watcher
from actorrpc.services.figures import BOUNDS, gather

if TYPE_CHECKING:
    from collections.abc import Iterator

    from actorrpc.attaching import Attached
    from actorrpc.services.figures import WorkerFigures, WorldFigures
    from actorrpc.session import Session

_LOOPBACK = "127.0.0.1"
_ANSWER_SECONDS = 5.0
"""What workers get to answer; Prometheus itself waits for ten seconds, unless told otherwise."""
_FRESH_SECONDS = 0.5
"""For how long an answer will do for other scrapes."""
_LOOK_SECONDS = 0.5
_EACH = 4
"""So many classes of times make one of the histogram, whose bounds are a factor of two apart."""
_LABELS = ("worker", "role", "host")


class Collector:
    """Asks the world whenever somebody scrapes. What prometheus_client calls a custom collector.

    Arguments:
        session: the guest's.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._door = threading.Lock()
        self._found: WorldFigures | None = None
        self._at = 0.0

    def describe(self) -> list[Any]:
        """Nothing: what there is depends on the world."""
        return []

    def collect(self) -> Iterator[Any]:
        """Returns the present figures."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        world = self._look()
        up = GaugeMetricFamily("actorrpc_worker_up", "whether a worker answers", labels=("worker",))
        for figures in world.workers:
            up.add_metric([figures.name], 1)
        for name in {*world.silent, *world.lost}:
            up.add_metric([name], 0)
        yield up
        yield GaugeMetricFamily("actorrpc_workers_lost", "workers that were lost and not replaced", len(world.lost))
        for name, help_, value in _COUNTERS:
            counter = CounterMetricFamily(name, help_, labels=_LABELS)
            for figures in world.workers:
                counter.add_metric(_labels(figures), value(figures))
            yield counter
        for name, help_, value in _GAUGES:
            gauge = GaugeMetricFamily(name, help_, labels=_LABELS)
            for figures in world.workers:
                if (now := value(figures)) is not None:
                    gauge.add_metric(_labels(figures), now)
            yield gauge
        times = HistogramMetricFamily(
            "actorrpc_call_seconds", "how long calls took, from their coming until they were answered", labels=_LABELS
        )
        for figures in world.workers:
            times.add_metric(_labels(figures), buckets_of(figures.times), figures.seconds)
        yield times

    def _look(self) -> WorldFigures:
        with self._door:
            now = time.monotonic()
            if self._found is None or now - self._at > _FRESH_SECONDS:
                self._found = gather(self._session.worker, _ANSWER_SECONDS)
                self._at = time.monotonic()
            return self._found


_COUNTERS: tuple[tuple[str, str, Any], ...] = (
    ("actorrpc_calls_served", "calls and tells that came to a worker", lambda f: f.served),
    ("actorrpc_calls_sent", "calls and tells that a worker sent", lambda f: f.sent),
    ("actorrpc_received_bytes", "bytes of messages from others", lambda f: f.bytes_in),
    ("actorrpc_sent_bytes", "bytes of messages to others", lambda f: f.bytes_out),
)
_GAUGES: tuple[tuple[str, str, Any], ...] = (
    ("actorrpc_calls_open", "calls of a worker's own that are not answered", lambda f: f.pending),
    ("actorrpc_handlers_running", "handlers that run", lambda f: f.running),
    ("actorrpc_handlers_queued", "handlers that wait for a thread", lambda f: f.queued),
    ("actorrpc_messages_waiting", "messages that wait in mailboxes", lambda f: f.waiting),
    ("actorrpc_actors", "actors of a worker", lambda f: f.actors),
    ("actorrpc_resident_memory_bytes", "resident memory of a worker's process", lambda f: f.memory),
    ("actorrpc_uptime_seconds", "for how long a worker has been there", lambda f: f.uptime),
)


def _labels(figures: WorkerFigures) -> list[str]:
    return [figures.name, figures.role, figures.host]


def buckets_of(times: tuple[int, ...]) -> list[tuple[str, float]]:
    """Returns counts of times as a histogram of Prometheus has them: how many took a bound's time at the most."""
    found, seen = [], 0
    for i, count in enumerate(times):
        seen += count
        if i < len(BOUNDS) and i % _EACH == 0:
            found.append((f"{BOUNDS[i]:.6g}", float(seen)))
    return [*found, ("+Inf", float(seen))]


def place_of(text: str) -> tuple[str, int]:
    """Returns the host and port that `[HOST:]PORT` means.

    Raises:
        CommandError: it means none; or there is nothing to serve with.
    """
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise CommandError("--prometheus needs prometheus-client (pip install 'actorrpc[prometheus]')") from None
    host, _, port = text.rpartition(":")
    if not (port.isdecimal() and int(port) < 1 << 16):
        raise CommandError(f"--prometheus takes PORT or HOST:PORT, not {text!r}", 2)
    return host.strip("[]") or _LOOPBACK, int(port)


def serve(world: Attached, address: str, place: tuple[str, int]) -> int:
    """Serves a world's figures until it ends; returns the exit code.

    Arguments:
        world: the world.
        address: what it is called.
        place: the host and port to serve at; port 0: any.

    Raises:
        CommandError: nothing can be served there.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    host, port = place
    session = world._session
    registry = CollectorRegistry()
    registry.register(Collector(session))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as e:
        raise CommandError(f"nothing can be served at {host}:{port}: {e.strerror or e}; give another port") from None
    watcher = Watcher(session, _ANSWER_SECONDS)
    try:
        shown = f"[{host}]" if ":" in host else host
        print(f"the figures of the world at {address} are at http://{shown}:{server.server_port}/metrics", flush=True)
        while (end := watcher.end()) is None:
            watcher.pause(_LOOK_SECONDS)
        return say_end(address, end)
    except KeyboardInterrupt:
        return 0
    finally:
        server.shutdown()
        server.server_close()
        thread.join(_ANSWER_SECONDS)
