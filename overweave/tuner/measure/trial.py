"""Calls held side by side: each is tried once on every rank, and those that are right are timed together.

A call that cannot run, or whose result is wrong, on any rank is left out on all, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Protocol

import torch
import torch.distributed as dist

from overweave.errors import OverweaveError
from overweave.memory.group import Group
from overweave.tuner.measure.replay import replayed
from overweave.tuner.measure.timer import Effort, Samples, compare

# Relative error of a result against the sequential one, in norm: two roundings of the narrowest dtype, with room.
LARGEST_ERROR = 2e-2
CallResult = torch.Tensor | tuple[torch.Tensor, ...]  # of a call: one tensor, or one for each weight
CheckedCall = Callable[[int], CallResult]  # its argument says which input set to use


class TrialSetting(Protocol):
    """Where a method runs."""

    @property
    def group(self) -> Group: ...

    @property
    def device(self) -> torch.device: ...


class TimedTrial:
    """Calls that compute one thing. left_out: why a call was not timed, by its name. Collective.

    expected: what calls must give back, on input set 0; None: what the first one that runs gives back.
    as_graphs: each call is captured once it has run, and timed as graphs (`replay.replayed`).
    """

    def __init__(
        self, place: TrialSetting, effort: Effort, expected: CallResult | None = None, as_graphs: bool = False
    ) -> None:
        self._place, self._effort, self._as_graphs = place, effort, as_graphs
        self._expected = None if expected is None else _copied(expected)
        self.left_out: dict[str, str] = {}

    def times(
        self,
        calls: Mapping[str, CheckedCall],
        roofs: Container[str] = (),
        on_round: Callable[[float], None] | None = None,
    ) -> Samples:
        """Samples of those that run and are right, in paired rounds. roofs: calls of whose result nothing is known.

        on_round: is told which part of the rounds is done.
        """
        usable = {}
        for name, call in calls.items():
            found, why = self._tried(call, name not in roofs)
            if why:
                self.left_out[name] = why
            else:
                usable[name] = found
        if not usable:
            return Samples({}, {})
        return compare(usable, self._place.device, self._place.group.process_group, self._effort, on_round)

    def _tried(self, call: CheckedCall, is_checked: bool) -> tuple[CheckedCall, str]:
        """A call as it is timed, and why it must be left out, or an empty string."""
        why = self._attempt(call, is_checked)
        if why or not self._as_graphs:
            return call, why
        made: list[CheckedCall] = []

        def capture(turn: int) -> CallResult:
            made.append(replayed(call))
            return made[0](turn)

        why = self._attempt(capture, is_checked)
        return (made[0] if made else call), (f"as a captured graph: {why}" if why else "")

    def _attempt(self, call: CheckedCall, is_checked: bool) -> str:
        """Runs a call once; why it must be left out, or an empty string. Every rank comes to the same verdict."""
        reason, result, device = "", None, self._place.device
        try:
            result = call(0)
            if is_checked and self._expected is not None and not agrees(result, self._expected):
                reason = "its result differs from the sequential one"
            if device.type == "cuda":
                torch.cuda.synchronize()
        except (OverweaveError, RuntimeError, ValueError, NotImplementedError) as error:
            reason = f"{type(error).__name__}: {error}"[:300]
        verdict = torch.tensor([int(bool(reason))], device=device)
        dist.all_reduce(verdict, dist.ReduceOp.MAX, self._place.group.process_group)
        reason = reason or ("it failed on another rank" if int(verdict) else "")
        if is_checked and self._expected is None and result is not None and not reason:
            self._expected = _copied(result)
        return reason


def agrees(result: CallResult, expected: CallResult) -> bool:
    """Whether a result is the expected one but for rounding."""
    ours, theirs = (each if isinstance(each, tuple) else (each,) for each in (result, expected))
    return len(ours) == len(theirs) and all(map(_agrees, ours, theirs))


def _copied(result: CallResult) -> CallResult:
    """A result that later calls leave alone."""
    return tuple(each.clone() for each in result) if isinstance(result, tuple) else result.clone()


def _agrees(result: torch.Tensor, expected: torch.Tensor) -> bool:
    if result.shape != expected.shape:
        return False
    error = torch.linalg.vector_norm(result.float() - expected.float())
    # Written so that NaN does not agree.
    return bool(error <= LARGEST_ERROR * torch.linalg.vector_norm(expected.float()))
