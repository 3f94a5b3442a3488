"""Anonymous memory shared by the ranks of one host: no name in any folder, so nothing is left behind, even by SIGKILL.

The first rank creates a memory file and sends its peers process id and descriptor. They open it through /proc, which
Linux allows to processes of the same user only. Unlike /dev/shm, its size is not bounded by a mount option that
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
        """Map the file at a peer's `address`. Raises OSError if it is not on this host."""
        process, descriptor, size_bytes, secret = _ADDRESS.unpack(address)
        own = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(own).st_size != _HEAD_BYTES + size_bytes or os.pread(own, 16, 0) != secret:
            os.close(own)
            raise OSError(f"process {process} of this host holds another file: the ranks are not on one host")
        return cls(own, size_bytes, secret)

    @property
    def address(self) -> bytes:
        """Process id, descriptor, size and secret: what peers need to `open` the file."""
        return _ADDRESS.pack(os.getpid(), self.descriptor, self.size_bytes, self._secret)

    def close_descriptor(self) -> None:
        """Close the descriptor: the memory lives as long as its mappings, and no other process can map it."""
        os.close(self.descriptor)
        self.descriptor = -1

    def __del__(self) -> None:
        if getattr(self, "descriptor", -1) >= 0:
            self.close_descriptor()


def create_shared_memory(
    rank: int, size_bytes: int, all_gather_bytes: AllGatherBytes, on_mapped: Callable[[SharedFile], None]
) -> SharedFile:
    """Create one file for all ranks. Collective: either every rank maps it and runs `on_mapped`, or every rank raises.

    all_gather_bytes: of at most 200 bytes. Raises MachineError, and what `all_gather_bytes` raises.
    """
    shared, message = None, b""
    if rank == 0:
        try:
            shared = SharedFile.create(size_bytes)
            message = shared.address
        except OSError as error:
            message = b"!" + str(error).encode()[:180]
    address = all_gather_bytes(message)[0]
    failure = b""  # empty: this rank has mapped the file
    if address.startswith(b"!") and len(address) != ADDRESS_BYTES:
        failure = address
    else:
        try:
            shared = shared or SharedFile.open(address)
            on_mapped(shared)
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
