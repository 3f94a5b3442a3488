"""A routing on this process's GPU: one launch."""

from __future__ import annotations

import torch

from overweave.runtime.kernel_calls.routing import Meeting, RoutingSizes, route_call

_MEETINGS: dict[tuple[torch.device, int], Meeting] = {}
_SPARE: dict[torch.device, list[Meeting]] = {}  # of graphs to come
_OF_GRAPHS: list[Meeting] = []  # kept, as graphs hold addresses alone
SPARE = 64


def route(ids: torch.Tensor, words: torch.Tensor, sizes: RoutingSizes) -> None:
    """Fill the tables on the current stream."""
    with torch.cuda.device(ids.device):
        call = route_call(ids, words, sizes, _meeting(ids.device))
        call.kernel[(call.programs,)](*call.arguments, **call.options)


def _meeting(device: torch.device) -> Meeting:
    """Where launches of the current stream meet: they follow one another. Each launch in a graph, which any stream may
    replay, has a meeting of its own: a spare one, or one that the graph makes at each replay.
    """
    if torch.cuda.is_current_stream_capturing():
        spare = _SPARE.get(device)
        if not spare:
            return Meeting.on(device)
        _OF_GRAPHS.append(spare.pop())
        return _OF_GRAPHS[-1]
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _MEETINGS:
        _MEETINGS[key] = Meeting.on(device)
        _SPARE.setdefault(device, Meeting.several(device, SPARE))
    return _MEETINGS[key]
