"""The board's memory: one record of int64 words and texts per rank, written by that rank only, and its file lock.

A file lock belongs to the process that took it, not to its children. The operating system drops it when the process
ends, even unreaped, and when that process closes *any* descriptor of the file: so the file stays open.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Collection
from hashlib import blake2b

from overweave.errors import MachineError

# The first rank creates a memory file and sends its peers process id and descriptor. They open it through /proc, which
# Linux allows to processes of the same user only. Unlike /dev/shm, its size is not bounded by a mount option that
# containers set to 64 MiB.
#
# ORDER. A writer fills a record, calls `fence`, then stores the record's word; a reader sees the word, calls `fence`,
# then reads the record. x86 keeps these stores and loads in order by itself, aarch64 does not. Words are aligned and
# written by one rank each, so a plain store never tears.

_ADDRESS = struct.Struct("<qqq8s16s")  # process, descriptor, bytes, digest of its ISLAND, secret
_HEAD_BYTES = mmap.PAGESIZE  # holds the secret; what follows is aligned for anything
ADDRESS_BYTES = _ADDRESS.size

AllGatherBytes = Callable[[bytes], list[bytes]]
ISLAND = "OVERWEAVE_ISLAND"  # a variable: processes that have unlike names in it map none of each other's memory


class OutOfReach(OSError):
    """A peer's memory cannot be mapped: the peer is on another host or island, in another container, or another's."""


def island_name() -> str:
    """Return the name that this process was given as its island; empty without one."""
    return os.environ.get(ISLAND, "")


def _digest_of_island() -> bytes:
    return blake2b(island_name().encode(), digest_size=8).digest()


class SharedFile:
    """`size_bytes` of zeroed memory, mapped. memory: its bytes, writable; words: the same as int64."""

    def __init__(self, descriptor: int, size_bytes: int, secret: bytes) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self._secret = secret
        self._map = mmap.mmap(descriptor, _HEAD_BYTES + size_bytes)
        self.memory = memoryview(self._map)[_HEAD_BYTES:]
        self.words = self.memory[: size_bytes // 8 * 8].cast("q")

    @classmethod
    def create(cls, size_bytes: int) -> SharedFile:
        """Create a new file. Raises OSError."""
        descriptor = os.memfd_create("overweave", os.MFD_CLOEXEC)
        secret = os.urandom(16)
        os.ftruncate(descriptor, _HEAD_BYTES + size_bytes)
        os.pwrite(descriptor, secret, 0)
        return cls(descriptor, size_bytes, secret)

    @classmethod
    def open(cls, address: bytes) -> SharedFile:
        """Map the file at a peer's `address`. Raises OutOfReach if the peer is not on this island, OSError."""
        process, descriptor, size_bytes, island, secret = _ADDRESS.unpack(address)
        if island != _digest_of_island():
            raise OutOfReach(f"{ISLAND} of process {process} is not {island_name()!r}, that of this one")
        try:
            own = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError, ProcessLookupError) as error:
            raise OutOfReach(str(error)) from error
        if os.fstat(own).st_size != _HEAD_BYTES + size_bytes or os.pread(own, 16, 0) != secret:
            os.close(own)
            raise OutOfReach(f"process {process} of this host holds another file: the ranks are not on one host")
        return cls(own, size_bytes, secret)

    @property
    def address(self) -> bytes:
        """Process id, descriptor, size, island and secret: what peers need to `open` the file."""
        return _ADDRESS.pack(os.getpid(), self.descriptor, self.size_bytes, _digest_of_island(), self._secret)

    def close_descriptor(self) -> None:
        """Close the descriptor: the memory lives as long as its mappings, and no other process can map it."""
        os.close(self.descriptor)
        self.descriptor = -1

    def __del__(self) -> None:
        if getattr(self, "descriptor", -1) >= 0:
            self.close_descriptor()


