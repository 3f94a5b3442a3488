"""Symmetric memory that the calls of a group use one after the other: what torch's own all-reduces sum lies there."""

from __future__ import annotations

import atexit
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup

from overweave.memory.cuda.captures import Captures
from overweave.memory.cuda.heap import CudaHeap
from overweave.memory.cuda.streams import Streams
from overweave.memory.group import Group

_OF_GROUP: WeakKeyDictionary[ProcessGroup, dict[torch.device, Scratch]] = WeakKeyDictionary()
atexit.register(_OF_GROUP.clear)  # a process group must not outlive the interpreter


class Scratch:
    """As large as the largest call that was ever bound; what is in it belongs to the call that runs.

    heap: where it lies now. Whoever holds its addresses, as a captured graph does, keeps the heap it was given.
    captures: makes the graphs of its calls, which follow each other as they do. current_stream: gives the caller's.
    """

    heap: CudaHeap

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self.captures, self.current_stream = Captures(device, None), Streams(device).current
        self._size_bytes = 0
        self._last: torch.cuda.Stream | None = None

    @classmethod
    def of(cls, group: Group, device: torch.device) -> Scratch:
        """The one of a group on this rank's device."""
        known = _OF_GROUP.setdefault(group.process_group, {})
        if device not in known:
            known[device] = cls(group, device)
        return known[device]

    def reserve(self, size_bytes: int) -> None:
        """Has room for calls of this size. Collective: all ranks reserve the same, in the same order."""
        if size_bytes > self._size_bytes:
            self._size_bytes = 1 << (size_bytes - 1).bit_length()  # in few steps: each is a rendezvous
            # Built before the old one goes, and only when every rank's GPU is idle: no peer still reads that.
            self.heap = CudaHeap(self._group, self._device, self._size_bytes)

    def enter(self, stream: torch.cuda.Stream) -> CudaHeap:
        """The heap for a call on this stream, behind the last one if that ran on another. Not under capture."""
        if self._last is not None and self._last != stream:
            stream.wait_stream(self._last)
        self._last = stream
        return self.heap
