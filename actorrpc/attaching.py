"""Looking into a world that runs, from a notebook or a shell: `attach`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from actorrpc.options import RpcBackendOptions
from actorrpc.rpc import join, shutdown
from actorrpc.world import World

if TYPE_CHECKING:
    from typing_extensions import Self

    from actorrpc.session import Session

_ATTACH_SECONDS = 10.0


class Attached(World):
    """A world that this process is a guest of; see `attach`. Ends with `close`, or at the end of a `with` block."""

    def __init__(self, session: Session, timeout: float) -> None:
        super().__init__(session)
        self._timeout = timeout

    def close(self) -> None:
        """Leaves the world: as `shutdown` does, when its own calls are answered. Does nothing where it has left; does
        not wait where the world has ended.

        Raises:
            RendezvousError: that took longer than the timeout of `attach`; it has left all the same.
        """
        if self._session.worker.open:
            shutdown(graceful=not self._session.member.ended.done, timeout=self._timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        elif self._session.worker.open:
            shutdown(graceful=False)


def attach(
    address: str, token: str | bytes | None = None, *, name: str = "", timeout: float = _ATTACH_SECONDS
) -> Attached:
    """Joins a world that runs, of fixed size or not, as a guest: `with attach("tcp://host:29500") as world:`.

    A guest calls and looks as any worker does (`rpc_sync`, `get_actor`, `world.observer`, `debug.dump`), and can be
    called back. It is not counted: `world.workers`, roles and groups do not have it, those who watch for losses are not
    told when it goes, and a world that ends does not wait for it.

    Arguments:
        address: where the workers of that world meet: their `init_method`.
        token: their security_token; default ACTORRPC_TOKEN, or none.
        name: its own name; default "guest-" and its process id, with something drawn.
        timeout: seconds that joining may take, and leaving; default 10.

    Returns the world, to be used as a context manager or closed with `close()`.

    Raises:
        RendezvousError: there is no world at the address, or none that answers; one of fixed size is not complete in
            that time; it is about to end; or its rank 0, which lets others in, is gone.
        AuthenticationError: its token is another one.
        RuntimeError: this process is in a world already.
        ValueError, TypeError: an argument is not valid.
    """
    options = RpcBackendOptions(init_method=address, init_timeout=timeout, security_token=token)
    own = name or f"guest-{os.getpid()}-{os.urandom(4).hex()}"
    return Attached(join(own, -1, None, options, guest=True), timeout)
