"""The board's memory: one record of int64 words and texts per rank, written by that rank only, and its lock.

A record lock belongs to the process that took it, not to its children, and the kernel drops it when the process ends,
even unreaped. It also goes when *any* descriptor of the file is closed in that process: so the file stays open.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time

from overweave.memory.board.shared import Fence, SharedFile

TEXT_BYTES = 200
EXCHANGE_BYTES = 240
ALARM_TEXT_BYTES = 512  # two signatures and what is wrong with them

# Words of a record: state, alarm, two places to exchange bytes, the alarm's text, a ring of calls.
EXCHANGED, RESET_PHASE, RESET_BASE, BEGUN, FINISHED, ALARMED = range(6)
ALARM, ALARM_FIELDS = 6, 5
LOOKED_MS = 28  # when the rank last looked at the board
EXCHANGE, EXCHANGE_WORDS = 32, 32
ALARM_TEXT = 96
RING, ENTRIES, ENTRY_WORDS = 160, 64, 32
RECORD_WORDS = RING + ENTRIES * ENTRY_WORDS
# Words of an entry of the ring.
CALL, HASH, IS_POSTED, TEXT = 0, 1, 2, 4

_LOCK_QUERY = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


class Records:
    """Reads of any rank's record, writes to the own one.

    words: all records, one after the other. start: of the own one.
    """

    def __init__(self, file: SharedFile, rank: int) -> None:
        self.fence = Fence()
        self._file = file
        self.words = file.words
        self.start = rank * RECORD_WORDS

    def word(self, rank: int, index: int) -> int:
        """A word of any rank's record."""
        return self.words[rank * RECORD_WORDS + index]

    def put(self, index: int, value: int) -> None:
        """Stores a word of the own record."""
        self.words[self.start + index] = value

    def data(self, rank: int, index: int, length: int) -> bytes:
        """Bytes of any rank's record, from word `index` on."""
        start = (rank * RECORD_WORDS + index) * 8
        return bytes(self._file.memory[start : start + length])

    def text(self, rank: int, index: int, length: int) -> str:
        """As `data`, without the padding."""
        return self.data(rank, index, length).rstrip(b"\0").decode(errors="replace")

    def put_data(self, index: int, data: bytes, length: int) -> None:
        """Stores bytes in the own record, cut or padded to `length`."""
        start = (self.start + index) * 8
        self._file.memory[start : start + length] = data[:length].ljust(length, b"\0")

    def look(self) -> None:
        """Notes that this rank is about."""
        self.words[self.start + LOOKED_MS] = time.monotonic_ns() // 1_000_000

    def is_alive(self, rank: int) -> bool:
        """Whether the process of a peer runs, or is stopped."""
        query = _LOCK_QUERY.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        kind, *_ = _LOCK_QUERY.unpack(fcntl.fcntl(self._file.descriptor, fcntl.F_GETLK, query))
        return bool(kind != fcntl.F_UNLCK)


def take_lock(file: SharedFile, rank: int) -> None:
    """What makes this process alive to its peers. Raises OSError."""
    fcntl.lockf(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)


def entry(call: int) -> int:
    """Where a call stands in the ring."""
    return RING + call % ENTRIES * ENTRY_WORDS


def now_ms() -> int:
    """Milliseconds on a clock that all processes of the host share."""
    return time.monotonic_ns() // 1_000_000


class Pause:
    """Between two looks at memory that a peer will write: yields the core first, then sleeps longer and longer."""

    def __init__(self) -> None:
        self._looks = 0

    def __call__(self) -> None:
        self._looks += 1
        if self._looks < 20:
            os.sched_yield()
        else:
            time.sleep(min(1e-4 * (self._looks - 19), 2e-3))
