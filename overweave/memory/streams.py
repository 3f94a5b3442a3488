"""The caller's streams, as objects that are made once for each: asking torch for the current one makes another."""

from __future__ import annotations

import torch


class Streams:
    """Those of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._index = device, device.index
        self._known: dict[int, torch.cuda.Stream] = {}

    def current(self) -> torch.cuda.Stream:
        """The stream that torch enqueues on. The same object for the same stream, whoever asks."""
        raw = torch._C._cuda_getCurrentRawStream(self._index)
        stream = self._known.get(raw)
        if stream is None:
            stream = self._known[raw] = self._made(raw)
        return stream

    def _made(self, raw: int) -> torch.cuda.Stream:
        # ExternalStream(0) is not the default stream but a new one from the pool.
        default = torch.cuda.default_stream(self._device)
        return default if raw == default.cuda_stream else torch.cuda.ExternalStream(raw, self._device)
