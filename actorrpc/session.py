"""The current worker; and how a worker is put together out of the rooms below."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import socket
import sys
import time
import weakref
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from actorrpc.errors import AuthenticationError, NotAMemberError, RendezvousError, WorkerLostError
from actorrpc.options import RpcBackendOptions, devices_of
from actorrpc.process import foreign, process, this_process
from actorrpc.runtime.clock import SystemClock
from actorrpc.runtime.handling import here
from actorrpc.runtime.interrupts import InterruptShield
from actorrpc.runtime.peers import Record
from actorrpc.runtime.worker import Worker, new_incarnation
from actorrpc.services import executor, rendezvous
from actorrpc.services.address import is_loopback, local_address
from actorrpc.services.autograd import Autograd
from actorrpc.services.checkpoints import Checkpoints
from actorrpc.services.deadlocks import Deadlocks
from actorrpc.services.descriptors import check_descriptors
from actorrpc.services.directory import Member
from actorrpc.services.elastic import Elastic
from actorrpc.services.figures import Figures
from actorrpc.services.herald import Herald
from actorrpc.services.inquiries import Inquiries
from actorrpc.services.leaks import Leaks
from actorrpc.services.loop import Loop
from actorrpc.services.names import Names
from actorrpc.services.objects import Objects
from actorrpc.services.residents import IDS
from actorrpc.services.roster import Hello, versions_here
from actorrpc.services.sealed import SealedStore
from actorrpc.version import VERSION
from actorrpc.wire import envelope
from actorrpc.wire.curve import Keys
from actorrpc.wire.lookout import state_of
from actorrpc.wire.names import identity_of_main
from actorrpc.wire.zeromq import ZmqTransport
from actorrpc.workers import NAME_LIMIT, check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from actorrpc.wire.transport import Transport

log = logging.getLogger("actorrpc")
_THEIR_END_SECONDS = 3.0
_WITHDRAWAL_SECONDS = 2.0
"""What a worker that cannot join waits at most to tell the others so."""

_GUESTS = 1 << 40

_chosen: ContextVar[Session | None] = ContextVar("actorrpc_session", default=None)
_forked = False
_all: weakref.WeakSet[Session] = weakref.WeakSet()
"""For a forked child, in which none of them works; and for what concerns them all."""


class Session:
    """One membership in a world, from `init_rpc` to `shutdown`.

    Arguments:
        worker: the worker, not yet started.
        store: the rendezvous store, kept open while others may still read it; None in a simulated world.
        options: what the worker was made with.
    """

    def __init__(
        self, worker: Worker, store: SealedStore | None = None, options: RpcBackendOptions | None = None
    ) -> None:
        self.worker, self._store = worker, store
        self.options = RpcBackendOptions() if options is None else options
        executor.install(worker)
        self.objects = Objects(worker)
        Autograd(worker)
        self.member = Member(worker)
        Herald(worker)
        self.inquiries = Inquiries(worker)
        self.names = Names(worker)
        self.checkpoints = Checkpoints(worker)
        self.deadlocks = Deadlocks(worker)
        Figures(worker)
        self.launched = False
        """Whether `launch` looks after its end."""
        self._shield = InterruptShield()
        self._switch_interval: float | None = None
        worker.services[Session] = self
        _all.add(self)

    @property
    def elastic(self) -> Elastic | None:
        """Its part in an elastic world; None in a world of fixed size."""
        return self.worker.services.get(Elastic)

    def enter(self, hello: Hello, timeout: float, switch_interval: float | None) -> None:
        """Joins the world. Raises as `rendezvous.found` does; leaves nothing behind then."""
        assert self._store is not None
        self._store.hello = hello
        self._shield.install()
        try:
            self.worker.start()
            deadline = self.worker.clock.now() + timeout
            come = rendezvous.found if self.worker.id == 0 else rendezvous.join
            come(self.worker, self._store, hello, deadline)
        except BaseException as e:
            strangers = getattr(self.worker.transport, "strangers", "")
            if self.elastic is not None:  # the others may know it already
                self.leave("its init_rpc failed")
            self.close(1.0 if self.worker.id == 0 else 0.2)
            if self.worker.id == 0 and type(e) is RendezvousError and strangers:
                raise AuthenticationError(
                    f"{e}. Strangers were turned away, who do not have the security_token of this world: from "
                    f"{strangers}. If they are workers of yours, give all of them the same token"
                ) from e
            raise
        if switch_interval is not None:
            self._switch_interval = sys.getswitchinterval()
            sys.setswitchinterval(switch_interval)

    def serve_out(self, timeout: float) -> None:
        """Serves until the world ends.

        Raises:
            WorkerLostError: rank 0 was lost meanwhile.
            RendezvousError: `timeout` seconds (0: without bound) were not enough; it says who is late.
        """
        worker, member = self.worker, self.member
        deadline = worker.clock.now() + timeout if timeout > 0 else None
        with contextlib.suppress(WorkerLostError):  # that of rank 0, which ends the wait
            member.arrive()
        if not worker.wait(member.ended, deadline, lead=False):
            raise RendezvousError(
                f"{worker} waited {timeout:g} s in shutdown for the other workers to end their work; {member.late()}; "
                f"shutdown(graceful=False) does not wait"
            )
        if member.orphaned is not None:
            self._let_go_first(member.orphaned.record)
            raise worker.members.lost_error(
                member.orphaned,
                "this worker could not learn whether the others have ended; look for its own error first",
            )

    def _let_go_first(self, record: Record) -> None:
        """Waits, bounded, for the end of a process on this host: of two errors, its own is the one to be seen first."""
        here, clock = self.worker.record, self.worker.clock
        if record.boot != here.boot or record.pid == here.pid:
            return
        gate, end = clock.gate(), clock.now() + _THEIR_END_SECONDS
        while clock.now() < end and is_alive(record.pid) and state_of(record.pid) not in ("T", "t"):
            gate.wait(0.05)

    def depart(self, timeout: float) -> None:
        """Ends this worker's part in an elastic world: what is under way is done, and the others know.

        Raises:
            RendezvousError: `timeout` seconds (0: without bound) were not enough; it says for what.
        """
        worker, elastic = self.worker, self.elastic
        assert elastic is not None
        if not elastic.leave(worker.clock.now() + timeout if timeout > 0 else None):
            raise RendezvousError(
                f"{worker} waited {timeout:g} s in shutdown for its own work to end; {elastic.at_work()}; "
                f"shutdown(graceful=False) does not wait"
            )

    def leave(self, reason: str = "it shut down by itself", patience: float = 5.0, linger: float = 0.5) -> None:
        """Says goodbye and closes, without waiting for others.

        Arguments:
            reason: what the others are told.
            patience: seconds that running handlers get to end.
            linger: seconds that what is queued gets to leave.
        """
        self.worker.ending = True
        with contextlib.suppress(NotAMemberError, WorkerLostError):
            self.member.say_goodbye(reason)
        self.close(linger, patience)

    def wind_up(self) -> None:
        """Does what a graceful end does once nothing is under way: names are forgotten, leaks are reported, actors are
        stopped.
        """
        self.names.close()
        if self.objects.leaks is not None:
            self.objects.leaks.report()
        released = self.objects.released
        if released is not None:
            for value in self.objects.actors():
                released(value)

    def close(self, linger: float, patience: float = 5.0) -> None:
        """Frees everything; in a forked child nothing, as it is all the parent's."""
        if self.worker.forked:
            return
        loop: Loop | None = self.worker.services.get(Loop)
        if loop is not None:
            loop.stop(patience)
        self.objects.close()
        self.worker.stop(patience, linger)
        self.objects.close()  # of what a handler has made meanwhile, too
        if self._store is not None:
            self._store.close()
        if self._switch_interval is not None:
            sys.setswitchinterval(self._switch_interval)
        self._shield.remove()


