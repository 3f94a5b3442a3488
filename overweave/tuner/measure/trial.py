"""A trial of calls that compute one thing: each runs once on every rank, and those that are right are timed together.

A call that cannot run, or whose result is wrong, on any rank is left out on all, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from overweave.errors import OverweaveError
from overweave.memory.group import Group
from overweave.tuner.measure.timer import Effort, Samples, capture_graphs, compare, median

# Largest relative error (norm) of a result against the sequential one: two roundings of the narrowest dtype, and more.
LARGEST_ERROR = 2e-2
CallResult = torch.Tensor | tuple[torch.Tensor, ...]  # of a call: one tensor, or one for each weight
CheckedCall = Callable[[int], CallResult]  # its argument says which input set to use
Named = TypeVar("Named", bound=Hashable)


class TrialSetting(Protocol):
    """The group and device of a trial."""

    @property
    def group(self) -> Group: ...

    @property
    def device(self) -> torch.device: ...


class TimedTrial:
    """Calls that compute one thing. Collective. left_out: name -> why the call was not timed.

    expected: the right result on input set 0; None: that of the first call that runs. as_graphs: each call is captured
    once it has run, and timed as graphs (`replay.capture_graphs`).
    """

    def __init__(
        self, place: TrialSetting, effort: Effort, expected: CallResult | None = None, as_graphs: bool = False
    ) -> None:
        self._place, self._effort, self._as_graphs = place, effort, as_graphs
        self._expected = None if expected is None else _clone(expected)
        self.left_out: dict[str, str] = {}

    def times(
        self,
        calls: Mapping[str, CheckedCall],
        roofs: Container[str] = (),
        on_round: Callable[[float], None] | None = None,
        eager: Container[str] = (),
    ) -> Samples:
        """Return samples of the calls that run and are right, in paired rounds. roofs: names of calls that are not
        checked. on_round: called with the fraction of rounds that is done. eager: names of calls that are not captured,
        since their host reads what a GPU computes."""
        usable = {}
        for name, call in calls.items():
            timed, reason = self._try(call, name not in roofs, self._as_graphs and name not in eager)
            if reason:
                self.left_out[name] = reason
            else:
                usable[name] = timed
        if not usable:
            return Samples({}, {})
        return compare(usable, self._place.device, self._place.group.process_group, self._effort, on_round)

    def medians(
        self, calls: Mapping[Named, CheckedCall], on_round: Callable[[float], None] | None = None
    ) -> dict[Named, float]:
        """Return the microseconds of each call that runs and is right, the fastest first. calls: by what they run, as
        its text names them."""
        of_names = {str(what): call for what, call in calls.items()}
        samples = self.times(of_names, on_round=on_round).device_us
        times = {what: median(samples[str(what)]) for what in calls if str(what) in samples}
        return dict(sorted(times.items(), key=lambda item: item[1]))

    def _try(self, call: CheckedCall, is_checked: bool, as_graphs: bool) -> tuple[CheckedCall, str]:
        """Return the call as it is timed, and why it must be left out ("" if it need not)."""
        reason = self._attempt(call, is_checked)
        if reason or not as_graphs:
            return call, reason
        captured: list[CheckedCall] = []

        def capture(sample: int) -> CallResult:
            captured.append(capture_graphs(call))
            return captured[0](sample)

        reason = self._attempt(capture, is_checked)
        return (captured[0] if captured else call), (f"as a captured graph: {reason}" if reason else "")

    def _attempt(self, call: CheckedCall, is_checked: bool) -> str:
        """Run a call once. Return why it must be left out ("" if it need not), the same on every rank."""
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
            self._expected = _clone(result)
        return reason


def agrees(result: CallResult, expected: CallResult) -> bool:
    """Whether a result is the expected one up to rounding."""
    ours, theirs = (each if isinstance(each, tuple) else (each,) for each in (result, expected))
    return len(ours) == len(theirs) and all(map(_agrees, ours, theirs))


def _clone(result: CallResult) -> CallResult:
    """Return a copy of a result, which later calls do not overwrite."""
    return tuple(each.clone() for each in result) if isinstance(result, tuple) else result.clone()


def _agrees(result: torch.Tensor, expected: torch.Tensor) -> bool:
    if result.shape != expected.shape:
        return False
    error = torch.linalg.vector_norm(result.float() - expected.float())
    # Written so that NaN does not agree.
    return bool(error <= LARGEST_ERROR * torch.linalg.vector_norm(expected.float()))
