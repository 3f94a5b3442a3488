"""The packed kernels under the interpreter: on ordinary memory, with flags stored behind their data."""

from __future__ import annotations

from typing import Any

from overweave.ir.plan import Exchange, Plan
from overweave.ir.schedule import INPUT, OUTPUT, Region
from overweave.memory.host.packed import HostPacked
from overweave.memory.packed_layout import lay_out_packed
from overweave.runtime import interpreter
from overweave.runtime.gpu.kernels.packed_call import Caller, packed_arguments
from overweave.runtime.library.library import View

interpreter.repair()

# Behind the repair: importing a kernel decorates it, for interpreting or for compiling.
from torch import Tensor  # noqa: E402

from overweave.kernels.packed.gather import packed_gather_kernel  # noqa: E402
from overweave.kernels.packed.one_shot import packed_all_reduce_kernel  # noqa: E402
from overweave.kernels.packed.scatter import packed_scatter_kernel  # noqa: E402
from overweave.kernels.packed.two_shot import packed_two_shot_kernel  # noqa: E402

_BLOCK = 16  # messages of a program: several programs even for small products, several turns even for short rows
_KERNELS: dict[Exchange, Any] = {
    "one_shot": packed_all_reduce_kernel,
    "two_shot": packed_two_shot_kernel,
    "scatter": packed_scatter_kernel,
    "gather": packed_gather_kernel,
}


def exchange_packed(
    plan: Plan, tensors: dict[str, Tensor], space: HostPacked, view: View, caller: tuple[int, tuple[Tensor, Tensor]]
) -> None:
    """One launch on one rank. tensors: the caller's. caller: rank; words and limits. Returns when all programs have
    ended."""
    layout, config, rank = lay_out_packed(plan), plan.realization.packed, caller[0]
    assert config is not None
    local = [buffer for buffer in plan.schedule.buffers if buffer.home not in (INPUT, OUTPUT)]
    own = {one.name: view(Region(one.name, rank, (0, one.rows), (0, one.cols))) for one in local}
    arguments, programs = packed_arguments(plan, layout, tensors | own, space, Caller(*caller, _BLOCK))
    _KERNELS[config.exchange][(programs,)](*arguments)
