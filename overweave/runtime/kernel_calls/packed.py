"""Calls of the kernels of packed messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from overweave.ir.epilogue import BIAS, NORM_WEIGHT, RESIDUAL, Z
from overweave.ir.plan import PACKED_SUMS, Exchange, PackedConfig
from overweave.ir.problem import Problem
from overweave.kernels.arguments import AfterSums
from overweave.kernels.packed.gather import packed_gather_kernel
from overweave.kernels.packed.one_shot import packed_all_reduce_kernel
from overweave.kernels.packed.scatter import packed_scatter_kernel
from overweave.kernels.packed.two_shot import packed_two_shot_kernel
from overweave.memory.device.ptx import poll_packed, poll_packed_constraints
from overweave.memory.packed_layout import PackedLayout
from overweave.runtime.kernel_calls.call import EARLY, KernelCall

KERNELS: dict[Exchange, Any] = {
    "one_shot": packed_all_reduce_kernel,
    "two_shot": packed_two_shot_kernel,
    "scatter": packed_scatter_kernel,
    "gather": packed_gather_kernel,
}


class Space(Protocol):
    """Memory of packed messages (memory/packed_space.py)."""

    half_bytes: int
    spaces: Tensor
    state: Tensor


class Caller(NamedTuple):
    """Who launches. rank; words and limits (memory/device/signals.py); is_chained: the later of matmul and exchange
    starts early; is_later: the exchange is that one."""

    rank: int
    protocol: tuple[Tensor, Tensor]
    is_chained: bool = False
    is_later: bool = False


def packed_call(
    config: PackedConfig,
    problem: Problem,
    layout: PackedLayout,
    tensors: Mapping[str, Any],
    space: Space,
    caller: Caller,
) -> KernelCall:
    """An exchange, before or behind the matmul of a problem.

    tensors: by buffer name, and what a norm or the epilogue of sums reads and writes by its own.
    """
    norm, ranks = problem.norm, problem.world_size
    may_norm, adds = config.exchange in PACKED_SUMS, config.exchange != "gather"
    after = [AfterSums(*(tensors.get(name) for name in (BIAS, RESIDUAL, NORM_WEIGHT, Z)))] if adds else []
    arrays = [tensors[layout.source], tensors[layout.out], *after, space.spaces, space.state, *caller.protocol]
    span, programs, turns = layout.stretches(config.block)
    counts = [layout.words, layout.shard_words, span, turns]
    numbers = [*counts, layout.part_bytes, space.half_bytes, caller.rank, ranks]
    eps = [norm.eps if norm else 0.0] if may_norm else []
    senders = ranks - 1
    constants = [senders, poll_packed(senders), poll_packed_constraints(senders), config.block, caller.is_chained, *eps]
    if adds:
        numbers.append(problem.n)
        constants.append(problem.of_sums.bits)
    options: dict[str, int] = {"num_warps": config.warps}
    options |= EARLY if caller.is_chained and caller.is_later else {}
    return KernelCall(KERNELS[config.exchange], [*arrays, *numbers, *constants], options, programs)
