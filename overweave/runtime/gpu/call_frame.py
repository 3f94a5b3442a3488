"""The frame of every call on a GPU: chained behind the call before it, with fork and join of its side streams.

A subclass or the bound plan decides what runs: a plan with or without an author's kernel, packed messages, or kernels
fused by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from overweave.ir.plan import Plan
from overweave.ir.schedule import Collective
from overweave.memory.cuda import driver
from overweave.memory.cuda.streams import Captures
from overweave.memory.cuda.workspace import Workspace

# A loop calls an operator with the same few addresses again and again. The second call with them is captured, as a
# caller could have captured it, and launched as a graph from then on. Calls are chained and posted as before, and words
# that grow live on the device (docs/design/0002-device-protocol.md).

TensorAddresses = tuple[int, ...]  # addresses, and of tensors that are copied the allocations they lie in

MOST_GRAPHS = 64  # of one plan: a model of many layers calls one plan with the tensors of each
MOST_SEEN = 256
STALE_CALLS = 1024  # a graph that was not launched in so many calls may be replaced


@dataclass
class _CachedGraph:
    graph: torch.cuda.CUDAGraph
    last_call: int


def may_replay(plan: Plan) -> bool:
    """Return whether calls of a plan may become graphs: it has no NCCL collectives, and no counts, which set sizes."""
    has_collectives = any(isinstance(operation, Collective) for operation in plan.schedule.operations)
    return not has_collectives and plan.problem.has_fixed_sizes


class Replays:
    """The graphs of one plan.

    _graphs: addresses of a call's tensors -> graph. _seen: addresses of calls that have no graph yet.
    """

    def __init__(self) -> None:
        self._graphs: dict[TensorAddresses, _CachedGraph] = {}
        self._seen: dict[TensorAddresses, None] = {}
        self._calls = 0

    def launch(
        self, addresses: TensorAddresses, captures: Captures, enqueue: Callable[..., None], *arguments: object
    ) -> bool:
        """Launch the graph of a call with these addresses, or capture it at the second call. Return whether it has one.

        enqueue: puts the call on a stream, its last argument.
        """
        graph = self.find(addresses)
        if graph is None:
            graph = self.add(addresses, partial(captures.graph, partial(enqueue, *arguments)))
            if graph is None:
                return False
        graph.replay()
        return True

    def find(self, addresses: TensorAddresses) -> torch.cuda.CUDAGraph | None:
        """Return the graph of a call with these addresses; None if there is none. Counts the call."""
        self._calls += 1
        cached = self._graphs.get(addresses)
        if cached is None:
            return None
        cached.last_call = self._calls
        return cached.graph

    def add(
        self, addresses: TensorAddresses, capture: Callable[[], torch.cuda.CUDAGraph]
    ) -> torch.cuda.CUDAGraph | None:
        """Capture the graph if this is the second call with these addresses; return None at the first.

        capture: captures it (memory/cuda/streams.py), before its call begins: the driver may wait for running kernels
        until it has memory for a graph, and no peer's kernels may wait for this call on all SMs meanwhile.
        """
        if not self._is_repeated(addresses) or not self._has_room():
            return None
        return self._graphs.setdefault(addresses, _CachedGraph(capture(), self._calls)).graph

    def _is_repeated(self, addresses: TensorAddresses) -> bool:
        """Return whether a call with these addresses was seen before; remember them."""
        if addresses in self._seen:
            return True
        if len(self._seen) >= MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        self._seen[addresses] = None
        return False

    def _has_room(self) -> bool:
        """Return whether a graph can be added; drop the least recently launched one if it is stale."""
        if len(self._graphs) < MOST_GRAPHS:
            return True
        oldest = min(self._graphs, key=lambda addresses: self._graphs[addresses].last_call)
        if self._calls - self._graphs[oldest].last_call < STALE_CALLS:
            return False
        del self._graphs[oldest]
        return True


Stream = torch.cuda.Stream


class CallFrame:
    """Calls on a workspace.

    was_captured: a graph of the caller's uses this object's memory: so the workspace keeps it alive. allocated_outputs:
    none, its outputs are passed to it.
    """

    was_captured = False
    allocated_outputs: frozenset[str] = frozenset()

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._begun, self._done = torch.cuda.Event(), torch.cuda.Event()

    def run_call(self, work: Callable[[Stream, bool], None]) -> None:
        """Run one call on the caller's stream. work: enqueues it; the second argument: whether under capture.

        A captured call is not chained: the launches of its graph are.
        """
        workspace = self._workspace
        if torch.cuda.is_current_stream_capturing():
            self._keep_alive()
            work(workspace.current_stream(), True)
            return
        with workspace.chain.lock:
            stream = workspace.enter()
            work(stream, False)
            workspace.leave(stream)

    def _keep_alive(self) -> None:
        if not self.was_captured:
            self.was_captured = True
            self._workspace.captured_runs.append(self)

    def fork(self, stream: Stream, sides: Collection[Stream]) -> None:
        """Make the side streams wait for the caller's stream."""
        self._begun.record(stream)
        for side in sides:
            side.wait_event(self._begun)

    def join(self, stream: Stream, sides: Collection[Stream]) -> None:
        """Make the caller's stream wait for the side streams."""
        for side in sides:
            self._done.record(side)
            stream.wait_event(self._done)


