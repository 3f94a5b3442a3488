"""Which forms of a problem an operator has: epilogues, several weights, fp8, other outputs."""

from __future__ import annotations

from overweave.errors import InputError
from overweave.ir.dtype import FLOAT8
from overweave.ir.operators.registry import names_with_form
from overweave.ir.problem import Problem


def check_forms(asked: str, problem: Problem) -> None:
    """Raises InputError for a form that the operator of a problem has not, whatever computes it."""
    for check in (_of_epilogue, _of_sums, _of_weights, _of_fp8):
        if found := check(problem):
            raise InputError(asked, *found)


_Obstacle = tuple[str, str] | None  # what was found, and the cure


def _of_epilogue(problem: Problem) -> _Obstacle:
    forms, epilogue, name = problem.record.forms, problem.epilogue, problem.operator
    if epilogue.gate and not forms.gate:
        cure = f"Only {names_with_form(lambda forms: forms.gate)} has one: finish the product yourself"
        return f"{name} takes no gate", cure
    if epilogue.gate and epilogue.bias:
        return "a bias beside a gate", "Leave out one of them: what is gated has no bias"
    if epilogue != epilogue.part_epilogue and not forms.epilogue:
        return f"{name} ends with its product", f"Leave out {epilogue}"
    if epilogue.scaling and not forms.scaling:
        return f"{name} takes no scales", "Multiply numbers of 16 bits or more"
    return None


def _of_sums(problem: Problem) -> _Obstacle:
    forms, epilogue = problem.record.forms, problem.epilogue
    if problem.norm and not forms.norm:
        return "a norm, and it has none", f"Only {names_with_form(lambda forms: forms.norm)} ends with one"
    if problem.norm and epilogue != epilogue.part_epilogue:
        return f"{epilogue} beside a norm", "Leave out one: a norm has a residual of its own"
    if problem.returns_gathered and not forms.returns_gathered:
        return "returns_gathered", f"Only {names_with_form(lambda forms: forms.returns_gathered)} gathers anything"
    return None


def _of_weights(problem: Problem) -> _Obstacle:
    forms, epilogue = problem.record.forms, problem.epilogue
    if not problem.columns:
        return None
    if not forms.several_weights or epilogue.residual or epilogue.gate:
        only = names_with_form(lambda forms: forms.several_weights)
        found = f"{len(problem.columns)} weights: {problem.operator}{f' with {epilogue}' if epilogue.bits else ''}"
        return f"{found} takes one", f"Only {only} takes several, with neither a residual nor a gate"
    if sum(problem.columns) != problem.n:
        return f"n={problem.n}, weights of {problem.n_text} columns", "n counts the columns of all weights"
    return None


def _of_fp8(problem: Problem) -> _Obstacle:
    is_whole = problem.b_is_transposed and problem.epilogue.scaling and problem.out_dtype
    if problem.dtype != FLOAT8 or is_whole:
        return None
    found = f"{problem.dtype} without b_is_transposed, scaling or out_dtype"
    return found, "Products of fp8 are scaled, and kept in 16 bits or more"
