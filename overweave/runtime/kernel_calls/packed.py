"""The call of the kernel of packed messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from overweave.ir.plan import PackedConfig
from overweave.ir.problem import Problem
from overweave.kernels.added import epilogue_code, rows_code
from overweave.kernels.arguments import AfterSums, Assembly, Messages, PackedTraits, ShardSpans, SignalWords
from overweave.kernels.packed.exchange import packed_kernel
from overweave.memory.device.ptx import poll_packed, poll_packed_constraints
from overweave.memory.heap import PackedSpace
from overweave.memory.packed_layout import PackedLayout
from overweave.runtime.kernel_calls.call import DEPENDENT_LAUNCH, KernelCall
from overweave.runtime.kernel_calls.sums_and_copies import after_sums


class Caller(NamedTuple):
    """The launching rank. protocol: words and limits (memory/device/signals.py). is_chained: the later of matmul and
    packed kernel starts early, by dependent launch. is_later: the packed kernel is that one."""

    rank: int
    protocol: tuple[Tensor, Tensor]
    is_chained: bool = False
    is_later: bool = False


def packed_call(
    config: PackedConfig,
    problem: Problem,
    layout: PackedLayout,
    tensors: Mapping[str, Any],
    space: PackedSpace,
    caller: Caller,
) -> KernelCall:
    """Return the call of the packed kernel, before or behind the matmul of a problem.

    tensors: buffers by name, and operands of the norm or of the sums' epilogue by theirs.
    """
    ranks, adds, rows = problem.world_size, config.exchange != "gather", problem.of_rows
    span, programs, turns = layout.stretches(config.block)
    traits = PackedTraits(
        exchange=config.exchange,
        senders=ranks - 1,
        poll=Assembly(poll_packed(ranks - 1), poll_packed_constraints(ranks - 1)),
        block=config.block,
        chained=caller.is_chained,
        epilogue=epilogue_code(problem.sum_epilogue) if adds else 0,
        rows=rows_code(rows),
    )
    arguments = [
        *(tensors[layout.source], tensors[rows.places[0] if rows else layout.out]),
        after_sums(problem, tensors) if adds else AfterSums(),
        Messages(space.spaces, space.state, layout.part_bytes, space.half_bytes),
        ShardSpans(layout.words, layout.shard_words, span, turns),
        SignalWords(None, *caller.protocol, ranks),
        *(caller.rank, problem.n, traits),
    ]
    options: dict[str, int] = {"num_warps": config.warps}
    options |= DEPENDENT_LAUNCH if caller.is_chained and caller.is_later else {}
    return KernelCall(packed_kernel, arguments, options, programs)
