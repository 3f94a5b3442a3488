"""A routing on this process's GPU: one launch."""

from __future__ import annotations

import torch

from overweave.runtime.kernel_calls.routing import Meeting, RoutingSizes, route_call

_MEETINGS: dict[tuple[torch.device, int], Meeting] = {}


def route(ids: torch.Tensor, starts: torch.Tensor | None, words: torch.Tensor, sizes: RoutingSizes) -> None:
    """Fill the tables on the current stream."""
    with torch.cuda.device(ids.device):
        call = route_call(ids, starts, words, sizes, _meeting(ids.device))
        call.kernel[(call.programs,)](*call.arguments, **call.options)


def _meeting(device: torch.device) -> Meeting:
    """Where launches of the current stream meet: they follow one another. A graph, which any stream may replay, has a
    word of its own, and makes it zero.
    """
    if torch.cuda.is_current_stream_capturing():
        return Meeting.on(device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _MEETINGS:
        _MEETINGS[key] = Meeting.on(device)
    return _MEETINGS[key]
