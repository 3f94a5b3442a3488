"""The packed kernel under the interpreter: on ordinary memory, with flags stored behind their data."""

from __future__ import annotations

from overweave.ir.plan import Plan
from overweave.ir.schedule import Operation, Region
from overweave.memory.host_packed import HostPacked
from overweave.memory.packed_layout import lay_out_packed
from overweave.runtime import interpreter
from overweave.runtime.library import View

interpreter.repair()

# Behind the repair: importing a kernel decorates it, for interpreting or for compiling.
from torch import Tensor  # noqa: E402

from overweave.kernels.packed import packed_all_reduce_kernel  # noqa: E402
from overweave.kernels.packed_two_shot import packed_two_shot_kernel  # noqa: E402

_BLOCK = 16  # messages of a program: several programs even for small products


def sum_packed(
    plan: Plan, operations: tuple[Operation, ...], space: HostPacked, view: View, protocol: tuple[Tensor, Tensor]
) -> None:
    """One launch on one rank. protocol: words and limits. Returns when all programs have ended."""
    layout, ranks, rank = lay_out_packed(plan), plan.schedule.world_size, operations[0].rank
    rows, cols = layout.shape
    product, out = (view(Region(name, rank, (0, rows), (0, cols))) for name in (layout.partial, layout.out))
    is_shared = plan.realization.packed is not None and plan.realization.packed.shots == 2
    counts = [layout.words, layout.sum_words] if is_shared else [layout.words]
    numbers = [*counts, layout.part_bytes, space.half_bytes, rank, ranks]
    assembly = (None, None)  # nothing is assembled here
    kernel = packed_two_shot_kernel if is_shared else packed_all_reduce_kernel
    kernel[(-(-layout.messages // _BLOCK),)](
        product, out, space.spaces, space.state, *protocol, *numbers, ranks - 1, *assembly, _BLOCK
    )
