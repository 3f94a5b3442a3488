"""Methods as captured CUDA graphs, as decoding runs them, without host time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from msgspec.structs import replace

from overweave.tuner.measure.timer import Effort

_R = TypeVar("_R")
SIGHTS = 2  # calls with the same tensors until an eager call becomes a graph (runtime/gpu/replays.py)
MOST_INPUT_SETS = 4  # input sets that samples alternate between
REPLAYED_ROWS = 512  # up to so many rows all methods are timed as captured graphs


def is_replayed(device: torch.device, m: int) -> bool:
    """Whether a problem of `m` rows is timed as captured graphs."""
    return device.type == "cuda" and m <= REPLAYED_ROWS


def with_graph_warmup(effort: Effort, device: torch.device) -> Effort:
    """Return the effort with enough warm-up rounds for our eager calls to become graphs."""
    if device.type != "cuda":
        return effort
    return replace(effort, warmup=max(effort.warmup, SIGHTS * MOST_INPUT_SETS))


def capture_graphs(call: Callable[[int], _R]) -> Callable[[int], _R]:
    """Return the method captured once for each set of inputs, on the current stream's device; a call replays one graph.

    Each set runs before it is captured: nothing may compile, allocate slots, make operands or agree with peers under
    capture. Results of a replay lie where the capture put them, until the next replay of that set. All graphs share one
    memory pool, as in one graph of many layers, so that temporary memory stays in the L2 cache.
    """
    for sample in range(MOST_INPUT_SETS):
        call(sample)
    torch.cuda.synchronize()
    graphs: list[tuple[torch.cuda.CUDAGraph, _R, Callable[[int], _R]]] = []  # the call owns what its graphs address
    for sample in range(MOST_INPUT_SETS):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=graphs[0][0].pool() if graphs else None):
            graphs.append((graph, call(sample), call))
    torch.cuda.synchronize()

    def replay(sample: int) -> _R:
        graph, result, _ = graphs[sample % MOST_INPUT_SETS]
        graph.replay()
        return result

    return replay