def all_sessions() -> list[Session]:
    """Returns the sessions of this process; there are several in a simulated world."""
    return list(_all)


def current() -> Session:
    """Returns the session of the present thread.

    Raises:
        NotAMemberError: there is none: before `init_rpc`, after `shutdown`, or in a forked child.
    """
    handling = here.handling
    if handling is not None:
        session: Session | None = handling.worker.services.get(Session)
    else:
        session = _chosen.get() or process().session
    if session is None or not session.worker.open:
        if _forked:
            raise NotAMemberError(
                "this process was forked from a worker and is not one itself: ZeroMQ does not survive a fork; "
                "start processes with the 'spawn' method and call init_rpc in each"
            )
        other = foreign()
        if other is not None:
            raise NotAMemberError(
                f"this process is initialized with {other.backend}, whose agent {other.agent!r} sees to its "
                f"calls; this library's own need BackendType.TENSORPIPE"
            )
        raise NotAMemberError(
            "RPC has not been initialized in this process, or it has shut down; call init_rpc first. "
            "(Current RPC agent is not set! Did you initialize the RPC framework by init_rpc?)"
        )
    return session


def is_available() -> bool:
    """Returns whether this process is in a world."""
    session = process().session
    return session is not None and session.worker.open


def set_default(session: Session | None) -> None:
    """Makes a session the process's own."""
    process().session = session


@contextlib.contextmanager
def chosen(session: Session) -> Iterator[None]:
    """Makes a session the current one for the block, in this thread; for worlds within one process."""
    token = _chosen.set(session)
    try:
        yield
    finally:
        _chosen.reset(token)


