"""The frame of every call on a GPU: chained behind the one before it, work beside it begun and ended with it.

What runs is the affair of what is bound: a plan with or without an author's kernel, packed messages, or, of those who
derive from the frame, kernels fused by hand.
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

    was_captured: a graph of the caller's holds what this owns, and replays it as long as it lives: so the workspace
    keeps it, whoever made it and drops it. makes: no results, which are given to it.
    """

    was_captured = False
    makes: frozenset[str] = frozenset()

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._begun, self._done = torch.cuda.Event(), torch.cuda.Event()

    def run_call(self, work: Callable[[Stream, bool], None]) -> None:
        """One call on the caller's stream. work: enqueues it there; True where the stream is being captured: then
        nothing chains it, as its graph is."""
        workspace = self._workspace
        if torch.cuda.is_current_stream_capturing():
            self._keep()
            work(workspace.current_stream(), True)
            return
        with workspace.chain.lock:
            stream = workspace.enter()
            work(stream, False)
            workspace.leave(stream)

    def _keep(self) -> None:
        if not self.was_captured:
            self.was_captured = True
            self._workspace.captured_runs.append(self)

    def fork(self, stream: Stream, sides: Collection[Stream]) -> None:
        """What is put on side streams from now on starts behind what is on the caller's."""
        self._begun.record(stream)
        for side in sides:
            side.wait_event(self._begun)

    def join(self, stream: Stream, sides: Collection[Stream]) -> None:
        """What is put on the caller's stream from now on starts behind what is on side streams."""
        for side in sides:
            self._done.record(side)
            stream.wait_event(self._done)


class Launchable(Protocol):
    """A plan bound to memory. begin: the head of a call, if it has one. enqueue: what each of its actions does, given a
    stream, the tensors of the call and their addresses. prepare: makes what may not be made once a call has begun.
    copied: the tensors whose allocation a graph of the call knows."""

    @property
    def begin(self) -> Callable[[int], None] | None: ...

    @property
    def enqueue(self) -> tuple[Callable[..., None], ...]: ...

    @property
    def copied(self) -> tuple[str, ...]: ...

    @property
    def prepare(self) -> Callable[[dict[str, int]], None] | None: ...


Bound = TypeVar("Bound", bound=Launchable)


class PlanRun(CallFrame, Generic[Bound]):
    """Calls of a bound plan, launched as graphs once their tensors come back. Raises PeerError for what went wrong in
    an earlier call.

    sides: queues that run on streams of their own. may_replay: whether a call may become a graph.
    """

    def __init__(self, workspace: Workspace, bound: Bound, sides: Iterable[str], may_replay: bool) -> None:
        super().__init__(workspace)
        self.bound, self._may_replay, self._replays, self._copied = bound, may_replay, Replays(), bound.copied
        self._sides = [workspace.stream(queue) for queue in dict.fromkeys(sides)]

    def __call__(self, tensors: Mapping[str, torch.Tensor], addresses: dict[str, int] | None = None) -> None:
        """Enqueues the plan once on the current stream; under capture it is captured. tensors: by buffer name, shaped
        as the plan's problem says. addresses: theirs, and those of what else moves from call to call."""

        # Most calls come through here: `run_call`, with nothing made on the way (campaigns/host/host_path.py counts).
        workspace = self._workspace
        if addresses is None:
            addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        if torch.cuda.is_current_stream_capturing():
            self._keep()
            self._enqueue(tensors, addresses, workspace.current_stream())
            return
        places: TensorAddresses = tuple(addresses.values())
        for name in self._copied:
            places += (driver.allocation_id(addresses[name]),)
        with workspace.chain.lock:
            stream = workspace.enter()
            given: tuple[Any, ...] = (tensors, addresses)
            if not (self._may_replay and self._replays.launch(places, workspace.captures, self._enqueue, *given)):
                if self.bound.prepare is not None:
                    self.bound.prepare(addresses)
                self._enqueue(tensors, addresses, stream)
            workspace.leave(stream)

    def _enqueue(self, tensors: Mapping[str, torch.Tensor], addresses: dict[str, int], stream: Stream) -> None:
        bound, sides = self.bound, self._sides
        if bound.begin is not None:
            bound.begin(stream.cuda_stream)
        if sides:
            self.fork(stream, sides)
        for enqueue in bound.enqueue:
            enqueue(stream, tensors, addresses)
        if sides:
            self.join(stream, sides)
