"""What a packed kernel is given, the same on a GPU and under the interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from overweave.ir.epilogue import BIAS, NORM_WEIGHT, RESIDUAL, Z
from overweave.ir.plan import PACKED_SUMS, Plan
from overweave.kernels.arguments import AfterSums
from overweave.memory.device.ptx import poll_packed, poll_packed_constraints
from overweave.memory.packed_layout import PackedLayout


class Space(Protocol):
    """Memory of packed messages: memory/cuda/packed_space.py, memory/host/packed.py."""

    half_bytes: int
    spaces: Tensor
    state: Tensor


class Caller(NamedTuple):
    """Who launches: rank; words and limits (memory/device/signals.py); block, the messages of a program at a time;
    is_chained: the later of matmul and exchange starts early."""

    rank: int
    protocol: tuple[Tensor, Tensor]
    block: int
    is_chained: bool = False


def packed_arguments(
    plan: Plan, layout: PackedLayout, tensors: Mapping[str, Any], space: Space, caller: Caller
) -> tuple[list[Any], int]:
    """All arguments of the plan's packed kernel, and how many programs it has.

    tensors: by buffer name, and what a norm or the epilogue of sums reads and writes by its own.
    """
    config, norm, ranks = plan.realization.packed, plan.problem.norm, plan.schedule.world_size
    assert config is not None
    may_norm, adds = config.exchange in PACKED_SUMS, config.exchange != "gather"
    after = [AfterSums(*(tensors.get(name) for name in (BIAS, RESIDUAL, NORM_WEIGHT, Z)))] if adds else []
    arrays = [tensors[layout.source], tensors[layout.out], *after, space.spaces, space.state, *caller.protocol]
    span, programs, turns = layout.stretches(caller.block)
    counts = [layout.words, layout.shard_words, span, turns]
    numbers = [*counts, layout.part_bytes, space.half_bytes, caller.rank, ranks]
    eps = [norm.eps if norm else 0.0] if may_norm else []
    constants = [*packed_constants(ranks), caller.block, caller.is_chained, *eps]
    if adds:
        numbers.append(plan.problem.n)
        constants.append(plan.problem.of_sums.bits)
    return [*arrays, *numbers, *constants], programs


def packed_constants(ranks: int) -> tuple[int, str, str]:
    """SENDERS, POLL and HELD of a packed kernel among so many ranks."""
    return ranks - 1, poll_packed(ranks - 1), poll_packed_constraints(ranks - 1)
