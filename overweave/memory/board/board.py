"""The board: a control block of the ranks of a group, used outside of kernels and streams.

It is shared memory of the ranks of an island; what ranks of other islands write, a courier brings.


calls       a ring of (call number, signature): are all ranks about to run the same call?
alarm       the first reason why a rank gave up a call; peers that wait see it and give up too
all-gather  of a few bytes (addresses of new memory)
lock        a file lock, dropped by the operating system when a process ends; peers probe it
"""

from __future__ import annotations

import re
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Literal, NamedTuple

from overweave.compat.torch_names import get_process_group_store
from overweave.errors import OverweaveError, PeerDied, PeerError, PeerTimeout, RankMismatch
from overweave.ir.operators.registry import OPERATORS
from overweave.memory.board import records
from overweave.memory.board.between_islands import BEAT_EVERY_S, LOST_AFTER_S, Courier
from overweave.memory.board.history import History
from overweave.memory.board.islands import Islands, meet, one_island
from overweave.memory.board.records import (
    ALARM_TEXT_BYTES,
    GATHER_BYTES,
    TEXT_BYTES,
    Pause,
    Records,
    SharedFile,
    entry_offset,
    now_ms,
)
from overweave.memory.group import LIVE_GROUPS, Group, OfGroup, all_gather_bytes

FailureKind = Literal["died", "timeout", "mismatch", "failed"]
RULES: tuple[FailureKind, ...] = ("died", "timeout", "mismatch", "failed")
RESET = "then call overweave.reset(group) on every rank"
SAME_CALL = (
    "Call the same operator with the same shapes, dtype and options on every rank; for uneven shards of rows, "
    "pass m=, the rows of all ranks"
)

# rule -> what happened to the peer, the error class, what to do.
_MEANINGS: dict[FailureKind, tuple[str, type[OverweaveError], str]] = {
    "died": ("died", PeerDied, "Find out why its process ended; start the group again"),
    "timeout": ("is late", PeerTimeout, f"Find what holds it up; {RESET}"),
    "mismatch": ("differs", RankMismatch, f"{SAME_CALL}; {RESET}"),
    "failed": ("failed", PeerError, f"See its own error; {RESET}"),
}


@dataclass(frozen=True)
class Alarm:
    """Why a call failed: in `operation`, `peer` (-1: unknown) had counted to `seen` instead of `expected`."""

    rule: FailureKind
    operation: str
    peer: int = -1
    expected: int = -1
    seen: int = -1

    def error(self, group: str, reporter: int, call: int, later: int = 0, hosts: Sequence[str] = ()) -> OverweaveError:
        """Return the error to raise on any rank. reporter: the rank that raised the alarm, in `call`.

        later: the number of the call that raises the error, if that is a later one. hosts: of each rank, to be named.
        """
        verb, kind, cure = _MEANINGS[self.rule]
        peer = "a peer" if self.peer < 0 else f"rank {self.peer}"
        peer += f" on {hosts[self.peer]}" if hosts and self.peer >= 0 else ""
        counts = "" if self.expected < 0 else f", expected {self.expected}, seen {self.seen}"
        found = f"{peer} {verb}: {self.operation}{counts}"
        if later > call:
            since = f"the group is broken since call {call}, as rank {reporter} saw ({found})"
            return kind(f"make call {later} of group {group}", f"{since}: right calls fail, too", cure)
        return kind(f"call {call} of group {group}, seen by rank {reporter}", found, cure)


PROBE_EVERY_S = 0.05
ABSENT_AFTER_S = 1.0
_OPERATOR = re.compile(rf"\b({'|'.join(OPERATORS)})\b")
REFUSED = "refused: "  # prefix of a signature: this rank raises the error that follows, and makes no call
ENTRY_TAIL_BYTES = (records.TEXT - records.HASH) * 8 + TEXT_BYTES


