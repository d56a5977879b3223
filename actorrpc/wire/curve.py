"""CURVE on the sockets of a world that has a token: who does not have it gets no byte past the handshake.

ZeroMQ facts that bind this file:
- CU1: a CURVE server lets any client key in while nobody answers at ZAP's address. So the guard is there before the
  first bind, and the socket insists on an answer (ZAP_DOMAIN, ZAP_ENFORCE_DOMAIN): without a guard nobody gets in.
- CU2: a monitor blocks ZeroMQ's own thread when nobody takes its news. So its reader has no high-water mark, and is
  closed after the monitor has been switched off.
- CU3: news of a failed handshake has the address of the door, not that of the peer. It is directly followed by that of
  the closed descriptor, whose peer was asked for when the connection was accepted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import socket
import struct
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from actorrpc.errors import AuthenticationError
from actorrpc.wire.exposed import exposed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actorrpc.wire.envelope import Frame

log = logging.getLogger("actorrpc")
_ZAP = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks; the name is ZAP's own."""
_DOMAIN = b"actorrpc"
_SALT = b"actorrpc security_token 1"
_SEALED = b"actorrpc-sealed "
_MAC_CHARACTERS = 64
_ADDRESSES = 1000
"""How many addresses of strangers are remembered, and so told of."""
_SHOWN = 3
_WATCHED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)
_ANSWERED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Keys:
    """What a token stands for: a key pair of the world's servers, one of its clients, a key for what lies in the store.

    They show nothing of themselves, and do not travel.

    Arguments:
        root: 32 bytes that nobody else can know.
    """

    __slots__ = ("_client", "_mac", "_server")

    def __init__(self, root: bytes) -> None:
        self._server, self._client = _pair(root, b"server"), _pair(root, b"client")
        self._mac = hashlib.blake2b(key=root, person=b"store").digest()

    @staticmethod
    def of(token: str | bytes) -> Keys:
        """Derives the keys, the same ones wherever the token is the same. Takes a tenth of a second, on purpose.

        Raises:
            AuthenticationError: ZeroMQ was built without CURVE here.
        """
        if not zmq.has("curve"):
            raise AuthenticationError(
                f"a security_token needs ZeroMQ with CURVE, but the libzmq {zmq.zmq_version()} of this process was "
                f"built without it; install pyzmq from its wheels, or a libzmq with libsodium"
            )
        secret = token.encode("utf-8", "surrogateescape") if isinstance(token, str) else token
        return Keys(hashlib.scrypt(secret, salt=_SALT, n=1 << 14, r=8, p=1, dklen=32))

    @staticmethod
    def of_nobody() -> Keys:
        """Returns keys that open nothing."""
        return Keys(os.urandom(32))

    def serve(self, door: zmq.Socket[bytes]) -> None:
        """Has a socket that binds ask for the world's keys; before it binds."""
        door.setsockopt(zmq.CURVE_SERVER, 1)
        door.setsockopt(zmq.CURVE_SECRETKEY, self._server[1])
        door.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        door.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def show(self, way: zmq.Socket[bytes]) -> None:
        """Has a socket that connects show the world's keys, and insist on the other side's; before it connects."""
        way.setsockopt(zmq.CURVE_PUBLICKEY, self._client[0])
        way.setsockopt(zmq.CURVE_SECRETKEY, self._client[1])
        way.setsockopt(zmq.CURVE_SERVERKEY, self._server[0])

    def are_shown_by(self, key: bytes) -> bool:
        """Returns whether a client's public key, of 32 bytes, is the world's."""
        return hmac.compare_digest(key, z85.decode(self._client[0]))

    def seal(self, words: bytes) -> bytes:
        """Returns words with what shows that a holder of the token wrote them. They can be read by all."""
        return _SEALED + self._code(words) + b" " + words

    def unseal(self, sealed: bytes) -> bytes | None:
        """Returns the words that a holder of the token has sealed; None for all others."""
        words = words_in(sealed)
        if words is None or not hmac.compare_digest(sealed, self.seal(words)):
            return None
        return words

    def _code(self, words: bytes) -> bytes:
        return hashlib.blake2b(words, key=self._mac, digest_size=_MAC_CHARACTERS // 2).hexdigest().encode()

    def __repr__(self) -> str:
        return "Keys(not shown)"

    def __reduce__(self) -> str:
        raise TypeError("the keys of a world do not travel")


def words_in(sealed: bytes) -> bytes | None:
    """Returns words that somebody has sealed, whoever it was; None where they are not sealed."""
    head = len(_SEALED) + _MAC_CHARACTERS + 1
    return sealed[head:] if sealed.startswith(_SEALED) and len(sealed) >= head else None


def _pair(root: bytes, purpose: bytes) -> tuple[bytes, bytes]:
    """Returns a public and a secret key, as ZeroMQ writes them."""
    secret = z85.encode(hashlib.blake2b(key=root, person=purpose, digest_size=32).digest())
    return zmq.curve_public(secret), secret


class Guard:
    """Answers ZeroMQ's question whether a peer may come in, and tells the log of those who may not. Has a thread.

    Make it before the door binds (CU1).

    Arguments:
        context: the door's.
        door: the socket that binds.
        keys: the world's.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], door: zmq.Socket[bytes], keys: Keys) -> None:
        self._keys, self._door = keys, door
        self._peers: dict[int, str] = {}
        self._reason = ""
        self._turned_away: Counter[str] = Counter()
        self._sockets = [context.socket(kind) for kind in (zmq.REP, zmq.PAIR, zmq.PAIR, zmq.PAIR)]
        self._questions, self._news, self._end, self._ending = self._sockets
        try:
            for one in self._sockets:
                one.setsockopt(zmq.LINGER, 0)
            self._news.setsockopt(zmq.RCVHWM, 0)
            self._questions.bind(_ZAP)
            self._end.bind("inproc://end")
            self._ending.connect("inproc://end")
            keys.serve(door)
            door.monitor("inproc://news", _WATCHED)
            self._news.connect("inproc://news")
            self._thread = threading.Thread(target=self._run, name="actorrpc-guard", daemon=True)
            self._thread.start()
        except BaseException:
            door.disable_monitor()
            for one in self._sockets:
                one.close(0)
            raise

    def strangers(self) -> str:
        """Says in words who was turned away; "" where nobody was."""
        seen = list(self._turned_away)
        more = f" and {len(seen) - _SHOWN} more" if len(seen) > _SHOWN else ""
        return ", ".join(seen[:_SHOWN]) + more

    def close(self) -> None:
        """Ends the thread; before the door is closed."""
        self._door.disable_monitor()
        self._ending.send(b"")
        self._thread.join()
        for one in self._sockets:
            one.close(0)

    def _run(self) -> None:
        poller = zmq.Poller()
        for one in (self._questions, self._news, self._end):
            poller.register(one, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._end in ready:
                return
            try:
                if self._questions in ready:
                    self._questions.send_multipart(self._answer(self._questions.recv_multipart()))
                if self._news in ready:
                    self._hear(parse_monitor_message(self._news.recv_multipart()))
            except Exception:  # the next one has a right to an answer all the same
                log.exception("a question of ZeroMQ's about a peer could not be answered")

    def _answer(self, question: Sequence[bytes]) -> list[bytes]:
        """Answers one of ZAP's questions: version, number, domain, address, identity, mechanism, credentials."""
        number = question[1] if len(question) > 1 else b""
        known = len(question) == 7 and question[0] == b"1.0" and question[2] == _DOMAIN and question[5] == b"CURVE"
        if known and self._keys.are_shown_by(question[6]):
            return [b"1.0", number, b"200", b"OK", b"", b""]
        return [b"1.0", number, b"400", b"not of this world", b"", b""]

    def _hear(self, news: Any) -> None:
        event, value = news["event"], news["value"]
        if event == zmq.EVENT_ACCEPTED:
            self._peers[value] = _peer_at(value)
        elif event == zmq.EVENT_DISCONNECTED:
            peer, reason, self._reason = self._peers.pop(value, "an unknown address"), self._reason, ""
            if reason:
                self._tell(peer, reason, news["endpoint"].decode(errors="replace"))
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._reason = ""  # it has gone by itself, in the midst of it
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._reason = "it has keys, but not this world's"
        elif value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            self._reason = "it has no security_token, and this world has one"
        elif value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            self._reason = "it has another security_token than this world"
        else:
            self._reason = "what it sent is not what a worker of this world sends"

    def _tell(self, peer: str, reason: str, door: str) -> None:
        if peer in self._turned_away or len(self._turned_away) < _ADDRESSES:
            self._turned_away[peer] += 1
            if self._turned_away[peer] == 1:
                log.warning(
                    "turned away a stranger from %s, who tried to reach this worker at %s: %s. It is told of once; if "
                    "it is a worker of yours, give all workers of the world the same security_token",
                    peer, door, reason,
                )  # fmt: skip


def _peer_at(descriptor: int) -> str:
    """Says who is at the other end of a connection. It is ZeroMQ's, and may be closed already."""
    try:
        connection = socket.socket(fileno=descriptor)
    except OSError:
        return "an unknown address"
    try:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            return str(connection.getpeername()[0])
        if hasattr(socket, "SO_PEERCRED"):
            pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            return f"process {pid} (user {uid}) of this host"
        return "a process of this host"
    except OSError:
        return "an unknown address"
    finally:
        connection.detach()


def knock(endpoint: str, seconds: float, *, with_keys: bool, words: Sequence[Frame] = ()) -> bool:
    """Sees whether somebody is at a door which is not known to be the world's. Nothing of the world's is shown to it.

    Arguments:
        endpoint: where.
        seconds: how long to wait for an answer, and then for the words to leave.
        with_keys: whether to come as one who has a token, which is not the world's; else as one who has none.
        words: what to tell whoever lets us in. Nothing that they say is read.

    Returns whether ZeroMQ has answered, be it to let us in or to turn us away.
    """
    answered = False
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    way = context.socket(zmq.DEALER)
    try:
        if with_keys:
            Keys.of_nobody().show(way)
        way.setsockopt(zmq.IPV6, int("[" in endpoint))
        news = context.socket(zmq.PAIR)
        try:
            news.setsockopt(zmq.RCVHWM, 0)
            way.monitor("inproc://news", _ANSWERED)
            news.connect("inproc://news")
            with contextlib.suppress(zmq.ZMQError):  # no endpoint at all: it is a stranger's word
                way.connect(endpoint)
                if words:
                    way.send_multipart(list(words), zmq.NOBLOCK)
            answered = _await(news, seconds)
        finally:
            way.disable_monitor()
            news.close(0)
    finally:
        way.close(int(seconds * 1000) if answered and words else 0)
        context.term()
    return answered


@exposed
def _await(news: zmq.Socket[bytes], seconds: float) -> bool:
    # A Ctrl-C may leave here: `knock` closes all that it has made, and holds nothing else.
    return bool(news.poll(int(seconds * 1000)))
