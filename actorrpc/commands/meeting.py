"""The workers that `actorrpc check` was started as meet at rank 0, and compare what they have.

They speak JSON, a line a message, and nothing else: all that the check is about may be broken, and a stranger who comes
can have nothing run. The token does not travel, only what can be made of it with a number that rank 0 has drawn.

    worker                                    rank 0
    what it is, where it listens        ->
                                        <-    "refused", or "ask": a number drawn
    proof, time                         ->
                                        <-    "ask" some more times, for the clock
                                        <-    "reach": who listens where
    whom it does not reach              ->
                                        <-    "findings"
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from actorrpc.commands.findings import Finding, listener, versions
from actorrpc.errors import RendezvousError

if TYPE_CHECKING:
    from collections.abc import Mapping

_MARK = "actorrpc check 1"
_LONGEST = 1 << 22
_ANSWER_SECONDS = 10.0
_REACH_SECONDS = 3.0
_PAUSE_SECONDS = 0.2
_ASKED = 5
"""How often a clock is read; the quickest answer counts."""
_APART_SECONDS = 0.5
_AT_ONCE = 32
_SHOWN = 8


class _Line:
    """A connection on which lines of JSON come and go.

    Arguments:
        sock: the connection.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")

    def send(self, what: Mapping[str, Any]) -> None:
        self._sock.sendall(json.dumps(what).encode() + b"\n")

    def read(self, seconds: float) -> dict[str, Any]:
        """Reads one. Raises OSError or ValueError where none comes in time, or something else does."""
        self._sock.settimeout(seconds)
        line = self._file.readline(_LONGEST)
        if not line:
            raise ConnectionError("the other side has hung up")
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError("that is no message of this check")
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._sock.close()


def meet(host: str, port: int, rank: int, size: int, token: str | None, seconds: float) -> list[Finding]:
    """Meets the other workers, and returns what they have found together, the same on all that came.

    Arguments:
        host, port: where rank 0 listens.
        rank, size: this worker's rank, and how many there are.
        token: the world's token, if there is one.
        seconds: for how long they wait for each other.
    """
    try:
        door = listener(host)
    except (OSError, RendezvousError) as e:
        return [Finding("meeting", False, f"this worker could not take part: {e}", "see the findings above")]
    with door:
        if rank == 0:
            return _Host(port, size, token, door, seconds).run()
        return _visit(host, port, rank, size, token, door, seconds)


def proof_of(token: str | None, drawn: str) -> str:
    """Returns what shows that somebody has a token, to those who have it too. It takes a while, on purpose: who listens
    on the wire shall not be able to try many tokens.
    """
    if token is None:
        return ""
    secret = token.encode("utf-8", "surrogateescape")
    return hashlib.scrypt(secret, salt=drawn.encode(), n=1 << 14, r=8, p=1, dklen=32).hex()


def _self(rank: int, size: int, door: socket.socket) -> dict[str, Any]:
    return {
        "mark": _MARK, "rank": rank, "size": size, "host": socket.gethostname(), "pid": os.getpid(),
        "versions": versions(), "listens": list(door.getsockname()[:2]),
    }  # fmt: skip


def unreached(places: Mapping[str, list[Any]], but: int) -> dict[str, str]:
    """Returns which of the others' ports cannot be reached from here, by rank, and why."""

    def reach(place: list[Any]) -> str:
        try:
            socket.create_connection((str(place[0]), int(place[1])), _REACH_SECONDS).close()
            return ""
        except OSError as e:
            return e.strerror or str(e)

    others = {rank: place for rank, place in places.items() if int(rank) != but}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = dict(zip(others, pool.map(reach, others.values()), strict=True))
    return {rank: why for rank, why in found.items() if why}


# -- ranks other than 0


def _visit(
    host: str, port: int, rank: int, size: int, token: str | None, door: socket.socket, seconds: float
) -> list[Finding]:
    where = f"{host}:{port}"
    line, problem = _reached_host(host, port, seconds)
    if line is None:
        return [
            Finding(
                "rank 0",
                False,
                f"it did not come: nobody answers at {where} within {seconds:g} s ({problem})",
                "start the check as --rank 0 there; if it is, look for a firewall between the hosts",
            )
        ]
    try:
        line.send(_self(rank, size, door))
        while True:
            told = line.read(seconds + 4 * _ANSWER_SECONDS)
            if "refused" in told:
                return [
                    Finding("meeting", False, str(told["refused"]), "give each worker its own --rank, and one size")
                ]
            if "findings" in told:
                return [Finding(**one) for one in told["findings"]]
            if "reach" in told:
                line.send({"unreached": unreached(told["reach"], rank)})
            elif told.get("ask"):
                line.send({"time": time.time(), "proof": proof_of(token, str(told["ask"]))})
            else:
                line.send({"time": time.time()})
    except (OSError, ValueError, TypeError, KeyError) as e:
        return [
            Finding(
                "rank 0",
                False,
                f"what answers at {where} is no check, or it ended too early ({e})",
                "end the program that has this port, or give another one",
            )
        ]
    finally:
        line.close()


