"""Memory that every GPU of a group can address: the only module that touches torch's symmetric memory (alpha).

Everything is unicast: on shared hosts multicast can put the GPUs out of service, and no protocol here needs it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
import torch.distributed as dist

from overweave.compat.torch_names import symmetric_memory
from overweave.errors import MachineError
from overweave.hardware.multicast import BY_TORCH, WITHOUT
from overweave.memory.board.board import Board
from overweave.memory.cuda.streams import Captures, Streams
from overweave.memory.group import Group, OfGroup, subgroup

YES, NO = b"yes", b"no"
_AGREED = OfGroup[dict[torch.device, bool]]()


@lru_cache
def has_peer_access(device: torch.device) -> bool:
    """Return whether a GPU and every other one that this process sees have peer access; True if it sees one alone."""
    return can_access_peers(_index(device), range(torch.cuda.device_count()))


def group_has_peer_access(group: Group, device: torch.device) -> bool:
    """Return whether all GPUs of a group have peer access, as `islands_have_peer_access`. Ranks of several islands have
    none."""
    return group.world_size == 1 or (islands_have_peer_access(group, device) and Board.of(group).islands.is_one)


def islands_have_peer_access(group: Group, device: torch.device) -> bool:
    """Return whether the GPUs of each island have peer access, the same on every rank. The first call is collective.

    Each rank checks its own GPU against those of its island that it sees; one no decides. Raises RankMismatch on every
    rank if one makes another call, and PeerError.
    """
    if group.world_size == 1:
        return True
    known = _AGREED.setdefault(group.process_group, {})
    if device not in known:
        board = Board.of(group)
        board.agree(b"what memory the GPUs of the group reach")
        uuids = board.all_gather_bytes(_uuid(_index(device)))
        inside = [uuids[rank] for rank in board.islands.of(group.rank)]
        peers = [index for index in range(torch.cuda.device_count()) if _uuid(index) in inside]
        known[device] = NO not in board.all_gather_bytes(YES if can_access_peers(_index(device), peers) else NO)
    return known[device]


def can_access_peers(own: int, others: Iterable[int]) -> bool:
    """Return whether a GPU has peer access to all others, and they to it."""
    can_access = torch.cuda.can_device_access_peer
    return all(can_access(own, other) and can_access(other, own) for other in others if other != own)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _uuid(index: int) -> bytes:
    """Return a GPU's UUID, the same in all processes, whatever its index there."""
    return str(torch.cuda.get_device_properties(index).uuid).encode()


OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # without it torch maps no memory between ranks of one GPU
SMS_FOR_COPIES = 8


def sms_for_copies() -> int:
    """Return how many SMs waiting kernels leave free: SMs run the copies between ranks that share a GPU.

    Between GPUs a copy engine runs the copies: 0.
    """
    return SMS_FOR_COPIES if os.environ.get(OVERLAPPING) == "1" else 0


class _Unicast:
    """A context in which torch's rendezvous creates no multicast objects, on any thread.

    SOURCE: torch reads the environment at each rendezvous, and nothing else (`device_has_multicast_support` in
    CUDASymmetricMemoryUtils.cpp, 2.9 to 2.15), and creates one only if every rank of the group may. No lock is held
    inside: threads may rendezvous for several groups in any order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active = 0
        self._saved_value: str | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._active:
                self._saved_value = os.environ.get(BY_TORCH)
                self._set(WITHOUT[BY_TORCH])
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1
                if not self._active:
                    self._set(self._saved_value)

    @staticmethod
    def _set(value: str | None) -> None:
        """Set the variable only if it differs: C code of other threads may be reading the environment."""
        if value is None:
            os.environ.pop(BY_TORCH, None)
        elif os.environ.get(BY_TORCH) != value:
            os.environ[BY_TORCH] = value


_unicast = _Unicast()


class CudaHeap:
    """`size_bytes` zeroed bytes on the GPU of every rank of a group. Collective: all ranks allocate in one order.

    tensor: this rank's part, uint8 `[size_bytes]`. addresses: of each rank's part, in this rank's address space.
    """

    def __init__(self, group: Group, device: torch.device, size_bytes: int) -> None:
        if group.world_size > 1:
            Board.of(group).islands.require_one(f"symmetric memory of {size_bytes} bytes for group {group.name}")
        self._allocate(group, device, size_bytes)

    def _allocate(self, group: Group, device: torch.device, size_bytes: int) -> None:
        try:
            self.tensor: torch.Tensor = symmetric_memory.empty(size_bytes, dtype=torch.uint8, device=device)
            with _unicast():
                self._handle = symmetric_memory.rendezvous(self.tensor, group.process_group)
        except RuntimeError as error:
            raise MachineError(
                f"symmetric memory of {size_bytes} bytes for group {group.name}",
                f"torch could not map it between the GPUs: {error}",
                "All ranks need peer access over NVLink on one host; `overweave doctor` checks it",
            ) from error
        self.addresses: tuple[int, ...] = tuple(self._handle.buffer_ptrs)
        # Zeroed and visible everywhere before any peer may write. SOURCE: pytorch #196546.
        self.tensor.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group.process_group)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a row-major tensor in this rank's part, `offset` bytes from its start."""
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        return self.tensor[offset : offset + size].view(dtype).view(shape)


