"""The board: what the ranks of a group on one host tell each other outside of any kernel, stream or socket.

calls     a ring of (call number, signature): are all ranks about to run the same thing?
alarm     the first reason why a rank gave up a call; peers that wait see it and give up too
exchange  a few bytes for all (addresses of new memory)
lock      dropped by the kernel when a process ends; peers probe it
"""

from __future__ import annotations

import atexit
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch.distributed import ProcessGroup

from overweave.errors import OverweaveError, RankMismatch
from overweave.ir.operators.registry import OPERATORS
from overweave.memory.board import records
from overweave.memory.board.alarm import RULES, SAME_CALL, Alarm
from overweave.memory.board.records import ALARM_TEXT_BYTES, EXCHANGE_BYTES, TEXT_BYTES, Pause, Records, entry, now_ms
from overweave.memory.board.shared import SharedFile, share
from overweave.memory.group import Group, all_gather_bytes

PROBE_EVERY_S = 0.05
ABSENT_AFTER_S = 1.0
_OPERATOR = re.compile(rf"\b({'|'.join(OPERATORS)})\b")
REFUSED = "refused: "  # at the head of a signature: this rank raises what follows, and makes no call
TOLD_BYTES = (records.TEXT - records.HASH) * 8 + TEXT_BYTES