def _reached_host(host: str, port: int, seconds: float) -> tuple[_Line | None, str]:
    end = time.monotonic() + seconds
    while True:
        try:
            left = max(0.1, min(5.0, end - time.monotonic()))
            return _Line(socket.create_connection((host.strip("[]"), port), left)), ""
        except OSError as e:
            if time.monotonic() >= end:
                return None, e.strerror or str(e)
        time.sleep(_PAUSE_SECONDS)


# -- rank 0


class _Guest:
    """A worker that has come.

    Attributes:
        told: what it says of itself.
        line: the connection to it.
        proof: what it has made of the token.
        apart: by how many seconds its clock is before rank 0's, and by how many that may be wrong.
        unreached: the ranks that it does not reach.
        lost: why it went away before the end; "" where it did not.
    """

    def __init__(self, told: dict[str, Any], line: _Line | None) -> None:
        self.told, self.line = told, line
        self.proof, self.apart, self.lost = "", (0.0, 0.0), ""
        self.unreached: dict[str, str] = {}

    def __str__(self) -> str:
        return f"rank {self.told['rank']} (host {self.told['host']})"


class _Host:
    def __init__(self, port: int, size: int, token: str | None, door: socket.socket, seconds: float) -> None:
        self._port, self._size, self._seconds = port, size, seconds
        self._drawn = os.urandom(16).hex()
        own = _Guest(_self(0, size, door), None)
        own.proof = proof_of(token, self._drawn)
        self._guests: dict[int, _Guest] = {0: own}
        self._lock = threading.Lock()
        self._all_there = threading.Event()
        self._over = False

    def run(self) -> list[Finding]:
        try:
            door = socket.create_server(("", self._port), backlog=self._size + 16)
        except OSError as e:
            return [
                Finding(
                    "meeting",
                    False,
                    f"port {self._port} cannot be opened: {e.strerror}",
                    "see that only one worker is --rank 0, or choose another port",
                )
            ]
        threads: list[threading.Thread] = []
        end = time.monotonic() + self._seconds
        with door:
            while not self._all_there.is_set() and (left := end - time.monotonic()) > 0 and self._size > 1:
                door.settimeout(min(left, _PAUSE_SECONDS))
                try:
                    sock, _ = door.accept()
                except TimeoutError:
                    continue
                threads.append(threading.Thread(target=self._take, args=(sock,), daemon=True))
                threads[-1].start()
            for thread in threads:
                if not self._all_there.is_set():  # else those that are left are strangers
                    thread.join(2 * _ANSWER_SECONDS)
        with self._lock:
            self._over = True
            guests = [self._guests[rank] for rank in sorted(self._guests)]
        try:
            places = {str(guest.told["rank"]): guest.told["listens"] for guest in guests}
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(lambda guest: self._have_reached(guest, places), guests))
            found = self._compared(guests)
            for guest in guests[1:]:
                with contextlib.suppress(OSError):
                    _line_of(guest).send({"findings": [vars(one) for one in found]})
            return found
        finally:
            for guest in guests[1:]:
                _line_of(guest).close()

    def _take(self, sock: socket.socket) -> None:
        """Hears somebody who has come; in a thread."""
        line = _Line(sock)
        try:
            guest = _Guest(line.read(_ANSWER_SECONDS), line)
            objection = self._objection(guest)
            if objection:
                line.send({"refused": objection})
                raise ValueError(objection)
            self._measure(guest, line)
        except (OSError, ValueError, KeyError, TypeError):
            line.close()
            return
        with self._lock:
            came_twice, late = guest.told["rank"] in self._guests, self._over
            if not (came_twice or late):
                self._guests[guest.told["rank"]] = guest
            if len(self._guests) == self._size:
                self._all_there.set()
        if came_twice or late:
            with contextlib.suppress(OSError):
                line.send({"refused": self._twice(guest.told["rank"]) if came_twice else "it came too late"})
            line.close()

    def _objection(self, guest: _Guest) -> str:
        told = guest.told
        if told["mark"] != _MARK:
            return "another version of actorrpc checks at rank 0"
        if not (isinstance(told["versions"], dict) and len(told["listens"]) == 2 and told["host"] and told["pid"]):
            return "this worker does not say what it is"
        if int(told["size"]) != self._size:
            return f"rank 0 was given --world-size {self._size}, and this worker {told['size']}"
        if not 0 < int(told["rank"]) < self._size:
            return f"there is no rank {told['rank']} in a world of {self._size}, or it is rank 0's"
        return ""

    def _twice(self, rank: int) -> str:
        other = self._guests[rank].told
        return f"rank {rank} is taken by a worker on host {other['host']} (pid {other['pid']})"

    def _measure(self, guest: _Guest, line: _Line) -> None:
        line.send({"ask": self._drawn})
        guest.proof = str(line.read(_ANSWER_SECONDS)["proof"])
        best = float("inf")
        for _ in range(_ASKED):
            sent, began = time.time(), time.monotonic()
            line.send({"ask": ""})
            theirs = float(line.read(_ANSWER_SECONDS)["time"])
            took = time.monotonic() - began
            if took < best:
                best, guest.apart = took, (theirs - (sent + took / 2), took / 2)

    def _have_reached(self, guest: _Guest, places: dict[str, list[Any]]) -> None:
        if guest.line is None:
            guest.unreached = unreached(places, 0)
            return
        try:
            guest.line.send({"reach": places})
            rounds = 1 + len(places) // _AT_ONCE
            found = guest.line.read(_ANSWER_SECONDS + rounds * _REACH_SECONDS)["unreached"]
            guest.unreached = {str(rank): str(why) for rank, why in found.items()}
        except (OSError, ValueError, KeyError, AttributeError) as e:
            guest.lost = str(e) or type(e).__name__

    def _compared(self, guests: list[_Guest]) -> list[Finding]:
        return [
            self._who_came(guests), _same_versions(guests), _same_token(guests), _clocks(guests), _reached(guests)
        ]  # fmt: skip

    def _who_came(self, guests: list[_Guest]) -> Finding:
        missing = [rank for rank in range(self._size) if rank not in self._guests]
        gone = [f"{guest} went away ({guest.lost})" for guest in guests if guest.lost]
        if missing:
            ranks = f"rank{'s' if len(missing) > 1 else ''} {_listed(missing)}"
            return Finding(
                "workers", False, f"{ranks} did not come within {self._seconds:g} s, of {self._size} workers",
                "start the check there too, with the same address and --world-size; else look for a firewall",
            )  # fmt: skip
        if gone:
            return Finding("workers", False, "; ".join(gone), "look at what the check says there")
        hosts = len({guest.told["host"] for guest in guests})
        return Finding("workers", True, f"all {self._size} came, from {hosts} host{'s' if hosts > 1 else ''}")


