"""The caller's streams, as objects that are made once for each: asking torch for the current one makes another."""

from __future__ import annotations

from functools import partial

import torch


class Streams(dict[int, torch.cuda.Stream]):
    """Those of one GPU, by their handles. handle: gives that of the stream that torch enqueues on."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.handle = partial(torch._C._cuda_getCurrentRawStream, device.index)

    def current(self) -> torch.cuda.Stream:
        """The stream that torch enqueues on. The same object for the same stream, whoever asks."""
        return self[self.handle()]

    def __missing__(self, handle: int) -> torch.cuda.Stream:
        # ExternalStream(0) is not the default stream but a new one from the pool.
        default = torch.cuda.default_stream(self._device)
        is_default = handle == default.cuda_stream
        return self.setdefault(handle, default if is_default else torch.cuda.ExternalStream(handle, self._device))