class Board:
    """One rank's view. Made collectively, once per group.

    One thread calls at a time (`Group.turn`); another, a watcher, may `check` and `alarm` beside it.
    """

    def __init__(self, group: Group, file: SharedFile) -> None:
        # Not the process group itself: a board must not keep alive what it is filed under.
        self.name = group.name
        self.rank = group.rank
        self.world_size = group.world_size
        self.timeout_s = group.timeout_s
        self.call = 0  # calls this rank has posted, and what ranks agree on before them
        self.asked = 0  # calls that the user has made, as errors count them; 0 where nobody counts
        self.is_watched = False  # a thread of this rank calls `check` often: a call need not
        # What runs has a watchdog of its own: a call heeds alarms, but looks only now and then for peers that ended.
        self.probes_rarely = False
        self._records = Records(file, group.rank)
        self._peers = [rank for rank in range(group.world_size) if rank != group.rank]
        # Of the thread that calls.
        self._release, self._acquire = self._records.fence.release, self._records.fence.acquire
        self._peer_starts = [peer * records.RECORD_WORDS for peer in self._peers]
        self._exchanges = 0
        self._written: dict[int, tuple[bytes, bool]] = {}  # what the entries of the ring say
        self._ring = [_turn(self._records.start, self._peer_starts, call) for call in range(records.ENTRIES)]
        self._last_probe_s = 0.0
        self._alarm_lock = threading.Lock()  # a watcher thread may sound it too

    @staticmethod
    def of(group: Group) -> Board:
        """The group's board; the first call is collective. Raises MachineError, PeerDied, PeerTimeout on all ranks."""
        board = _BOARDS.get(group.process_group)
        if board is None:
            file = share(
                group.rank,
                group.world_size * records.RECORD_WORDS * 8,
                lambda data: all_gather_bytes(group, data, EXCHANGE_BYTES),
                lambda file: records.take_lock(file, group.rank),
            )
            board = _BOARDS[group.process_group] = Board(group, file)
        return board

    @staticmethod
    def opened(group: Group) -> Board | None:
        """The group's board, if this rank has made it."""
        return _BOARDS.get(group.process_group)

    def agree(self, signature: bytes, deadline_s: float | None = None) -> int:
        """Starts a call once every rank is about to start the same one; the number of the call.

        Raises RankMismatch on every rank, which names the odd rank and both signatures, and PeerDied or PeerTimeout.
        """
        self._post(signature, is_posted=False)
        call, place = self.call, entry(self.call) + records.CALL
        self._await(
            lambda: [peer for peer in self._peers if self._records.word(peer, place) < call],
            f"it has not made call {self.asked or call} ({_readable(signature)}) yet",
            deadline_s,
        )
        self._compare(call)
        return call

    def post(self, signature: bytes) -> int:
        """As `agree`, without waiting: a mismatch is raised by the rank that looks last, and by the others' `check`."""
        # Every eager call comes through here: `_post` and `_compare`, without a function for each word.
        own, call = self._records, self.call + 1
        if not self.is_watched:  # whoever watches looks, too
            self._glance() if self.probes_rarely else self.check()
        self.call = call
        turn, words = self._ring[call % records.ENTRIES], own.words
        if self._written.get(turn.place) != (signature, True):
            self._write(turn.place, signature, is_posted=True)
        words[turn.call] = words[turn.begun] = call
        # A fence: store own entry before loading the peers'; of two ranks, at least one sees the other's.
        try:
            self._release()
        except RuntimeError:  # an interrupt came between the two, once
            own.fence()
        self._acquire()
        mine = words[turn.hashed]
        for its_call, hashed in turn.peers:
            if words[hashed] != mine and words[its_call] == call:
                self._compare(call)
        return call

    def finish(self) -> None:
        """This rank's part of the current call is done: its process may end now without harm to the call."""
        self._records.put(records.FINISHED, self.call)

    def check(self) -> None:
        """Raises what a peer has raised, or PeerDied if a peer ended before it finished this rank's current call."""
        self._records.look()
        self._heed_alarms()
        self._records.fence()
        for peer in self._peers:
            if not self._records.is_alive(peer) and self._records.word(peer, records.FINISHED) < self.call:
                self._heed_alarms()
                raise self.alarm(Alarm("died", f"call {self.asked or self.call}", peer))

    def check_now_and_then(self) -> None:
        """`check`, at most every 50 ms: for loops that wait."""
        now_s = time.monotonic()
        if now_s - self._last_probe_s >= PROBE_EVERY_S:
            self._last_probe_s = now_s
            self.check()

    def alarm(self, alarm: Alarm) -> OverweaveError:
        """Tells all peers that this rank gives up; the error to raise. Only the first alarm since a reset counts.

        A rank that has not looked at the board for long is the one to name, not the one in between that waits too.
        """
        own = self._records
        if alarm.rule == "timeout":
            alarm = replace(alarm, peer=self._absent(alarm.peer))
        with self._alarm_lock:
            if own.word(self.rank, records.ALARMED):
                return self._reported(self.rank)
            fields = (RULES.index(alarm.rule), alarm.peer, alarm.expected, alarm.seen, self.asked or self.call)
            for index, field in enumerate(fields):
                own.put(records.ALARM + index, field)
            own.put_data(records.ALARM_TEXT, alarm.operation.encode(), ALARM_TEXT_BYTES)
            own.fence()
            own.put(records.ALARMED, 1)
        return self._reported(self.rank)

    def give_up(self, error: BaseException, operation: str) -> None:
        """Tells all peers that this rank cannot do its part of a call that they have begun: what stopped it is no error
        of ours, but memory exhausted, or an interrupt. Ours are raised by every rank, or told already."""
        if not isinstance(error, OverweaveError):
            self.alarm(Alarm("failed", f"{operation}: {type(error).__name__}: {error}", self.rank))

    def blame(self, error: Exception, operation: str) -> OverweaveError:
        """The error for what a library collective raised: a peer's alarm or death, if there is one within a second."""
        end_s = time.monotonic() + ABSENT_AFTER_S
        while time.monotonic() < end_s:
            try:
                self.check()
            except OverweaveError as reason:
                return reason
            time.sleep(PROBE_EVERY_S)
        return self.alarm(Alarm("failed", f"{operation}: {error}"))

    def exchange(self, data: bytes, deadline_s: float | None = None) -> list[bytes]:
        """`data`, at most 240 bytes, of every rank. Raises PeerDied, PeerTimeout and peers' alarms."""
        # Two places in turn: a peer may read the last message until it has seen the next one, and never beyond.
        self._exchanges += 1
        count, own = self._exchanges, self._records
        place = records.EXCHANGE + count % 2 * records.EXCHANGE_WORDS
        own.put(place, len(data))
        own.put_data(place + 1, data, EXCHANGE_BYTES)
        own.fence()
        own.put(records.EXCHANGED, count)
        self._await(
            lambda: [peer for peer in self._peers if own.word(peer, records.EXCHANGED) < count],
            f"exchange {count}",
            deadline_s,
        )
        everyone = range(self.world_size)
        return [own.data(rank, place + 1, EXCHANGE_BYTES)[: own.word(rank, place)] for rank in everyone]

    def reset(self, clear: Callable[[], None], deadline_s: float | None = None) -> None:
        """Collective. Forgets alarms and calls once all ranks are here; `clear` runs on each while nobody computes.

        May be repeated after it raised PeerDied or PeerTimeout.
        """
        own = self._records
        phase = own.word(self.rank, records.RESET_PHASE)
        if phase % 2 == 0:
            own.put(records.RESET_BASE, max(self.call, self._exchanges))
            own.fence()
            phase += 1
            own.put(records.RESET_PHASE, phase)
        self._await_phase(phase, deadline_s)
        # Phases grow by two a reset, and no rank starts another before all have seen the end of this one.
        base = max(own.word(rank, records.RESET_BASE) for rank in range(self.world_size))
        self.call = self._exchanges = base
        for index in (records.EXCHANGED, records.BEGUN, records.FINISHED):
            own.put(index, base)
        own.put(records.ALARMED, 0)
        clear()
        own.fence()
        own.put(records.RESET_PHASE, phase + 1)
        self._await_phase(phase + 1, deadline_s)

    def _await_phase(self, phase: int, deadline_s: float | None) -> None:
        def missing() -> list[int]:
            return [peer for peer in self._peers if self._records.word(peer, records.RESET_PHASE) < phase]

        self._await(missing, "reset the workspace", deadline_s, is_reset=True)

    def _await(
        self, missing: Callable[[], list[int]], asked: str, deadline_s: float | None, is_reset: bool = False
    ) -> None:
        """Until `missing` is empty. During a reset alarms are neither heeded nor raised."""
        deadline_s = self.timeout_s if deadline_s is None else deadline_s
        pause, start_s = Pause(), time.monotonic()
        while missing():
            pause()
            self._records.look()
            if not is_reset:
                self._heed_alarms()
            dead = [peer for peer in missing() if not self._records.is_alive(peer)]
            dead = [peer for peer in missing() if peer in dead]  # it may have done its part and ended since
            late = missing() if time.monotonic() - start_s > deadline_s else []
            if not dead and not late:
                continue
            alarm = Alarm("died" if dead else "timeout", asked, (dead or late)[0])
            told = self.asked or self.call
            raise alarm.error(self.name, self.rank, told) if is_reset else self.alarm(alarm)
        self._records.fence()

    def _post(self, signature: bytes, is_posted: bool) -> None:
        if self.is_watched:
            self._records.look()
        else:
            self.check()
        self.call += 1
        own, place = self._records, entry(self.call)
        if self._written.get(place) != (signature, is_posted):
            self._write(place, signature, is_posted)
        own.put(place + records.CALL, self.call)
        own.put(records.BEGUN, self.call)
        own.fence()  # store own entry before loading the peers': of two ranks, at least one sees the other's

    def _write(self, place: int, signature: bytes, is_posted: bool) -> None:
        """What an entry says besides the number of its call. Most calls find it there from a turn ago."""
        own = self._records
        # Zero first: a reader that meets half an entry sees an older call.
        own.put(place + records.CALL, 0)
        own.fence()
        own.put_data(place + records.HASH, _told(signature, is_posted), TOLD_BYTES)
        own.fence()
        self._written[place] = (signature, is_posted)

    def _compare(self, call: int) -> None:
        """Raises RankMismatch if the entries of `call` that are there differ."""
        own, place = self._records, entry(call)
        mine = own.word(self.rank, place + records.HASH)
        for peer in self._peers:
            if own.word(peer, place + records.HASH) != mine and own.word(peer, place + records.CALL) == call:
                break
        else:
            return
        present = [rank for rank in range(self.world_size) if own.word(rank, place + records.CALL) == call]
        hashes = {rank: own.word(rank, place + records.HASH) for rank in present}
        if len(set(hashes.values())) == 1:
            return  # the entry was still being written when it was looked at
        odd, usual = _odd_one(hashes)
        asked = {rank: own.text(rank, place + records.TEXT, TEXT_BYTES) for rank in (odd, usual)}
        contrast = ", ".join(
            f"rank {rank} {told}" for rank, told in zip(asked, _told_apart(*asked.values()), strict=True)
        )
        if any(own.word(rank, place + records.IS_POSTED) for rank in present):
            raise self.alarm(Alarm("mismatch", contrast, odd))  # who posted may be under way: the call is void
        has_failed = any(text.startswith(REFUSED) for text in asked.values())
        cure = "Mend the call of the rank that raised the error" if has_failed else SAME_CALL
        raise RankMismatch(f"make call {self.asked or call} of this group alike on every rank", contrast, cure)

    def _glance(self) -> None:
        """`check`, but for peers that ended since a moment ago."""
        now_s, words = time.monotonic(), self._records.words
        if now_s - self._last_probe_s >= PROBE_EVERY_S:
            self._last_probe_s = now_s
            self.check()
        else:
            self._records.look()
            for start in self._peer_starts:
                if words[start + records.ALARMED]:
                    self._heed_alarms()

    def _heed_alarms(self) -> None:
        for rank in range(self.world_size):
            if self._records.word(rank, records.ALARMED):
                self._records.fence()
                raise self._reported(rank)

    def _reported(self, reporter: int) -> OverweaveError:
        words = [self._records.word(reporter, records.ALARM + index) for index in range(records.ALARM_FIELDS)]
        rule, peer, expected, seen, call = words
        text = self._records.text(reporter, records.ALARM_TEXT, ALARM_TEXT_BYTES)
        return Alarm(RULES[rule], text, peer, expected, seen).error(self.name, reporter, call, self.asked)

    def _absent(self, otherwise: int) -> int:
        """The peer that has been away longest, if any has been away for long and owes its part of this call."""
        own = self._records
        owing = [peer for peer in self._peers if own.word(peer, records.FINISHED) < self.call]
        longest = min(owing, key=lambda peer: own.word(peer, records.LOOKED_MS), default=-1)
        if longest >= 0 and now_ms() - own.word(longest, records.LOOKED_MS) > ABSENT_AFTER_S * 1e3:
            return longest
        return otherwise


