"""The caller's streams, as objects that are made once for each: asking torch for the current one makes another."""

from __future__ import annotations

import threading
from functools import partial
from typing import ClassVar

import torch

from overweave.compat.torch_names import cuda_getCurrentRawStream


class Streams(dict[int, torch.cuda.Stream]):
    """Those of one GPU, by their handles. handle: gives that of the stream that torch enqueues on."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.handle = partial(cuda_getCurrentRawStream, device.index)

    def current(self) -> torch.cuda.Stream:
        """The stream that torch enqueues on. The same object for the same stream, whoever asks."""
        return self[self.handle()]

    def __missing__(self, handle: int) -> torch.cuda.Stream:
        # ExternalStream(0) is not the default stream but a new one from the pool.
        default = torch.cuda.default_stream(self._device)
        is_default = handle == default.cuda_stream
        return self.setdefault(handle, default if is_default else torch.cuda.ExternalStream(handle, self._device))


# The calls of one GPU, of whatever group, one behind the other.
#
# A call's kernels may hold every SM while they wait for peers. Two calls side by side could each do so on one rank, and
# wait for what the other keeps from its SMs there. One call at a time, in an order that all ranks share, ends: it waits
# for what peers do in the same call, and nothing else of ours stands in their way. So a call of another group, or on
# another stream, begins on the device after the one before it (docs/design/0002-device-protocol.md).


class Chain:
    """Of one GPU; `Chain.of` keeps one per device.

    turn: held by a thread while it enqueues a call, from where that enters the chain until it is a link of it.
    last_stream, last_call: where the last one ran, and the event behind it. streams: those of callers.
    """

    _of: ClassVar[dict[torch.device, Chain]] = {}

    def __init__(self, device: torch.device) -> None:
        self.turn = threading.RLock()
        self.streams = Streams(device)
        self.last_stream: torch.cuda.Stream | None = None
        self.last_call: torch.cuda.Event | None = None

    @classmethod
    def of(cls, device: torch.device) -> Chain:
        """The one of a GPU of this process."""
        return cls._of.setdefault(device, cls(device))
