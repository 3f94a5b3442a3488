"""Between islands the board's records travel by the store of the process group, carried by a thread of each rank.

A rank publishes its own record and reads those of ranks on other islands: as often as it beats, whatever its calls do,
so that a call adds no message; and at once while a rank waits, or has told something. That a process exists its own
island knows by a file lock, and publishes the record of one that does not. An island is lost when it does not beat,
and the lifeline to it is closed: its host, or the link to it.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed import Store

from overweave.memory.board.islands import Islands
from overweave.memory.board.lifelines import Lifelines, own_address
from overweave.memory.board.records import HEARTBEAT_MS, Records, now_ms

BEAT_EVERY_S = 0.4
LOST_AFTER_S = 3.4  # without a beat; with what passes before somebody looks, a loss is named within 5 s
HURRY_S = (1e-3, 2e-2)  # between two rounds while somebody waits: at first, and in the end
TELL_WITHIN_S = 0.5
MEET_WITHIN_S = 1.0  # hosts that cannot connect to each other lose it, once a group
ENDED = -1  # instead of a beat: the process is gone, and its record is its last one

_BEAT = struct.Struct("<qqq")  # number of the beat, version of the record, ms since the rank has read the board


@dataclass
class _Heard:
    """What this process has heard of a far rank. silent_s: for how long it beat no more, in steps of the looks at it:
    a step counts for two beats at most, for a standstill of this process is none of the peer.
    """

    beat: int = 0
    version: int = -1
    seen: int = 0
    silent_s: float = 0.0
    looked_s: float = 0.0

    def look(self) -> None:
        now_s = time.monotonic()
        passed_s = min(now_s - self.looked_s, 2 * BEAT_EVERY_S)
        self.silent_s = 0.0 if self.seen != self.beat else self.silent_s + passed_s
        self.seen, self.looked_s = self.beat, now_s


class Courier:
    """Carries this rank's record to other islands and theirs here.

    on_round: called before each round with whether the last one brought records; returns whether the group lives.
    is_cut_off: the store could not be reached, and its connection does not come back.
    The thread holds the records alone, and ends by `close`, and with the group. It raises nothing.
    """

    def __init__(self, records: Records, rank: int, islands: Islands, on_round: Callable[[bool], bool]) -> None:
        self._records, self._rank, self._islands, self._on_round = records, rank, islands, on_round
        self._mates = [mate for mate in islands.of(rank) if mate != rank]
        self._heard = {peer: _Heard(looked_s=time.monotonic()) for peer in sorted(records.far)}
        self._published: dict[int, tuple[int, bytes]] = {}  # rank -> version, record
        self._beat, self._beat_s = 0, 0.0
        self._rung, self._lock = threading.Event(), threading.Lock()
        self._told: list[threading.Event] = []  # of threads that wait until the record is out
        self._waiting = 0  # how many threads of this process wait for news
        self._rounds = 0  # without news, while somebody waits
        self._is_closed, self.is_cut_off, self._has_news = False, False, False
        self._asked = self._received = 0  # how often this rank has begun to read what others told, and has ended that
        self._closed: dict[int, int] = {}  # first rank of an island -> as of how many readings its line was closed
        self._process = os.getpid()

    def start(self, store: Store, secret: bytes, meet: Callable[[], object]) -> None:
        """Publish this rank's record for the first time, meet the other ranks, who have theirs, and start the thread.

        secret: of the group's board. The thread has a connection of its own, which nobody else's wait blocks. Raises
        what the store, and `meet`, raise.
        """
        self._prefix, self._store = f"overweave/{secret.hex()}/", store.clone()  # type: ignore[attr-defined]
        self._lines = Lifelines(self._rank, secret, own_address(store))
        self._store.set(f"{self._prefix}line.{self._rank}", self._lines.address)
        self._publish(self._rank, 1)
        meet()
        first = [island[0] for island in self._islands.members if self._rank not in island]
        addresses = self._store.multi_get([f"{self._prefix}line.{peer}" for peer in first])
        self._lines.connect({peer: bytes(each).decode() for peer, each in zip(first, addresses, strict=True)})
        self._lines.meet(len(self._heard), MEET_WITHIN_S)
        self._thread = threading.Thread(target=self._run, name="overweave courier", daemon=True)
        self._thread.start()

    def tell(self) -> None:
        """Publish this rank's record now; return once it is out, or does not come out."""
        if threading.current_thread() is self._thread:
            self._rung.set()
            return
        is_out = threading.Event()
        with self._lock:
            self._told.append(is_out)
        self._rung.set()
        is_out.wait(TELL_WITHIN_S)

    @contextmanager
    def hurried(self) -> Iterator[None]:
        """Carry without a pause inside: somebody waits. What this rank has to tell is out at the end."""
        self._waiting += 1
        try:
            self.tell()
            yield
        finally:
            self._waiting -= 1

    def has_process(self, rank: int) -> bool:
        """Return whether the process of a far rank exists, as far as is known: a suspended one does."""
        island = self._islands.of(rank)
        with self._lock:
            for mate in island:
                self._heard[mate].look()
            has_line = self._has_line(island[0])
            is_heard = has_line or any(self._heard[mate].silent_s < LOST_AFTER_S for mate in island)
            return is_heard and self._heard[rank].beat != ENDED

    def _has_line(self, first: int) -> bool:
        """Return whether the line to an island is open, or what its ranks told before it closed may not be here yet."""
        if self._lines.is_open(first):
            self._closed.pop(first, None)
            return True
        return self._received <= self._closed.setdefault(first, self._asked) and not self.is_cut_off

    def close(self) -> None:
        """Publish this rank's last record and end the thread."""
        if os.getpid() == self._process:  # not in a process that was forked from the rank
            self._is_closed = True
            self._rung.set()
            if threading.current_thread() is not self._thread:
                self._thread.join(TELL_WITHIN_S)
            self._lines.close()

    def _run(self) -> None:
        shortest_s, longest_s = HURRY_S
        while not self._is_closed and self._on_round(self._has_news):
            self._has_news = False
            self._lines.accept(len(self._heard))
            with self._lock:
                told, self._told = self._told, []
            self._attempt(self._carry)
            for each in told:
                each.set()
            for peer in self._heard:
                self.has_process(peer)  # looks at every beat, though nobody else may ask for long
            if self._waiting and not self.is_cut_off:
                self._rounds += 1
                time.sleep(min(shortest_s * self._rounds, longest_s))
            else:
                self._rounds = 0
                self._rung.wait(BEAT_EVERY_S)
            self._rung.clear()
        self._attempt(lambda: self._publish(self._rank, ENDED))

    def _attempt(self, act: Callable[[], None]) -> None:
        """Use the store, unless it was out of reach once."""
        try:
            if not self.is_cut_off:
                act()
        except RuntimeError:
            self.is_cut_off = True

    def _carry(self) -> None:
        """Publish what is new here, and take what is new elsewhere."""
        for mate in self._mates:
            if mate not in self._published and not self._records.is_alive(mate):
                self._publish(mate, ENDED)
        is_due = time.monotonic() - self._beat_s >= BEAT_EVERY_S
        if is_due or self._records.snapshot(self._rank) != self._published[self._rank][1]:
            self._publish(self._rank, self._beat + 1)
        self._receive()

    def _publish(self, rank: int, beat: int) -> None:
        """Publish a record, if it has changed, and then a beat that names its version."""
        record = self._records.snapshot(rank)
        version, known = self._published.get(rank, (0, b""))
        if record != known:
            version += 1 if rank == self._rank else 1 << 32  # unlike any version of the rank itself
            self._published[rank] = version, record
            self._store.set(f"{self._prefix}record.{rank}", zlib.compress(record, 1))
        age_ms = max(0, now_ms() - self._records.word(rank, HEARTBEAT_MS))
        self._store.set(f"{self._prefix}beat.{rank}", _BEAT.pack(beat, version, age_ms))
        if rank == self._rank:
            self._beat, self._beat_s = beat, time.monotonic()

    def _receive(self) -> None:
        """Take the beats of all far ranks, and before these the records of those whose version is new."""
        self._asked += 1
        told = self._store.multi_get([f"{self._prefix}beat.{peer}" for peer in self._heard])
        beats = {peer: _BEAT.unpack(beat) for peer, beat in zip(self._heard, told, strict=True)}
        changed = [peer for peer, (_, version, _) in beats.items() if version != self._heard[peer].version]
        records = self._store.multi_get([f"{self._prefix}record.{peer}" for peer in changed]) if changed else []
        for peer, record in zip(changed, records, strict=True):
            self._records.receive(peer, zlib.decompress(record))
        for peer, (beat, version, age_ms) in beats.items():
            self._records.receive_heartbeat(peer, age_ms)
            self._heard[peer].version, self._heard[peer].beat = version, beat
        self._received = self._asked
        if changed:
            self._rounds, self._has_news = 0, True
