"""Anonymous memory shared by the ranks of one host: no name in any folder, so nothing is left behind, even by SIGKILL.

The first rank makes a memory file and tells its peers process id and descriptor; they open it through /proc, which the
kernel allows to processes of the same user only. Unlike /dev/shm, its size is not bounded by a mount option that
containers set to 64 MiB.

ORDER. A writer fills a record, calls `fence`, then stores the record's word; a reader sees the word, calls `fence`,
then reads the record. x86 keeps these stores and loads in order by itself, aarch64 does not. Words are aligned and
written by one rank each, so a plain store never tears.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Callable

from overweave.errors import MachineError

_ADDRESS = struct.Struct("<qqq16s")  # process, descriptor, bytes, secret
_HEAD_BYTES = mmap.PAGESIZE  # holds the secret; what follows is aligned for anything
ADDRESS_BYTES = _ADDRESS.size

AllGatherBytes = Callable[[bytes], list[bytes]]


class SharedFile:
    """`size_bytes` of zeroed memory, mapped. `memory` is writable; `words` are its int64 words."""

    def __init__(self, descriptor: int, size_bytes: int, secret: bytes) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self._secret = secret
        self._map = mmap.mmap(descriptor, _HEAD_BYTES + size_bytes)
        self.memory = memoryview(self._map)[_HEAD_BYTES:]
        self.words = self.memory[: size_bytes // 8 * 8].cast("q")

    @classmethod
    def create(cls, size_bytes: int) -> SharedFile:
        """A new file. Raises OSError."""
        descriptor = os.memfd_create("overweave", os.MFD_CLOEXEC)
        secret = os.urandom(16)
        os.ftruncate(descriptor, _HEAD_BYTES + size_bytes)
        os.pwrite(descriptor, secret, 0)
        return cls(descriptor, size_bytes, secret)

    @classmethod
    def open(cls, address: bytes) -> SharedFile:
        """The file that a peer on this host told. Raises OSError where it is not to be reached."""
        process, descriptor, size_bytes, secret = _ADDRESS.unpack(address)
        own = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(own).st_size != _HEAD_BYTES + size_bytes or os.pread(own, 16, 0) != secret:
            os.close(own)
            raise OSError(f"process {process} of this host holds another file: the ranks are not on one host")
        return cls(own, size_bytes, secret)

    @property
    def address(self) -> bytes:
        """What peers need to open it."""
        return _ADDRESS.pack(os.getpid(), self.descriptor, self.size_bytes, self._secret)

    def forget_name(self) -> None:
        """Closes the descriptor: from now on the memory lives as long as its mappings, and nobody new can map it."""
        os.close(self.descriptor)
        self.descriptor = -1

    def __del__(self) -> None:
        if getattr(self, "descriptor", -1) >= 0:
            self.forget_name()


def share(rank: int, size_bytes: int, exchange: AllGatherBytes, prepare: Callable[[SharedFile], None]) -> SharedFile:
    """One file for all ranks, in two phases: either every rank has mapped and prepared it, or every rank raises.

    exchange: all-gathers at most 200 bytes. Raises MachineError, and what `exchange` raises.
    """
    shared, told = None, b""
    if rank == 0:
        try:
            shared = SharedFile.create(size_bytes)
            told = shared.address
        except OSError as error:
            told = b"!" + str(error).encode()[:180]
    address = exchange(told)[0]
    verdict = b""
    if address.startswith(b"!") and len(address) != ADDRESS_BYTES:
        verdict = address
    else:
        try:
            shared = shared or SharedFile.open(address)
            prepare(shared)
        except OSError as error:
            verdict = b"!" + str(error).encode()[:180]
    verdicts = exchange(verdict)
    for peer, found in enumerate(verdicts):
        if found:
            cure = "Run all ranks on one host, as one user, in one container, with memory to spare"
            raise MachineError(f"share {size_bytes} bytes among ranks", f"rank {peer}: {found[1:].decode()}", cure)
    assert shared is not None
    return shared


class Fence:
    """A full memory fence between the ranks: no load or store of this thread crosses it.

    release and acquire, in this order, are one too, for the one thread of a process that calls these, and quicker.
    """

    def __init__(self) -> None:
        self._lock, held = threading.Lock(), threading.Lock()
        held.acquire()
        self.release, self.acquire = held.release, held.acquire

    def __call__(self) -> None:
        # A release followed by an acquire of the same lock: STLR then LDAXR on aarch64, locked instructions on x86.
        with self._lock:
            pass
        with self._lock:
            pass
