"""Name servers that do not answer hold nobody up for long."""

from __future__ import annotations

import sys

import pytest

from actorrpc.services import resolver
from tests.services.test_address import USER, finished, linux_only, needs, start

SILENT = """
mount --bind $SERVERS /etc/resolv.conf
ip link set lo up
ip link add vetha type veth peer name vethb
ip addr add 10.77.9.1/24 dev vetha
ip link set vetha up
ip link set vethb up
ip neigh add 10.77.9.2 lladdr 02:00:00:00:00:01 dev vetha
"""
"""A host whose name server takes everything and says nothing."""

ASKING = """
import socket, threading, time
from actorrpc.services.resolver import asking_once
from actorrpc.services.store import HintStore

def seconds(act):
    def run():
        begun = time.monotonic()
        act()
        found.append(time.monotonic() - begun)
    found = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]

def ask():
    try:
        socket.getnameinfo(("::ffff:10.77.9.7", 80, 0, 0), 0)
    except OSError:
        pass

def ask_once():
    with asking_once():
        ask()

def leave_and_find():
    writer, reader = HintStore("tcp://127.0.0.1:29500", 0), HintStore("tcp://127.0.0.1:29500", 1)
    deadline = time.monotonic() + 60
    writer.publish(b"h", deadline)
    assert reader.read(deadline) == b"h"
    reader.close()
    writer.close()

print(seconds(ask_once), seconds(ask), seconds(leave_and_find))
"""


@linux_only
@pytest.mark.slow
@pytest.mark.skipif(not resolver._is_glibc(), reason="how long glibc asks")
def test_a_silent_name_server_holds_a_store_up_for_seconds_at_most(tmp_path: object) -> None:
    flags = f"{USER} --net --mount"
    known = f"export SERVERS={tmp_path}/servers; echo nameserver 10.77.9.2 > {tmp_path}/servers"
    needs(flags, f"{known}{SILENT}")
    steps = f"{known}{SILENT}exec '{sys.executable}' -c '{ASKING}'"
    once, as_ever, store = map(float, finished(start(flags, steps)).split())
    assert once < as_ever / 2
    assert store < as_ever / 2  # which asks three times


def test_without_glibc_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "_is_glibc", lambda: False)
    with resolver.asking_once():
        assert resolver._state() is None


@linux_only
@pytest.mark.skipif(not resolver._is_glibc(), reason="its structure")
def test_what_was_changed_is_put_back() -> None:
    state = resolver._state()
    assert state is not None
    before = state.retrans, state.retry
    with resolver.asking_once():
        assert (state.retrans, state.retry) == (1, 1) != before
    assert (state.retrans, state.retry) == before