def _line_of(guest: _Guest) -> _Line:
    assert guest.line is not None
    return guest.line


def _listed(what: list[Any]) -> str:
    more = len(what) - _SHOWN
    return ", ".join(map(str, what[:_SHOWN])) + (f" and {more} more" if more > 0 else "")


def _same_versions(guests: list[_Guest]) -> Finding:
    parts = []
    for name in guests[0].told["versions"]:
        where: dict[str, list[int]] = {}
        for guest in guests:
            where.setdefault(str(guest.told["versions"].get(name, "unknown")), []).append(guest.told["rank"])
        if len(where) > 1:
            parts.append(f"{name} is " + ", ".join(f"{v} on ranks {_listed(ranks)}" for v, ranks in where.items()))
    if parts:
        return Finding("same versions", False, "; ".join(parts), "install the same versions everywhere")
    return Finding("same versions", True, "actorrpc, torch, pyzmq and Python are the same everywhere")


def _same_token(guests: list[_Guest]) -> Finding:
    own = guests[0].proof
    others = [guest for guest in guests if not hmac.compare_digest(guest.proof, own)]
    if not others:
        return Finding("same token", True, "all have the same one" if own else "nobody has one")
    without = [guest.told["rank"] for guest in guests if not guest.proof]
    if without:
        text = f"some have one, and these ranks have none: {_listed(without)}"
    else:
        text = f"these ranks have another one than rank 0: {_listed([guest.told['rank'] for guest in others])}"
    return Finding("same token", False, text, "set ACTORRPC_TOKEN to the same secret everywhere")


def _clocks(guests: list[_Guest]) -> Finding:
    off = [guest for guest in guests if abs(guest.apart[0]) - guest.apart[1] > _APART_SECONDS]
    if off:
        text = ", ".join(f"{guest} is {guest.apart[0]:+.2f} s from rank 0" for guest in off[:_SHOWN])
        return Finding(
            "clocks", False, f"{text}; times in logs will not fit together, calls are not affected",
            "have the hosts' clocks set by NTP (chronyd, systemd-timesyncd)",
        )  # fmt: skip
    most = max((abs(guest.apart[0]) + guest.apart[1] for guest in guests[1:]), default=0.0)
    return Finding("clocks", True, f"within {1000 * most:.3g} ms of rank 0's")


def _reached(guests: list[_Guest]) -> Finding:
    names = {str(guest.told["rank"]): guest for guest in guests}
    faults = [
        f"{guest} does not reach {names[rank]} at {names[rank].told['listens'][0]} ({why})"
        for guest in guests
        for rank, why in guest.unreached.items()
        if rank in names
    ]
    if faults:
        more = len(faults) - _SHOWN
        text = "; ".join(faults[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        return Finding(
            "ways",
            False,
            text,
            "open the hosts' firewalls to each other, or set ACTORRPC_ADDRESS to the right interface",
        )
    return Finding("ways", True, "each reaches every other one")
