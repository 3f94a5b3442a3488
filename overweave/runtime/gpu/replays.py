"""Calls whose tensors come back to the same places, kept as graphs: one launch of the host in place of many.

A loop hands an operator the same few addresses again and again. The second call with them is captured, as a caller
could have captured it, and launched as a graph from then on. Nothing else changes: calls are chained
and posted as ever, and words that grow live on the device (docs/design/0002-device-protocol.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from overweave.ir.plan import Plan
from overweave.ir.schedule import Collective

TensorAddresses = tuple[int, ...]  # addresses, and of tensors that are copied the allocations they lie in

MOST_GRAPHS = 64  # of one plan: a model of many layers calls one plan with the tensors of each
MOST_SEEN = 256
STALE_CALLS = 1024  # a graph that so many calls passed by makes way for another


class GraphMaker(Protocol):
    """Makes graphs (memory/cuda/captures.py)."""

    def graph(self, enqueue: Callable[[torch.cuda.Stream], None]) -> torch.cuda.CUDAGraph:
        """What `enqueue` puts on a stream."""


@dataclass
class _Kept:
    graph: torch.cuda.CUDAGraph
    last_call: int


def may_replay(plan: Plan) -> bool:
    """Whether calls of a plan may become graphs. A library's collectives are enqueued one by one, and so is what works
    on as many rows as a call's counts say."""
    has_collectives = any(isinstance(operation, Collective) for operation in plan.schedule.operations)
    return not has_collectives and plan.problem.has_fixed_sizes


class Replays:
    """The graphs of one plan, by the addresses of a call's tensors."""

    def __init__(self) -> None:
        self._kept: dict[TensorAddresses, _Kept] = {}
        self._seen: dict[TensorAddresses, None] = {}
        self._calls = 0

    def launch(
        self, places: TensorAddresses, captures: GraphMaker, enqueue: Callable[..., None], *given: object
    ) -> bool:
        """Launches the graph of a call with tensors at these places, once it has one; whether it had.

        enqueue: what the graph holds, of what is given and a stream.
        """
        graph = self.find(places)
        if graph is None:
            graph = self.add(places, partial(captures.graph, partial(enqueue, *given)))
            if graph is None:
                return False
        graph.replay()
        return True

    def find(self, places: TensorAddresses) -> torch.cuda.CUDAGraph | None:
        """The graph of a call with tensors at these places, if one is kept. Counts the call."""
        self._calls += 1
        kept = self._kept.get(places)
        if kept is None:
            return None
        kept.last_call = self._calls
        return kept.graph

    def add(self, places: TensorAddresses, capture: Callable[[], torch.cuda.CUDAGraph]) -> torch.cuda.CUDAGraph | None:
        """Where none is kept: captured now, if it is the second call with tensors at these places; None for the first.

        capture: makes it (memory/cuda/captures.py). A graph is made before its call begins: the driver may wait for
        running kernels until it has memory for one, and no peer's kernel may then wait for this call on all its SMs.
        """
        if not self._comes_back(places) or not self._has_room():
            return None
        return self._kept.setdefault(places, _Kept(capture(), self._calls)).graph

    def _comes_back(self, places: TensorAddresses) -> bool:
        if places in self._seen:
            return True
        if len(self._seen) >= MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        self._seen[places] = None
        return False

    def _has_room(self) -> bool:
        if len(self._kept) < MOST_GRAPHS:
            return True
        oldest = min(self._kept, key=lambda places: self._kept[places].last_call)
        if self._calls - self._kept[oldest].last_call < STALE_CALLS:
            return False
        del self._kept[oldest]
        return True
