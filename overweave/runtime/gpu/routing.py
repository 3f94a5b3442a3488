"""Launches the routing kernel on this process's GPU."""

from __future__ import annotations

import torch

from overweave.runtime.kernel_calls.routing import GridBarrier, RoutingSizes, route_call

_BARRIERS: dict[tuple[torch.device, int], GridBarrier] = {}
_SPARE: dict[torch.device, list[GridBarrier]] = {}  # for future graphs
_OF_GRAPHS: list[GridBarrier] = []  # kept alive: graphs hold addresses alone
SPARE = 64


def route(ids: torch.Tensor, words: torch.Tensor, sizes: RoutingSizes) -> None:
    """Fill the tables of a routing on the current stream."""
    with torch.cuda.device(ids.device):
        call = route_call(ids, words, sizes, _barrier(ids.device))
        call.kernel[(call.programs,)](*call.arguments, **call.options)


def _barrier(device: torch.device) -> GridBarrier:
    """Return the grid barrier of launches on the current stream, which follow one another.

    Each captured launch gets its own, since any stream may replay the graph: a spare one, or one that the graph
    allocates at each replay.
    """
    if torch.cuda.is_current_stream_capturing():
        spare = _SPARE.get(device)
        if not spare:
            return GridBarrier.on(device)
        _OF_GRAPHS.append(spare.pop())
        return _OF_GRAPHS[-1]
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _BARRIERS:
        _BARRIERS[key] = GridBarrier.on(device)
        _SPARE.setdefault(device, GridBarrier.several(device, SPARE))
    return _BARRIERS[key]
