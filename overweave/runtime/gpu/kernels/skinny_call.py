"""What the kernel of few rows is given, the same on a GPU and under the interpreter."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from torch import Tensor

from overweave.ir.plan import SkinnyConfig
from overweave.memory.cuda.shares import Shares

Turn = Literal["in_turn", "leads", "follows"]  # of the kernel in its chain: the next one starts early, or it does
TURNS: dict[Turn, int] = {"in_turn": 0, "leads": 1, "follows": 2}


class Factors(NamedTuple):
    """What is multiplied, `a [m, k]` and `b [k, n]`, and its result `[m, n]`, rows without gaps between their numbers.

    bases: what the kernel is given for each, itself or a stand-in that may move (arguments.Moving).
    """

    a: Tensor
    b: Tensor
    out: Tensor
    bases: tuple[Any, Any, Any]


def tiles_of(config: SkinnyConfig, m: int, n: int) -> int:
    """How many tiles a result `[m, n]` has, each with a counter of its own."""
    return -(-m // config.block_m) * -(-n // config.block_n)


def share_places(config: SkinnyConfig, m: int, n: int) -> int:
    """How many shares leave their sums in memory, each a tile's."""
    return tiles_of(config, m, n) * config.splits if config.splits > 1 else 0


def skinny_arguments(
    config: SkinnyConfig, factors: Factors, shares: Shares | None, turn: Turn = "in_turn"
) -> tuple[list[Any], int]:
    """All arguments of the kernel, and how many programs it has. shares: as many places as `share_places` says."""
    a, b, out, (base_a, base_b, base_out) = factors
    (m, k), n = a.shape, b.shape[1]
    is_transposed = b.stride(0) == 1 and b.stride(1) != 1
    arguments = [base_a, base_b, base_out, *(shares or (None, None)), m, n, k]
    arguments += [a.stride(0), b.stride(0), b.stride(1), out.stride(0), config.splits]
    arguments += [config.block_m, config.block_n, config.block_k, config.swapped, is_transposed, TURNS[turn]]
    return arguments, tiles_of(config, m, n) * config.splits
