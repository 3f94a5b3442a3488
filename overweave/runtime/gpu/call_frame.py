"""The frame of every call on a GPU: chained behind the call before it, with fork and join of its side streams.

A subclass or the bound plan decides what runs: a plan with or without an author's kernel, packed messages, or kernels
fused by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch

from overweave.memory.cuda import driver
from overweave.memory.cuda.workspace import Workspace
from overweave.runtime.gpu.replays import Replays, TensorAddresses

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
            addresses = {}
            for name, tensor in tensors.items():  # quicker than a comprehension, which is a function of its own
                addresses[name] = tensor.data_ptr()
        if torch.cuda.is_current_stream_capturing():
            self._keep_alive()
            self._enqueue(tensors, addresses, workspace.current_stream())
            return
        key: TensorAddresses = tuple(addresses.values())
        for name in self._copied:
            key += (driver.allocation_id(addresses[name]),)
        with workspace.chain.lock:
            stream = workspace.enter()
            arguments: tuple[Any, ...] = (tensors, addresses)
            if not (self._may_replay and self._replays.launch(key, workspace.captures, self._enqueue, *arguments)):
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