def open_session(
    name: str,
    rank: int,
    world_size: int,
    options: RpcBackendOptions,
    role: str,
    index: int,
    prepare: Callable[[Session], None],
    guest: bool = False,
) -> Session:
    """Makes a worker over ZeroMQ and joins its world. Raises as `init_rpc` does.

    Arguments: as for `rpc.join`, and
        prepare: called before the worker starts; calls of others may come before this returns.
        guest: whether it only looks in, for a while; its rank is not asked for then.
    """
    check_name(name)
    try:
        check_descriptors(f'worker "{name}" (rank {rank})', rank, world_size)
    except RendezvousError as e:
        withdraw(name, rank, world_size, options.init_method, options.security_token, e)
        raise
    devices, versions = devices_of(options), versions_here(VERSION)
    session = _made(name, rank, options, role, index)
    if guest:
        drawn = IDS + session.worker.record.incarnation % _GUESTS  # no id, and nobody's rank
        session.worker.record = dataclasses.replace(session.worker.record, rank=drawn, guest=True)
    prepare(session)
    hello = Hello(session.worker.record, world_size, envelope.PROTOCOL, versions, devices)
    session.enter(hello, options.init_timeout, options.switch_interval)
    return session


def withdraw(
    name: object, rank: int, world_size: int, init_method: str, token: str | bytes | None, fault: BaseException
) -> None:
    """Tells the others of a world, where they can be reached soon, why this worker cannot join it; those of an elastic
    one do not wait for it.
    """
    if not 0 <= rank < world_size or world_size == 1:
        return
    shown = name if isinstance(name, str) else repr(name)
    try:
        options = RpcBackendOptions(
            init_method=init_method, num_worker_threads=1, init_timeout=_WITHDRAWAL_SECONDS, security_token=token
        )
        session = _made(shown[:NAME_LIMIT], rank, options, "", 0)
        reason = f"{type(fault).__name__}: {fault}"
        hello = Hello(session.worker.record, world_size, envelope.PROTOCOL, versions_here(VERSION), withdrawn=reason)
        try:
            session.enter(hello, options.init_timeout, None)
        finally:
            session.close(0.2)  # whoever takes it in all the same is no directory
    except Exception as e:  # it comes to this in any case
        log.debug("rank %d withdrew: %s", rank, e)


def _made(name: str, rank: int, options: RpcBackendOptions, role: str, index: int) -> Session:
    own = process()
    if own.make is not None:
        return own.make(name, rank, options, role, index)
    keys = None if options.security_token is None else Keys.of(options.security_token)
    store = SealedStore(options.init_method, rank, keys)
    transport: Transport | None = None
    try:
        address = local_address(store.master_host, options.address)
        if keys is None and rank == 0 and not is_loopback(address):
            log.warning(
                "%s listens at %s without a security_token: whoever can reach it, or another worker of its world, can "
                "run code there. Give all workers the same token (security_token, or ACTORRPC_TOKEN)",
                name, address,
            )  # fmt: skip
        transport = ZmqTransport(address, keys=keys, silence=options.heartbeat_timeout)
        log.info("%s (rank %d) listens at %s", name, rank, ", ".join(transport.endpoints))
        record = Record(
            rank, name, new_incarnation(), tuple(transport.endpoints), socket.gethostname(), _boot(), os.getpid(),
            role, index, identity_of_main(),
        )  # fmt: skip
        if own.wrap is not None:
            transport = own.wrap(transport)
        worker = Worker(
            record, transport, SystemClock(), threads=options.num_worker_threads, timeout=options.rpc_timeout
        )
        worker.limits.set(options.max_pending, options.max_pending_bytes)
        worker.limits.most_message = options.max_message_bytes
        session = Session(worker, store, options)
        if options.report_leaks:
            session.objects.leaks = Leaks(session.objects)
        session.deadlocks.start(options.deadlock_after)
        session.inquiries.start()
        return session
    except BaseException:
        if transport is not None:
            transport.close()
        store.close()
        raise


def is_alive(pid: int) -> bool:
    """Returns whether a process of this host runs, and is not a zombie, as far as the system tells."""
    if sys.platform == "win32":
        return True  # there `os.kill` would end it
    try:
        os.kill(pid, 0)
        return state_of(pid) != "Z"
    except OSError:
        return False


def _boot() -> str:
    """Returns what tells those who share process ids with this one: this boot of this host, and its pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"  # a pid says nothing in another container
    except OSError:
        return f"{socket.gethostname()}-{int(time.time() - time.monotonic()) // 60}"


def _after_fork() -> None:
    global _forked
    for session in list(_all):
        if session.worker.open:
            _forked = True
            session.worker.disown("this process was forked from it, and ZeroMQ does not survive a fork")
    if _forked:
        this_process.session = here.handling = None


def _at_exit() -> None:
    """Ends the membership of a program that has ended without `shutdown`, so that the interpreter can end in peace."""
    session = this_process.session
    if session is not None and session.worker.open:
        log.debug("%s: the program ended without shutdown", session.worker)
        with contextlib.suppress(Exception):  # threads cannot be started any more; the process ends in any case
            session.leave("its program ended without shutdown", 0.5)


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
