"""An operator on one problem with all that it has beside a bare product, as a comparison calls it."""

from __future__ import annotations

from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.plan import Problem
from overweave.tuner.attempt import Result
from overweave.tuner.endings import bare
from overweave.tuner.shapes import SPLIT_COLUMNS
from overweave.tuner.sides import Setting, Side, side
from overweave.tuner.space import SEQUENTIAL, TORCH_FUSED, TORCH_ONE_SHOT, TORCH_TWO_SHOT


class _DressedSide(Side):
    """Baselines are plans of the operator's own: what a library makes of several weights, extras and a norm.

    The matmul alone is that of all columns, of every weight and of a gate; what travels is what always does.
    """

    def __init__(self, base: Side) -> None:
        vars(self).update(vars(base))
        self._base = base

    def communicate(self, turn: int) -> Result:
        return self._base.communicate(turn)

    def sequential(self, turn: int) -> Result:
        return self.ours(turn, SEQUENTIAL)

    def torch_fused(self, turn: int) -> Result:
        return self.ours(turn, TORCH_FUSED)

    def torch_one_shot(self, turn: int) -> Result:
        return self.ours(turn, TORCH_ONE_SHOT)

    def torch_two_shot(self, turn: int) -> Result:
        return self.ours(turn, TORCH_TWO_SHOT)


def side_of(problem: Problem, setting: Setting) -> Side:
    """One rank's part of a problem, with inputs made from the global matmul. Collective. Raises InputError."""
    is_bare = problem == bare(problem)
    if not is_bare:
        if setting.dress is None:
            raise InputError(f"compare {problem.operator}", f"only bare products are: {problem}", "Leave out the rest")
        setting = replace(setting, operator=setting.dress(problem))
    n, k = problem.multiplied_columns, problem.k
    if problem.operator in SPLIT_COLUMNS:
        n *= problem.world_size
    else:
        k *= problem.world_size
    base = side(problem.operator, problem.m, n, k, setting)
    return base if is_bare else _DressedSide(base)