class Board:
    """One rank's view of the control block. Created collectively, once per group.

    One thread calls at a time (`Group.lock`); a watcher thread may call `check` and `alarm` concurrently.
    islands: which ranks map each other's memory.
    """

    def __init__(self, group: Group, file: SharedFile, islands: Islands | None = None) -> None:
        # Not the process group itself: a board must not keep alive the key of `_BOARDS`.
        self.name = group.name
        self.rank = group.rank
        self.world_size = group.world_size
        self.timeout_s = group.timeout_s
        self.call = 0  # number of the last call that this rank has posted
        self.user_calls = 0  # calls that the user has made, as errors count them; 0 where nobody counts
        self.is_watched = False  # a watcher thread of this rank calls `check` often: a call need not
        # The collectives have a watchdog of their own: a call checks alarms, and only every 50 ms for ended processes.
        self.probes_rarely = False
        self.islands = islands or one_island(group.world_size)
        self._hosts = () if self.islands.is_one else self.islands.hosts
        self._peers = [rank for rank in range(group.world_size) if rank != group.rank]
        near = [rank for rank in self.islands.of(group.rank) if rank != group.rank]
        self._far = [rank for rank in self._peers if rank not in near]
        self._records = Records(file, group.rank, self._far)
        self._courier: Courier | None = None
        self._history = History() if self._far else None  # near ranks see each other's calls as they are made
        # The rest but the lock belongs to the thread that calls.
        self._release, self._acquire = self._records.fence.release, self._records.fence.acquire
        self._peer_starts = [peer * records.RECORD_WORDS for peer in near]
        self._gathers = 0
        self._ring_contents: dict[int, tuple[bytes, bool]] = {}  # offset of an entry -> signature, is_nonblocking
        self._ring = [_entry_words(self._records.start, self._peer_starts, call) for call in range(records.ENTRIES)]
        self._last_probe_s = 0.0
        self._reset_call = 0  # calls up to this one were made before the last reset
        self._has_far_alarm = False  # as of the last records that came
        self._alarm_lock = threading.Lock()  # a watcher thread may raise the alarm too

    @staticmethod
    def of(group: Group) -> Board:
        """Return the group's board; the first call is collective. Raises MachineError, PeerDied, PeerTimeout."""
        board = _BOARDS.get(group.process_group)
        if board is None:
            size_bytes = group.world_size * records.RECORD_BYTES

            def gather(data: bytes) -> list[bytes]:
                return all_gather_bytes(group, data, GATHER_BYTES)

            file, islands, secret = meet(
                group.rank, size_bytes, gather, lambda file: records.take_lock(file, group.rank)
            )
            board = Board(group, file, islands)
            if not islands.is_one:
                board._start_courier(group, secret, lambda: gather(b""))
            _BOARDS[group.process_group] = board
        return board

    @staticmethod
    def existing(group: Group) -> Board | None:
        """Return the group's board if this rank has created it."""
        return _BOARDS.get(group.process_group)

    def _start_courier(self, group: Group, secret: bytes, meet_ranks: Callable[[], object]) -> None:
        """Have records carried between islands, as long as this board and the group live."""
        board, process_group = weakref.ref(self), weakref.ref(group.process_group)

        def on_round(has_news: bool) -> bool:
            known = board()
            if known is not None and has_news:
                known._compare_carried()
            return known is not None and process_group() in LIVE_GROUPS

        self._courier = Courier(self._records, self.rank, self.islands, on_round)
        self._records.has_far_process = self._courier.has_process
        self._courier.start(get_process_group_store(group.process_group), secret, meet_ranks)
        weakref.finalize(self, self._courier.close)

    def agree(self, signature: bytes, deadline_s: float | None = None) -> int:
        """Wait until every rank is about to start the same call; return the number of the call.

        Raises RankMismatch on every rank, with the odd rank and both signatures, and PeerDied or PeerTimeout.
        """
        own = self._records
        own.heartbeat() if self.is_watched else self.check()
        call = self.call = self.call + 1
        entry = entry_offset(call)
        if self._ring_contents.get(entry) != (signature, False):
            self._write_entry(entry, signature, is_nonblocking=False)
        if self._history is not None:
            own.put(entry + records.DIGEST, self._history.digest_with(own.word(self.rank, entry + records.HASH)))
        own.put(entry + records.CALL, call)
        own.put(records.BEGUN, call)
        own.fence()  # store own entry before loading the peers': of two ranks, at least one sees the other's
        self._wait_for_peers(
            lambda: [peer for peer in self._peers if own.word(peer, entry + records.CALL) < call],
            f"it has not made call {self.user_calls or call} ({_readable(signature)}) yet",
            deadline_s,
        )
        self._compare(call)
        if self._history is not None:  # not before: a call on which ranks differ is made by none of them
            self._history.add(call, signature, own.word(self.rank, entry + records.HASH))
        return call

    def post(self, signature: bytes) -> int:
        """Start a call without waiting. The last rank that posts raises RankMismatch; the others' `check` raises it."""
        # Every eager call comes through here: as `agree` and `_compare`, without a function call for each word.
        own, call = self._records, self.call + 1
        if not self.is_watched:  # a watcher stamps the heartbeat, too
            self._check_alarms() if self.probes_rarely else self.check()
        self.call = call
        entry, words = self._ring[call % records.ENTRIES], own.words
        if self._ring_contents.get(entry.offset) != (signature, True):
            self._write_entry(entry.offset, signature, is_nonblocking=True)
        mine = words[entry.hash]
        if self._history is not None:
            words[entry.hash + records.DIGEST - records.HASH] = self._history.add(call, signature, mine)
        words[entry.call] = words[entry.begun] = call
        # A fence: store own entry before loading the peers'; of two ranks, at least one sees the other's.
        try:
            self._release()
        except RuntimeError:  # an earlier interrupt came between release and acquire: the lock is free
            own.fence()
        self._acquire()
        for peer_call, peer_hash in entry.peers:
            if words[peer_hash] != mine and words[peer_call] == call:
                self._compare(call)
        return call

    def finish(self) -> None:
        """Mark this rank's part of the current call as done: its process may end without harm to the call."""
        self._records.put(records.FINISHED, self.call)

    def check(self) -> None:
        """Raise a peer's alarm, or PeerDied if a peer ended before it finished this rank's current call."""
        self._records.heartbeat()
        self._raise_peer_alarm()
        self._records.fence()
        for peer in self._peers:
            if not self._records.is_alive(peer) and self._records.word(peer, records.FINISHED) < self.call:
                self._raise_peer_alarm()
                raise self.alarm(Alarm("died", f"call {self.user_calls or self.call}", peer))

    def check_periodically(self) -> None:
        """Call `check`, at most every 50 ms: for loops that wait."""
        now_s = time.monotonic()
        if now_s - self._last_probe_s >= PROBE_EVERY_S:
            self._last_probe_s = now_s
            self.check()

    def alarm(self, alarm: Alarm) -> OverweaveError:
        """Publish to all peers that this rank gives up; return the error to raise. Only the first alarm counts.

        A timeout names the rank whose heartbeat is oldest, not a rank in between that waits, too.
        """
        own = self._records
        if alarm.rule == "timeout":
            alarm = replace(alarm, peer=self._slowest_peer(alarm.peer))
        with self._alarm_lock:
            if own.word(self.rank, records.ALARMED):
                return self._alarm_error(self.rank)
            fields = (RULES.index(alarm.rule), alarm.peer, alarm.expected, alarm.seen, self.user_calls or self.call)
            for index, field in enumerate(fields):
                own.put(records.ALARM + index, field)
            own.put_data(records.ALARM_TEXT, alarm.operation.encode(), ALARM_TEXT_BYTES)
            own.fence()
            own.put(records.ALARMED, 1)
        if self._courier is not None:
            self._courier.tell()
        return self._alarm_error(self.rank)

    def report_failure(self, error: BaseException, operation: str) -> None:
        """Publish that this rank cannot do its part of a call that peers have begun: out of memory, or an interrupt.

        An OverweaveError is not published: every rank raises it, or an alarm has published it already.
        """
        if not isinstance(error, OverweaveError):
            self.alarm(Alarm("failed", f"{operation}: {type(error).__name__}: {error}", self.rank))

    def root_cause(self, error: Exception, operation: str) -> OverweaveError:
        """Return the error for what a collective of NCCL or gloo raised: a peer's alarm or death, if there is one.

        It is there within a second, or as soon as the loss of another island is noticed.
        """
        end_s = time.monotonic() + (LOST_AFTER_S + 2 * BEAT_EVERY_S if self._far else ABSENT_AFTER_S)
        while time.monotonic() < end_s:
            try:
                self.check()
            except OverweaveError as reason:
                return reason
            time.sleep(PROBE_EVERY_S)
        return self.alarm(Alarm("failed", f"{operation}: {error}"))

    def all_gather_bytes(self, data: bytes, deadline_s: float | None = None) -> list[bytes]:
        """Return `data`, at most 240 bytes, of every rank. Raises PeerDied, PeerTimeout and peers' alarms."""
        # Two slots alternate: a peer may read the last message until it has seen the next one, and never beyond.
        self._gathers += 1
        count, own = self._gathers, self._records
        slot = records.GATHER_SLOTS + count % 2 * records.GATHER_SLOT_WORDS
        own.put(slot, len(data))
        own.put_data(slot + 1, data, GATHER_BYTES)
        own.fence()
        own.put(records.GATHERS, count)
        self._wait_for_peers(
            lambda: [peer for peer in self._peers if own.word(peer, records.GATHERS) < count],
            f"exchange {count}",  # the message of an alarm
            deadline_s,
        )
        everyone = range(self.world_size)
        return [own.data(rank, slot + 1, GATHER_BYTES)[: own.word(rank, slot)] for rank in everyone]

    def reset(self, clear: Callable[[], None], deadline_s: float | None = None) -> None:
        """Clear alarms and calls once all ranks are here. Collective. `clear` runs on each while no rank computes.

        May be repeated after it raised PeerDied or PeerTimeout.
        """
        own = self._records
        phase = own.word(self.rank, records.RESET_PHASE)
        if phase % 2 == 0:
            own.put(records.RESET_BASE, max(self.call, self._gathers))
            own.fence()
            phase += 1
            own.put(records.RESET_PHASE, phase)
        self._wait_for_phase(phase, deadline_s)
        # Phases grow by two a reset, and no rank starts another before all have seen the end of this one.
        base = max(own.word(rank, records.RESET_BASE) for rank in range(self.world_size))
        self.call = self._gathers = self._reset_call = base
        for index in (records.GATHERS, records.BEGUN, records.FINISHED):
            own.put(index, base)
        own.put(records.ALARMED, 0)
        if self._history is not None:
            self._history.clear()
        clear()
        own.fence()
        own.put(records.RESET_PHASE, phase + 1)
        self._wait_for_phase(phase + 1, deadline_s)

    def _wait_for_phase(self, phase: int, deadline_s: float | None) -> None:
        """Wait until every peer has come to a phase of a reset."""

        def missing() -> list[int]:
            return [peer for peer in self._peers if self._records.word(peer, records.RESET_PHASE) < phase]

        self._wait_for_peers(missing, "reset the workspace", deadline_s, is_reset=True)

    def _wait_for_peers(
        self, missing: Callable[[], list[int]], purpose: str, deadline_s: float | None, is_reset: bool = False
    ) -> None:
        """Wait until `missing` returns no rank. During a reset alarms are neither checked nor published.

        Raises PeerDied or PeerTimeout; purpose: what the missing rank has not done, for the error.
        """
        deadline_s = self.timeout_s if deadline_s is None else deadline_s
        pause, start_s = Pause(), time.monotonic()
        with nullcontext() if self._courier is None else self._courier.hurried():
            while missing():
                pause()
                self._records.heartbeat()
                if not is_reset:
                    self._raise_peer_alarm()
                dead = [peer for peer in missing() if not self._records.is_alive(peer)]
                dead = [peer for peer in missing() if peer in dead]  # a peer may have done its part and ended since
                late = missing() if time.monotonic() - start_s > deadline_s else []
                unheard = [peer for peer in missing() if peer in self._far] if self._is_cut_off else []
                if dead or late or unheard:
                    purpose += ": the store of the process group is out of reach" if unheard and not dead else ""
                    alarm = Alarm("died" if dead else "timeout", purpose, (dead or late or unheard)[0])
                    raise self._void_error(alarm) if is_reset else self.alarm(alarm)
        self._records.fence()

    @property
    def _is_cut_off(self) -> bool:
        """Whether nothing comes from other islands any more, or goes there."""
        return self._courier is not None and self._courier.is_cut_off

    def _void_error(self, alarm: Alarm) -> OverweaveError:
        """Return the error of an alarm that is not published."""
        return alarm.error(self.name, self.rank, self.user_calls or self.call, hosts=self._hosts)

    def _write_entry(self, offset: int, signature: bytes, is_nonblocking: bool) -> None:
        """Write the signature of an entry. A loop of calls finds it there from 64 calls ago, and need not."""
        own = self._records
        # Zero first: a reader of a half-written entry sees an older call.
        own.put(offset + records.CALL, 0)
        own.fence()
        own.put_data(offset + records.HASH, _entry_bytes(signature, is_nonblocking), ENTRY_TAIL_BYTES)
        own.fence()
        self._ring_contents[offset] = (signature, is_nonblocking)

    def _compare(self, call: int) -> None:
        """Raise RankMismatch if two ranks have posted different entries of `call`."""
        own, offset = self._records, entry_offset(call)
        mine = own.word(self.rank, offset + records.HASH)
        for peer in self._peers:
            if own.word(peer, offset + records.HASH) != mine and own.word(peer, offset + records.CALL) == call:
                break
        else:
            return
        present = [rank for rank in range(self.world_size) if own.word(rank, offset + records.CALL) == call]
        hashes = {rank: own.word(rank, offset + records.HASH) for rank in present}
        if len(set(hashes.values())) == 1:
            return  # the entry was still being written when it was read
        odd, usual = _odd_and_usual(hashes)
        texts = {rank: own.text(rank, offset + records.TEXT, TEXT_BYTES) for rank in (odd, usual)}
        contrast = ", ".join(
            f"{self._called(rank)} {text}" for rank, text in zip(texts, _contrast(*texts.values()), strict=True)
        )
        if any(own.word(rank, offset + records.IS_NONBLOCKING) for rank in present):
            raise self.alarm(Alarm("mismatch", contrast, odd))  # a rank that posted may be running: the call is void
        has_failed = any(text.startswith(REFUSED) for text in texts.values())
        cure = "Mend the call of the rank that raised the error" if has_failed else SAME_CALL
        raise RankMismatch(f"make call {self.user_calls or call} of this group alike on every rank", contrast, cure)

    def _compare_carried(self) -> None:
        """Look at what has just come from other islands, in the thread of the courier: alarms, and calls that differ
        from this rank's. Whoever checks raises the alarm of such calls.
        """
        self._has_far_alarm = any(self._records.word(peer, records.ALARMED) for peer in self._far)
        for peer in self._far:
            with suppress(OverweaveError):
                self._compare_far(peer)

    def _compare_far(self, peer: int) -> None:
        """Raise RankMismatch if a far rank's calls differ from this rank's, which may have made many more since.

        A far rank that is ahead compares itself: of two ranks, the one that has made more calls remembers the others.
        """
        own, history, last, first_odd = self._records, self._history, self._records.word(peer, records.BEGUN), 0
        assert history is not None
        for call in range(last, max(last - records.ENTRIES, self._reset_call), -1):
            noted, entry = history.find(call), entry_offset(call)
            if noted is None or own.word(peer, entry + records.CALL) != call:
                continue
            if own.word(peer, entry + records.DIGEST) == noted.digest:
                break
            first_odd = call
        if first_odd:
            self._compare(first_odd)  # in the words of all ranks, where these still have the call
            raise self.alarm(Alarm("mismatch", self._contrast_far(peer, range(first_odd, last + 1)), peer))

    def _contrast_far(self, peer: int, calls: range) -> str:
        """Say how a far rank's calls differ from this rank's. calls: of which one differs, or one before the first."""
        own, noted = self._records, [found for call in calls if self._history and (found := self._history.find(call))]
        for call, signature, _ in noted:
            entry = entry_offset(call)
            if own.data(peer, entry + records.HASH, 8) != _entry_bytes(signature, is_nonblocking=True)[:8]:
                texts = own.text(peer, entry + records.TEXT, TEXT_BYTES), _readable(signature)
                ranks = zip((peer, self.rank), _contrast(*texts), strict=True)
                return ", ".join(f"{self._called(rank)} {text}" for rank, text in ranks)
        return f"{self._called(peer)} made another call than {self._called(self.rank)} before call {calls.start}"

    def _called(self, rank: int) -> str:
        """Return a rank with its host, where there are several."""
        return f"rank {rank} on {self._hosts[rank]}" if self._hosts else f"rank {rank}"

    def _check_alarms(self) -> None:
        """Raise a peer's alarm; look for processes that ended at most every 50 ms."""
        now_s, words = time.monotonic(), self._records.words
        if now_s - self._last_probe_s >= PROBE_EVERY_S:
            self._last_probe_s = now_s
            self.check()
        else:
            self._records.heartbeat()
            for start in self._peer_starts:
                if words[start + records.ALARMED]:
                    self._raise_peer_alarm()
            if self._has_far_alarm:
                self._raise_peer_alarm()

    def _raise_peer_alarm(self) -> None:
        """Raise the alarm of any rank, if there is one."""
        for rank in range(self.world_size):
            if self._records.word(rank, records.ALARMED):
                self._records.fence()
                raise self._alarm_error(rank)

    def _alarm_error(self, reporter: int) -> OverweaveError:
        words = [self._records.word(reporter, records.ALARM + index) for index in range(records.ALARM_FIELDS)]
        rule, peer, expected, seen, call = words
        text = self._records.text(reporter, records.ALARM_TEXT, ALARM_TEXT_BYTES)
        return Alarm(RULES[rule], text, peer, expected, seen).error(
            self.name, reporter, call, self.user_calls, self._hosts
        )

    def _slowest_peer(self, otherwise: int) -> int:
        """Return the unfinished peer with the oldest heartbeat if that is older than 1 s; else `otherwise`."""
        own = self._records
        unfinished = [peer for peer in self._peers if own.word(peer, records.FINISHED) < self.call]
        oldest = min(unfinished, key=lambda peer: own.word(peer, records.HEARTBEAT_MS), default=-1)
        if oldest >= 0 and now_ms() - own.word(oldest, records.HEARTBEAT_MS) > ABSENT_AFTER_S * 1e3:
            return oldest
        return otherwise


