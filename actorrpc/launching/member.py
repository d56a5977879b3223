"""One worker's part in a launched world, from joining to leaving."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

from actorrpc import rpc
from actorrpc.errors import ActorRPCError, RendezvousError, WorkerLostError
from actorrpc.roles import play
from actorrpc.runtime.completion import Completion
from actorrpc.runtime.peers import Standing
from actorrpc.services.ending import Ending
from actorrpc.services.roster import ELASTIC
from actorrpc.session import set_default
from actorrpc.workers import present

if TYPE_CHECKING:
    from actorrpc.options import RpcBackendOptions
    from actorrpc.roles import Part
    from actorrpc.session import Session

_GRACE = 5.0
"""Seconds that the others get to come to an end once the driver's `main` has returned."""
_LOOK_SECONDS = 0.01


def take_part(
    part: Part, rank: int, world_size: int, options: RpcBackendOptions, exit_after: bool = False,
    supervised: bool = False, life: int = 0,
) -> Any:  # fmt: skip
    """Joins the world, plays the part, and leaves when the world ends.

    Arguments:
        part: what to play.
        rank, world_size, options: for joining.
        exit_after: whether to end this process some seconds after the world's end if its `main` still runs then; where
            nobody else does (torchrun would wait for it).
        supervised: whether workers may be started again: the world is then an elastic one of a launcher's own.
        life: how often this worker was started before.

    Returns what `main` returned, on rank 0; else None.
    """
    try:
        session = rpc.join(part.name, rank, ELASTIC if supervised else world_size, options, part.role, part.index)
    except RendezvousError as e:
        if life and e.over:  # it was started again as the world came to its end
            return None
        raise
    session.launched = True
    try:
        if supervised:
            session.member.outlives_rank_0 = False
            if not life:
                _await_all(session, world_size, options.init_timeout)
        if exit_after and rank:
            _exit_after(session)
        left: SystemExit | None = None
        try:
            value = play(session, part, life)
        except SystemExit as e:  # a way to end a program in good order, like any other
            if e.code not in (None, 0):
                raise
            value, left = None, e
        except ActorRPCError:
            # A `main` that is overtaken by the end of the world meets it in its next call.
            if rank and session.worker.ending:
                value = None
            else:
                raise
        if not session.worker.open:  # it has left by itself: shutdown(graceful=False)
            return None if rank else value
        if rank:
            _see_out(session)
        else:
            _end_world(session)
        session.wind_up()
        session.close(2.0)
        if left is not None:
            raise left
        return None if rank else value
    finally:
        session.leave()
        set_default(None)


def _await_all(session: Session, world_size: int, seconds: float) -> None:
    """Waits until all have joined at the beginning of a supervised world."""
    worker = session.worker
    end = worker.clock.now() + seconds
    while len(there := present(worker)) < world_size:
        rank_0 = worker.peers[0]
        if rank_0.standing is not Standing.MEMBER:
            raise worker.members.lost_error(rank_0, "the world did not begin")
        if worker.clock.now() >= end:
            missing = sorted(set(range(world_size)) - {record.rank for record in there})
            raise RendezvousError(
                f"{worker} waited {seconds:g} s for all {world_size} workers of its world; missing: ranks {missing}"
            )
        worker.wait(Completion(), worker.clock.now() + _LOOK_SECONDS, lead=False)


def _see_out(session: Session) -> None:
    try:
        session.serve_out(0)
    except WorkerLostError:
        if not session.worker.ending:  # else rank 0 has ended the world and did not wait for a `main` that went on
            raise


def _end_world(session: Session) -> None:
    worker, ending = session.worker, session.worker.services[Ending]
    door = session.elastic.door if session.elastic is not None else None
    if door is not None:
        door.shut(worker.clock.now() + _GRACE, at_once=True)
    ending.end_world()
    session.member.arrive()
    if not worker.wait(session.member.ended, worker.clock.now() + _GRACE, lead=False):
        ending.stop_all()
        worker.wait(session.member.ended, worker.clock.now() + 1.0, lead=False)


def _exit_after(session: Session) -> None:
    member, worker = session.member, session.worker

    def end() -> None:
        worker.wait(member.over, None, lead=False)
        time.sleep(2 * _GRACE)
        os._exit(0)

    threading.Thread(target=end, name="actorrpc-exit", daemon=True).start()