class Launchable(Protocol):
    """A plan bound to memory. launch_prologue: launches the prologue of a call; None without. enqueue: one function for
    each action, of a stream, the call's tensors and their addresses. prepare: creates copy graphs before a call begins.
    copied: the tensors that a graph refers to by allocation, not by address alone."""

    @property
    def launch_prologue(self) -> Callable[[int], None] | None: ...

    @property
    def enqueue(self) -> tuple[Callable[..., None], ...]: ...

    @property
    def copied(self) -> tuple[str, ...]: ...

    @property
    def prepare(self) -> Callable[[dict[str, int]], None] | None: ...


Bound = TypeVar("Bound", bound=Launchable)


class PlanRun(CallFrame, Generic[Bound]):
    """Calls of a bound plan, launched as graphs once their tensors recur. Raises PeerError if an earlier call failed.

    sides: queues that run on side streams. may_replay: whether a call may become a graph.
    """

    def __init__(self, workspace: Workspace, bound: Bound, sides: Iterable[str], may_replay: bool) -> None:
        super().__init__(workspace)
        self.bound, self._may_replay, self._replays, self._copied = bound, may_replay, Replays(), bound.copied
        self._sides = [workspace.stream(queue) for queue in dict.fromkeys(sides)]

    def __call__(self, tensors: Mapping[str, torch.Tensor], addresses: dict[str, int] | None = None) -> None:
        """Enqueue the plan once on the current stream; under capture it is captured. tensors: by buffer name, shaped
        as the plan's problem says. addresses: of the tensors, and of the author's arguments."""

        # Most calls come through here: `run_call` inlined, without closures (campaigns/host/host_path.py counts).
        workspace = self._workspace
        if addresses is None:
            addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        if torch.cuda.is_current_stream_capturing():
            self._keep_alive()
            self._enqueue(tensors, addresses, workspace.current_stream())
            return
        places: TensorAddresses = tuple(addresses.values())
        for name in self._copied:
            places += (driver.allocation_id(addresses[name]),)
        with workspace.chain.lock:
            stream = workspace.enter()
            arguments: tuple[Any, ...] = (tensors, addresses)
            if not (self._may_replay and self._replays.launch(places, workspace.captures, self._enqueue, *arguments)):
                if self.bound.prepare is not None:
                    self.bound.prepare(addresses)
                self._enqueue(tensors, addresses, stream)
            workspace.leave(stream)

    def _enqueue(self, tensors: Mapping[str, torch.Tensor], addresses: dict[str, int], stream: Stream) -> None:
        """Enqueue prologue, fork, all actions and join on a stream."""
        bound, sides = self.bound, self._sides
        if bound.launch_prologue is not None:
            bound.launch_prologue(stream.cuda_stream)
        if sides:
            self.fork(stream, sides)
        for enqueue in bound.enqueue:
            enqueue(stream, tensors, addresses)
        if sides:
            self.join(stream, sides)
