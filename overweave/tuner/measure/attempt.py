"""A method tried once on every rank before it is timed: can it run, and does it compute what it should?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from overweave.errors import OverweaveError
from overweave.memory.group import Group

# Relative error of a result against the sequential one, in norm: two roundings of the narrowest dtype, with room.
LARGEST_ERROR = 2e-2
Result = torch.Tensor | tuple[torch.Tensor, ...]  # of a call: one tensor, or one for each weight


class Place(Protocol):
    """Where a method runs."""

    @property
    def group(self) -> Group: ...

    @property
    def device(self) -> torch.device: ...


def attempt(call: Callable[[int], Result], expected: Result | None, setting: Place) -> str:
    """Runs a method once; why it must be left out, or an empty string. Every rank comes to the same verdict.

    expected: what it must give back, on input set 0; None if nothing can be said of its result.
    """
    reason = ""
    try:
        result = call(0)
        if expected is not None and not agrees(result, expected):
            reason = "its result differs from the sequential one"
        if setting.device.type == "cuda":
            torch.cuda.synchronize()
    except (OverweaveError, RuntimeError, ValueError, NotImplementedError) as error:
        reason = f"{type(error).__name__}: {error}"[:300]
    verdict = torch.tensor([int(bool(reason))], device=setting.device)
    dist.all_reduce(verdict, dist.ReduceOp.MAX, setting.group.process_group)
    return reason or ("it failed on another rank" if int(verdict) else "")


def copied(result: Result) -> Result:
    """A result that later calls leave alone."""
    return tuple(each.clone() for each in result) if isinstance(result, tuple) else result.clone()


def agrees(result: Result, expected: Result) -> bool:
    """Whether a result is the expected one but for rounding."""
    ours, theirs = (each if isinstance(each, tuple) else (each,) for each in (result, expected))
    return len(ours) == len(theirs) and all(map(_agrees, ours, theirs))


def _agrees(result: torch.Tensor, expected: torch.Tensor) -> bool:
    if result.shape != expected.shape:
        return False
    error = torch.linalg.vector_norm(result.float() - expected.float())
    # Written so that NaN does not agree.
    return bool(error <= LARGEST_ERROR * torch.linalg.vector_norm(expected.float()))
