"""Lifelines: connections between islands that tell whether a process exists.

The operating system keeps a connection as long as the process exists, busy or suspended, and closes it when the process
ends, as it drops the file locks of an island. A host that no longer answers closes it, too. Nothing is sent but a few
bytes by which the two ends know each other: an address may lead to another host than it was meant for.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any
from weakref import WeakSet

TOKEN_BYTES = 8
# A host that does not answer is given up after the first and as many more seconds as there are probes.
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 1, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 2}
LOOPBACK = "127.0.0.1"


def own_address(store: Any) -> str:
    """Return the address of this host on its way to that of a store; the loopback's for a store without a host."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    try:
        found = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # of datagrams: nothing is sent
            return str(probe.getsockname()[0])
    except (AttributeError, OSError):
        return LOOPBACK


class Lifelines:
    """One rank's lines: those to it, held until this process ends, and those from it to the ranks of `connect`.

    address: where others find this rank. secret: of the group. A line that cannot be made, or is closed, stays so.
    """

    def __init__(self, rank: int, secret: bytes, host: str) -> None:
        self._rank, self._secret = rank, secret
        self._held: list[socket.socket] = []
        self._lines: dict[int, socket.socket] = {}
        self._tokens: dict[int, bytes] = {}  # what has come of a peer's token
        try:
            self._listener = socket.create_server((host, 0), family=_family(host))
        except OSError:  # no address of this host: nobody will find it
            self._listener = socket.create_server((LOOPBACK, 0))
        self._listener.setblocking(False)
        self.address = " ".join(map(str, self._listener.getsockname()[:2]))
        _ALL.add(self)

    def connect(self, addresses: Mapping[int, str]) -> None:
        """Begin lines to some ranks, by their addresses."""
        for rank, address in addresses.items():
            host, port = address.split()
            line = socket.socket(_family(host))
            line.setblocking(False)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEP_ALIVE.items():
                line.setsockopt(socket.IPPROTO_TCP, option, value)
            with suppress(OSError):  # an address that means nothing here
                line.connect_ex((host, int(port)))
                self._lines[rank], self._tokens[rank] = line, b""

    def accept(self, most: int) -> None:
        """Take the lines that others have begun, `most` in all."""
        with suppress(OSError):  # nobody is there, or nobody any more
            while len(self._held) < most:
                line, _ = self._listener.accept()
                line.send(self._token(self._rank))
                self._held.append(line)

    def meet(self, most: int, within_s: float) -> None:
        """Take lines, as `accept`, until the ends of those from here are known or gone, or time is over."""
        end_s = time.monotonic() + within_s
        while not all(self.is_open(rank) for rank in list(self._lines)) and time.monotonic() < end_s:
            self.accept(most)
            time.sleep(1e-3)

    def is_open(self, rank: int) -> bool:
        """Return whether the process of a rank is known to exist."""
        line = self._lines.get(rank)
        if line is None:
            return False
        try:
            received = line.recv(TOKEN_BYTES)
            self._tokens[rank] += received
            is_closed = not received
        except BlockingIOError:
            is_closed = False
        except OSError:
            is_closed = True
        if is_closed:
            self._lines.pop(rank).close()
        return not is_closed and self._tokens[rank] == self._token(rank)

    def close(self) -> None:
        """Close all lines: here, for they may be another process's as well."""
        for each in (self._listener, *self._held, *self._lines.values()):
            each.close()
        self._lines.clear()

    def _token(self, rank: int) -> bytes:
        return blake2b(self._secret + bytes([rank % 256, rank // 256]), digest_size=TOKEN_BYTES).digest()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


_ALL: WeakSet[Lifelines] = WeakSet()


def _close_all() -> None:
    """In a forked process, which would keep the lines of its parent open behind the parent's end."""
    for each in list(_ALL):
        each.close()


os.register_at_fork(after_in_child=_close_all)