class IslandHeap(CudaHeap):
    """Memory that every GPU of an island can address, for plans of which NCCL moves what crosses between islands.

    addresses: of ranks of other islands, this rank's own.
    """

    def __init__(self, group: Group, device: torch.device, size_bytes: int) -> None:
        island = Board.of(group).islands.of(group.rank)
        self._allocate(subgroup(group, island), device, size_bytes)
        starts = dict(zip(island, self.addresses, strict=True))
        self.addresses = tuple(starts.get(rank, starts[group.rank]) for rank in range(group.world_size))


class OwnHeap(CudaHeap):
    """Memory of this GPU alone, for plans that move rows by NCCL where GPUs have no peer access.

    addresses: this rank's own, once for each rank.
    """

    def __init__(self, group: Group, device: torch.device, size_bytes: int) -> None:
        self.tensor = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        self.addresses = (self.tensor.data_ptr(),) * group.world_size
        torch.cuda.synchronize(device)


def allocate_heap(group: Group, device: torch.device, size_bytes: int) -> CudaHeap:
    """Allocate memory for the calls of a group: symmetric among GPUs of an island that have peer access, else local.
    Collective."""
    if group_has_peer_access(group, device):
        return CudaHeap(group, device, size_bytes)
    return (IslandHeap if _reaches_island(group, device) else OwnHeap)(group, device, size_bytes)


def _reaches_island(group: Group, device: torch.device) -> bool:
    """Whether this rank shares memory with others of its island, but not with all of the group."""
    if group.world_size == 1 or not islands_have_peer_access(group, device):
        return False
    return 1 < len(Board.of(group).islands.of(group.rank)) < group.world_size


class Scratch:
    """Scratch memory as large as the largest call that was ever bound; its contents belong to the call that runs.

    heap: the current memory; a captured graph keeps the heap of its capture alive. captures: captures the graphs of
    calls. current_stream: returns the caller's stream.
    """

    heap: CudaHeap

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self.captures, self.current_stream = Captures(device, None), Streams(device).current
        self._size_bytes = 0
        self._last: torch.cuda.Stream | None = None

    @classmethod
    def of(cls, group: Group, device: torch.device) -> Scratch:
        """Return the scratch memory of a group on this rank's device."""
        known = _SCRATCH.setdefault(group.process_group, {})
        if device not in known:
            known[device] = cls(group, device)
        return known[device]

    def reserve(self, size_bytes: int) -> None:
        """Grow to calls of this size. Collective: all ranks reserve the same, in the same order."""
        if size_bytes > self._size_bytes:
            self._size_bytes = 1 << (size_bytes - 1).bit_length()  # in few steps: each is a rendezvous
            # Allocation synchronizes every rank's GPU, and the old heap is freed behind it: no peer still reads that.
            self.heap = CudaHeap(self._group, self._device, self._size_bytes)

    def enter(self, stream: torch.cuda.Stream) -> CudaHeap:
        """Make this stream wait for the last call's stream; return the heap for a call on it. Not under capture."""
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream
        return self.heap


_SCRATCH = OfGroup[dict[torch.device, Scratch]]()
