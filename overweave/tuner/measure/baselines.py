"""The methods that a comparison holds side by side: the roofs, what torch ships, and ours.

`METHODS` is the table that `overweave bench` and the tests read; a new row is a new line of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from overweave.ir.operators.registry import operator_of
from overweave.tuner.measure.attempt import Result
from overweave.tuner.measure.sides import Call, Setting, Side, has_copies


class Method(NamedTuple):
    """A row of the comparison. gives_result: it computes the operator, and is checked before it is timed.

    lacks: what a setting and a number of rows lack for it, or an empty string. is_common: every operator has it; else
    those whose record names it.
    """

    name: str
    label: str
    gives_result: bool
    lacks: Callable[[Setting, int], str]
    call: Callable[[Side], Call]
    is_common: bool = True


def _anywhere(setting: Setting, m: int) -> str:
    return ""


def _copy_engine(setting: Setting, m: int) -> str:
    return "" if has_copies(setting) else "needs CUDA and cuda-bindings"


def _torch_fused(setting: Setting, m: int) -> str:
    if setting.device.type != "cuda":
        return "needs CUDA"
    return "" if m % setting.group.world_size == 0 else "needs rows that divide by world_size"


def _torch_all_reduce(setting: Setting, m: int) -> str:
    if setting.device.type != "cuda":
        return "needs CUDA"
    return "" if setting.dtype != torch.float16 else "needs bf16 or fp32"


def _copies(side: Side) -> Call:
    def call(turn: int) -> torch.Tensor:
        result = side.start_copies(turn)
        side.join_copies()
        return result

    return call


def _ceiling(side: Side) -> Call:
    def call(turn: int) -> Result:
        side.start_copies(turn)
        result = side.matmul(turn)
        side.join_copies()
        return result

    return call


def planned(plan: str | None) -> Callable[[Side], Call]:
    """Our operator with a named plan of the catalog, or (None) with the plan it chooses."""
    return lambda side: lambda turn: side.ours(turn, plan)


MATMUL, COMMUNICATION, COPIES, CEILING = "matmul", "communication", "copies", "ceiling"
SEQUENTIAL, TORCH_FUSED, PER_SHARD, OURS = "sequential", "torch_fused", "per_shard", "overweave"
TORCH_ONE_SHOT, TORCH_TWO_SHOT = "torch_one_shot", "torch_two_shot"
NAMED = "plan."  # before the names of plans that were asked for
TORCH = (TORCH_FUSED, TORCH_ONE_SHOT, TORCH_TWO_SHOT)
METHODS: tuple[Method, ...] = (
    Method(MATMUL, "matmul alone", False, _anywhere, lambda side: side.matmul),
    Method(COMMUNICATION, "communication: library", False, _anywhere, lambda side: side.communicate),
    Method(COPIES, "communication: copy engine", False, _copy_engine, _copies),
    Method(CEILING, "ceiling: matmul beside copies", False, _copy_engine, _ceiling),
    Method(SEQUENTIAL, "library: collective and matmul", True, _anywhere, lambda side: side.sequential),
    Method(TORCH_FUSED, "torch: fused (symm_mem)", True, _torch_fused, lambda side: side.torch_fused, is_common=False),
    Method(
        TORCH_ONE_SHOT,
        "torch: matmul, one-shot (symm_mem)",
        True,
        _torch_all_reduce,
        lambda side: side.torch_one_shot,
        is_common=False,
    ),
    Method(
        TORCH_TWO_SHOT,
        "torch: matmul, two-shot (symm_mem)",
        True,
        _torch_all_reduce,
        lambda side: side.torch_two_shot,
        is_common=False,
    ),
    Method(PER_SHARD, "copy engine, matmul per shard", True, _anywhere, planned("per_shard"), is_common=False),
    Method(OURS, "overweave", True, _anywhere, planned(None)),
)


def methods_of(operator: str, plans: tuple[str, ...] = ()) -> tuple[Method, ...]:
    """The rows of an operator; those of plans asked for by name, if any, in place of the two rows of ours."""
    particular = operator_of(operator).baselines
    own = tuple(method for method in METHODS if method.is_common or method.name in particular)
    if not plans:
        return own
    named = tuple(
        Method(f"{NAMED}{plan}", f"overweave, plan {plan}", True, _anywhere, planned(plan))
        for plan in dict.fromkeys(plans)
    )
    return tuple(method for method in own if method.name not in (PER_SHARD, OURS)) + named