def create_shared_memory(rank: int, size_bytes: int, all_gather_bytes: AllGatherBytes, creator: int = 0) -> SharedFile:
    """Create one file for all ranks of an island. Collective: either every rank maps its own, or every rank raises.

    creator: the first rank of this one's island. all_gather_bytes: of all ranks of the group, at most 200 bytes. Raises
    MachineError, and what `all_gather_bytes` raises.
    """
    shared, message = None, b""
    if rank == creator:
        try:
            shared = SharedFile.create(size_bytes)
            message = shared.address
        except OSError as error:
            message = b"!" + str(error).encode()[:180]
    address = all_gather_bytes(message)[creator]
    failure = b""  # empty: this rank has mapped the file
    if address.startswith(b"!") and len(address) != ADDRESS_BYTES:
        failure = address
    else:
        try:
            shared = shared or SharedFile.open(address)
        except OSError as error:
            failure = b"!" + str(error).encode()[:180]
    for peer, message in enumerate(all_gather_bytes(failure)):
        if message:
            cure = "Run all ranks on one host, as one user, in one container, with memory to spare"
            raise MachineError(f"share {size_bytes} bytes among ranks", f"rank {peer}: {message[1:].decode()}", cure)
    assert shared is not None
    return shared


class Fence:
    """A full memory fence between the ranks: no load or store of this thread crosses it.

    `release()` followed by `acquire()` is a quicker fence, for one thread of the process only.
    """

    def __init__(self) -> None:
        self._lock, own_lock = threading.Lock(), threading.Lock()
        own_lock.acquire()
        self.release, self.acquire = own_lock.release, own_lock.acquire

    def __call__(self) -> None:
        # A release followed by an acquire of the same lock: STLR then LDAXR on aarch64, locked instructions on x86.
        with self._lock:
            pass
        with self._lock:
            pass


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
RECORD_BYTES = RECORD_WORDS * 8
# Words of an entry of the ring.
CALL, HASH, IS_NONBLOCKING, DIGEST, TEXT = range(5)

_LOCK_QUERY = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux


class Records:
    """Reads any rank's record, writes this rank's.

    words: the records of this island, one after the other, each in the place of its rank. start: index of this rank's
    first word. far: ranks of other islands; what is here of them are copies in this process (between_islands.py).
    has_far_process: whether the process of one of them exists.
    """

    def __init__(self, file: SharedFile, rank: int, far: Collection[int] = ()) -> None:
        self.fence = Fence()
        self._file, self.far = file, frozenset(far)
        self.has_far_process: Callable[[int], bool] = lambda rank: True
        self.words = file.words
        self.start = rank * RECORD_WORDS
        shared = (file.memory[at : at + RECORD_BYTES] for at in range(0, file.size_bytes, RECORD_BYTES))
        self._bytes = [memoryview(bytearray(RECORD_BYTES)) if at in self.far else one for at, one in enumerate(shared)]
        self._words = [each.cast("q") for each in self._bytes]

    def word(self, rank: int, index: int) -> int:
        """Return a word of any rank's record."""
        return self._words[rank][index]

    def put(self, index: int, value: int) -> None:
        """Store a word of this rank's record."""
        self.words[self.start + index] = value

    def data(self, rank: int, index: int, length: int) -> bytes:
        """Return bytes of any rank's record, from word `index` on."""
        return bytes(self._bytes[rank][index * 8 : index * 8 + length])

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
        if rank in self.far:
            return self.has_far_process(rank)
        query = _LOCK_QUERY.pack(fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        kind, *_ = _LOCK_QUERY.unpack(fcntl.fcntl(self._file.descriptor, fcntl.F_GETLK, query))
        return bool(kind != fcntl.F_UNLCK)

    def snapshot(self, rank: int) -> bytes:
        """Return a record as it is at one moment, but for the time of its heartbeat, which has no meaning elsewhere.

        No thread of this process writes meanwhile: the copy is made under the interpreter's lock.
        """
        copy = bytearray(self._bytes[rank])
        copy[HEARTBEAT_MS * 8 : (HEARTBEAT_MS + 1) * 8] = bytes(8)
        return bytes(copy)

    def receive(self, rank: int, snapshot: bytes) -> None:
        """Replace the copy of a far rank's record, at one moment, but for the time of its heartbeat."""
        heartbeat = slice(HEARTBEAT_MS * 8, (HEARTBEAT_MS + 1) * 8)
        copy = bytearray(snapshot)
        copy[heartbeat] = self._bytes[rank][heartbeat]
        self._bytes[rank][:] = copy

    def receive_heartbeat(self, rank: int, age_ms: int) -> None:
        """Note how long ago a far rank has last read the board."""
        self._words[rank][HEARTBEAT_MS] = now_ms() - age_ms


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
