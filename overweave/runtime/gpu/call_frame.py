"""The frame of every call on a GPU: chained behind the one before it, work beside it begun and ended with it.

What runs is the affair of those who derive from it: a plan, a compiled kernel, kernels fused by hand, packed messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from overweave.memory.cuda.workspace import Workspace
from overweave.runtime.gpu.replays import Places, Replays

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
        with workspace.chain.turn:
            stream = workspace.enter()
            work(stream, False)
            workspace.leave(stream)

    def _keep(self) -> None:
        if not self.was_captured:
            self.was_captured = True
            self._workspace.captured.append(self)

    def run_beside(
        self,
        stream: Stream,
        sides: Collection[Stream],
        begin: Callable[[int], None],
        work: Callable[[], None],
    ) -> None:
        """The head of a call, then its work: what that puts on side streams starts behind the head, and ends with the
        call."""
        begin(stream.cuda_stream)
        if sides:
            self._begun.record(stream)
        for side in sides:
            side.wait_event(self._begun)
        work()
        for side in sides:
            self._done.record(side)
            stream.wait_event(self._done)


class BoundCall(Protocol):
    """What is bound to one slot of a workspace. enqueue: what each action of a call does, given a stream and what the
    call is of; begin: the head."""

    replays: Replays

    @property
    def begin(self) -> Callable[[int], None]: ...

    @property
    def enqueue(self) -> tuple[Callable[..., None], ...]: ...

    def prepare(self, addresses: dict[str, int]) -> None: ...


Slot = TypeVar("Slot", bound=BoundCall)


class SlotCalls(CallFrame, Generic[Slot]):
    """Calls that take turns in the slots of a workspace, launched as graphs once their tensors come back.

    slot: the one that the last call ran in. may_replay: whether a call may become a graph.
    """

    slot: Slot

    def __init__(self, workspace: Workspace, slots: Sequence[Slot], sides: Iterable[str], may_replay: bool) -> None:
        """sides: queues that run on streams of their own."""
        super().__init__(workspace)
        self._slots, self._may_replay = slots, may_replay
        self._sides = [workspace.stream(queue) for queue in dict.fromkeys(sides)]

    def run_in_turn(
        self,
        places: Places,
        addresses: dict[str, int],
        given: tuple[Any, ...],
    ) -> None:
        """One call in the next slot. places: of all its tensors; addresses: of those that copies name. given: what the
        actions take beside a stream."""

        # Most calls come through here: `run_call`, with nothing made on the way (campaigns/host/host_path.py counts).
        workspace = self._workspace
        if torch.cuda.is_current_stream_capturing():
            self._keep()
            slot = self.slot = self._slots[workspace.take_turn()]
            self._enqueue(slot, given, workspace.current_stream())
            return
        with workspace.chain.turn:
            stream = workspace.enter()
            slot = self.slot = self._slots[workspace.take_turn()]
            if not (self._may_replay and slot.replays.launch(places, workspace.captures, self._enqueue, slot, given)):
                slot.prepare(addresses)
                self._enqueue(slot, given, stream)
            workspace.leave(stream)

    def _enqueue(self, slot: Slot, given: tuple[Any, ...], stream: Stream) -> None:
        def work() -> None:
            for enqueue in slot.enqueue:
                enqueue(stream, *given)

        self.run_beside(stream, self._sides, slot.begin, work)
