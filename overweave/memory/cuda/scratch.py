"""Symmetric memory that the calls of a group use one after the other: the operand of torch's own all-reduce kernels."""

from __future__ import annotations

import atexit
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup

from overweave.memory.cuda.heap import CudaHeap
from overweave.memory.cuda.streams import Captures, Streams
from overweave.memory.group import Group

_OF_GROUP: WeakKeyDictionary[ProcessGroup, dict[torch.device, Scratch]] = WeakKeyDictionary()
atexit.register(_OF_GROUP.clear)  # a process group must not outlive the interpreter


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
        known = _OF_GROUP.setdefault(group.process_group, {})
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
        """Return the heap for a call on this stream, which waits for the last call's stream. Not under capture."""
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream
        return self.heap