class _EntryWords(NamedTuple):
    """Indices of the words of one ring entry: this rank's, and (call, hash) of each peer. offset: within a record."""

    offset: int
    call: int
    begun: int
    hash: int
    peers: tuple[tuple[int, int], ...]


def _entry_words(own: int, peers: list[int], call: int) -> _EntryWords:
    """Return the words of a call's entry. own, peers: where the records of this rank and of its peers begin."""
    offset = entry_offset(call)
    starts = tuple((peer + offset + records.CALL, peer + offset + records.HASH) for peer in peers)
    return _EntryWords(offset, own + offset + records.CALL, own + records.BEGUN, own + offset + records.HASH, starts)


_BOARDS = OfGroup[Board]()


@lru_cache(maxsize=1024)
def _entry_bytes(signature: bytes, is_nonblocking: bool) -> bytes:
    """Return the bytes of an entry from its hash on: hash, is_nonblocking, text."""
    words = blake2b(signature, digest_size=8).digest() + int(is_nonblocking).to_bytes(8, sys.byteorder)
    return words.ljust((records.TEXT - records.HASH) * 8, b"\0") + _readable(signature).encode()


@lru_cache(maxsize=1024)
def _readable(signature: bytes) -> str:
    return signature[:TEXT_BYTES].decode(errors="replace").encode()[:TEXT_BYTES].decode(errors="ignore")


def _contrast(*signatures: str) -> tuple[str, ...]:
    """Describe each rank's call: by the operator alone where the operators differ."""
    operators = [_OPERATOR.search(signature) for signature in signatures]
    names = [match.group() for match in operators if match]
    if len(set(names)) == len(signatures) and not any(each.startswith(REFUSED) for each in signatures):
        return tuple(f"asks for {name}" for name in names)
    return tuple(map(_describe_call, signatures))


def _describe_call(signature: str) -> str:
    """Describe a rank's call for an error on another rank."""
    refused = signature.removeprefix(REFUSED)
    return (
        f"asks for {signature}" if refused == signature else f"raised an error before its call: {refused.rstrip('.')}"
    )


def _odd_and_usual(hashes: dict[int, int]) -> tuple[int, int]:
    """Return the lowest rank outside the majority and the lowest inside; on a tie the lowest rank is inside."""
    usual = max(Counter(hashes.values()).items(), key=lambda item: item[1])[0]
    odd = min(rank for rank, value in hashes.items() if value != usual)
    return odd, min(rank for rank, value in hashes.items() if value == usual)
