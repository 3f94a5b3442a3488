"""A method as captured graphs: how decoding runs it, without the host in its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from msgspec.structs import replace

from overweave.tuner.measure.timer import Effort

_R = TypeVar("_R")
SIGHTS = 2  # of the same tensors, until an eager call with them is a graph (runtime/gpu/replays.py)
MOST_INPUT_SETS = 4  # that calls take by turns
REPLAYED_ROWS = 512  # up to here calls are timed as captured graphs, whatever computes them


def is_replayed(device: torch.device, m: int) -> bool:
    """Whether a problem of so many rows is timed as captured graphs."""
    return device.type == "cuda" and m <= REPLAYED_ROWS


def settled(effort: Effort, device: torch.device) -> Effort:
    """The effort with rounds enough before those that count for eager calls to be what they stay: graphs of ours."""
    if device.type != "cuda":
        return effort
    return replace(effort, warmup=max(effort.warmup, SIGHTS * MOST_INPUT_SETS))


def replayed(call: Callable[[int], _R]) -> Callable[[int], _R]:
    """The method captured once for each set of inputs, on the current stream's device; a call replays one graph.

    Each set runs before it is captured: nothing may compile, allocate slots, make operands or agree with peers under
    capture. Results of a replay lie where the capture put them, until the next replay of that set. What a call needs
    only while it runs lies at the same place in all graphs, as in one graph of many layers: else it would come from
    memory, not from the L2 cache.
    """
    for turn in range(MOST_INPUT_SETS):
        call(turn)
    torch.cuda.synchronize()
    kept: list[tuple[torch.cuda.CUDAGraph, _R, Callable[[int], _R]]] = []  # the call owns what its graphs address
    for turn in range(MOST_INPUT_SETS):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=kept[0][0].pool() if kept else None):
            kept.append((graph, call(turn), call))
    torch.cuda.synchronize()

    def replay(turn: int) -> _R:
        graph, result, _ = kept[turn % MOST_INPUT_SETS]
        graph.replay()
        return result

    return replay
