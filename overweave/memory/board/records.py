"""The board's memory: one record of int64 words and texts per rank, written by that rank only, and its file lock.

A file lock belongs to the process that took it, not to its children. The operating system drops it when the process
ends, even unreaped, and when that process closes *any* descriptor of the file: so the file stays open.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time

from overweave.memory.board.shared import Fence, SharedFile

TEXT_BYTES = 200
GATHER_BYTES = 240
ALARM_TEXT_BYTES = 512  # two signatures and what is wrong with them

# Words of a record: state, alarm, two slots of all-gathered bytes, the alarm's text, a ring of calls.
GATHERS, RESET_PHASE, RESET_BASE, BEGUN, FINISHED, ALARMED = range(6)
ALARM, ALARM_FIELDS = 6, 5
HEARTBEAT_MS = 28  # when the rank last read the board
GATHER_SLOTS, GATHER_SLOT_WORDS = 32, 32
ALARM_TEXT = 96
RING, ENTRIES, ENTRY_WORDS = 160, 64, 32
RECORD_WORDS = RING + ENTRIES * ENTRY_WORDS
# Words of an entry of the ring.
CALL, HASH, IS_NONBLOCKING, TEXT = 0, 1, 2, 4

_LOCK_QUERY = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


class Records:
    """Reads any rank's record, writes this rank's.

    words: all records, one after the other. start: index of this rank's first word.
    """

    def __init__(self, file: SharedFile, rank: int) -> None:
        self.fence = Fence()
        self._file = file
        self.words = file.words
        self.start = rank * RECORD_WORDS

    def word(self, rank: int, index: int) -> int:
        """Return a word of any rank's record."""
        return self.words[rank * RECORD_WORDS + index]

    def put(self, index: int, value: int) -> None:
        """Store a word of this rank's record."""
        self.words[self.start + index] = value

    def data(self, rank: int, index: int, length: int) -> bytes:
        """Return bytes of any rank's record, from word `index` on."""
        start = (rank * RECORD_WORDS + index) * 8
        return bytes(self._file.memory[start : start + length])

    def text(self, rank: int, index: int, length: int) -> str:
        """Return `data` as text, without the padding."""
        return self.data(rank, index, length).rstrip(b"\0").decode(errors="replace")

    def put_data(self, index: int, data: bytes, length: int) -> None:
        """Store bytes in this rank's record, cut or padded to `length`."""
        start = (self.start + index) * 8
        self._file.memory[start : start + length] = data[:length].ljust(length, b"\0")

    def heartbeat(self) -> None:
        """Stamp the time into this rank's record: peers see that it still runs."""
        self.words[self.start + HEARTBEAT_MS] = now_ms()

    def is_alive(self, rank: int) -> bool:
        """Return whether the process of a peer exists, running or suspended: whether it holds its file lock."""
        query = _LOCK_QUERY.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        kind, *_ = _LOCK_QUERY.unpack(fcntl.fcntl(self._file.descriptor, fcntl.F_GETLK, query))
        return bool(kind != fcntl.F_UNLCK)


def take_lock(file: SharedFile, rank: int) -> None:
    """Take the file lock that shows peers that this process exists. Raises OSError."""
    fcntl.lockf(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)


def entry_offset(call: int) -> int:
    """Return the first word of a call's ring entry within a record."""
    return RING + call % ENTRIES * ENTRY_WORDS


def now_ms() -> int:
    """Return milliseconds of a clock that all processes of the host share."""
    return time.monotonic_ns() // 1_000_000


class Pause:
    """Back-off between two polls of memory that a peer will write: yields the core first, then sleeps ever longer."""

    def __init__(self) -> None:
        self._polls = 0

    def __call__(self) -> None:
        self._polls += 1
        if self._polls < 20:
            os.sched_yield()
        else:
            time.sleep(min(1e-4 * (self._polls - 19), 2e-3))
