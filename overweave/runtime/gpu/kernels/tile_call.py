"""What the reduction and the copies are given: the same on a GPU, under the interpreter and for the lint.

Both begin with tables of addresses, a matrix, the tiles and the words of the protocol, and a width; `arguments` are
these, in the order of the kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from overweave.ir.plan import ReduceConfig
from overweave.kernels.arguments import AfterSums


class Summing(NamedTuple):
    """How a reduction ends, beyond its sums: with a trace, with the norm of whole rows (kernels/norm.py), or with an
    epilogue, whose bits these are (kernels/epilogue.py)."""

    traced: bool = False
    after: AfterSums = AfterSums()
    eps: float = 0.0
    sum_first: bool = False  # the first operand of each is kept in fp32
    epilogue: int = 0
    ready: torch.Tensor | None = None  # addresses of words that become 1 when it begins, as of `told_addresses`


def reduction_arguments(
    config: ReduceConfig, arguments: list[Any], widths: tuple[int, int, int], how: Summing
) -> list[Any]:
    """All arguments of `reduction_kernel`. widths: as memory/lower.py says."""
    blocks = [*widths, 0 if how.ready is None else how.ready.numel(), config.block_m, config.block_n // config.parts]
    return [*arguments, how.after, how.ready, *blocks, how.traced, how.eps, how.sum_first, how.epilogue]


def copy_arguments(arguments: list[Any], block_words: int, is_bulk: bool, adds: bool, traced: bool) -> list[Any]:
    """All arguments of `copy_kernel`. block_words: int32, or elements that are added, that a program moves at a time,
    where no bulk copies move them.
    """
    return [*arguments, block_words, is_bulk and not adds, adds, traced]