class _Turn(NamedTuple):
    """Where the words of one entry of the ring are: the own ones, and those of each peer. place: within a record."""

    place: int
    call: int
    begun: int
    hashed: int
    peers: tuple[tuple[int, int], ...]


def _turn(own: int, peers: list[int], call: int) -> _Turn:
    """Of a call, given where the records begin."""
    place = entry(call)
    starts = tuple((peer + place + records.CALL, peer + place + records.HASH) for peer in peers)
    return _Turn(place, own + place + records.CALL, own + records.BEGUN, own + place + records.HASH, starts)


_BOARDS: WeakKeyDictionary[ProcessGroup, Board] = WeakKeyDictionary()
atexit.register(_BOARDS.clear)  # a process group must not outlive the interpreter


@lru_cache(maxsize=1024)
def _told(signature: bytes, is_posted: bool) -> bytes:
    """An entry from its hash on."""
    words = blake2b(signature, digest_size=8).digest() + int(is_posted).to_bytes(8, sys.byteorder)
    return words.ljust((records.TEXT - records.HASH) * 8, b"\0") + _readable(signature).encode()


@lru_cache(maxsize=1024)
def _readable(signature: bytes) -> str:
    return signature[:TEXT_BYTES].decode(errors="replace").encode()[:TEXT_BYTES].decode(errors="ignore")


def _told_apart(*signatures: str) -> tuple[str, ...]:
    """What ranks did that differ: the operators, where these do."""
    operators = [_OPERATOR.search(signature) for signature in signatures]
    names = [found.group() for found in operators if found]
    if len(set(names)) == len(signatures) and not any(each.startswith(REFUSED) for each in signatures):
        return tuple(f"asks for {name}" for name in names)
    return tuple(map(_told_of, signatures))


def _told_of(signature: str) -> str:
    """What a rank did, for an error on another one."""
    refused = signature.removeprefix(REFUSED)
    return (
        f"asks for {signature}" if refused == signature else f"raised an error before its call: {refused.rstrip('.')}"
    )


def _odd_one(hashes: dict[int, int]) -> tuple[int, int]:
    """The lowest rank outside the majority and the lowest inside; on a tie the lowest rank's side is the majority."""
    usual = max(Counter(hashes.values()).items(), key=lambda item: item[1])[0]
    odd = min(rank for rank, value in hashes.items() if value != usual)
    return odd, min(rank for rank, value in hashes.items() if value == usual)
