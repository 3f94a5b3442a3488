"""Which forms of a problem an operator has: epilogues, several weights, fp8, other outputs; and which go together."""

from __future__ import annotations

from overweave.errors import InputError
from overweave.ir.dtype import FLOAT8
from overweave.ir.operators.forms import BIAS, FORMS, GATE, input_of
from overweave.ir.operators.registry import names_with_form
from overweave.ir.problem import Problem


def check_forms(asked: str, problem: Problem) -> None:
    """Raises InputError for a form that the operator of a problem has not, whatever computes it."""
    for check in (_of_operator, _beside_others, _of_weights, _of_fp8):
        if found := check(problem):
            raise InputError(asked, *found)


_Obstacle = tuple[str, str] | None  # what was found, and the cure


def _of_operator(problem: Problem) -> _Obstacle:
    """Of a form that the operator does not take, or a registered epilogue at a stage (product, part, sum, row) at which
    that does not apply."""
    allowed = problem.record.forms.allowed
    for form in FORMS:
        if form not in allowed and problem.words.intersection(form.words):
            cure = f"Only {names_with_form(form.allowed_by)} can: leave it out, or do it yourself"
            return f"{problem.operator} takes no {form.keywords[0]}", cure
    for each in problem.added:
        place = problem.place_of(each)
        if place not in each.form.where:
            places = " and ".join(f"{one}s" for one in each.form.where)
            return f"{each.name} applies to {places}; in {problem.operator} it would apply to {place}s", "Leave it out"
    return None


def _beside_others(problem: Problem) -> _Obstacle:
    epilogue = problem.epilogue
    if problem.words.issuperset((GATE, BIAS)):
        return "a bias beside a gate", "Leave out one of them: what is gated has no bias"
    if problem.rows and problem.rows is not problem.of_rows:
        return f"{problem.rows} and {problem.of_rows}, both of whole rows", "Leave out one of them"
    if problem.of_rows and (epilogue != epilogue.part_epilogue or (epilogue.added and not problem.rows)):
        return f"{epilogue} beside {problem.rows or 'a norm'}", "Leave out one: a norm has a residual of its own"
    return None


def _of_weights(problem: Problem) -> _Obstacle:
    if not problem.columns:
        return None
    are_vectors = all(each.rows == "1" for each in map(input_of, problem.beside) if each is not None)
    if not problem.record.forms.several_weights or not are_vectors:
        then = f" with {problem.epilogue}" if problem.epilogue.steps else ""
        cure = f"Only {names_with_form('several_weights')} takes several, with neither a residual nor a gate"
        return f"{len(problem.columns)} weights: {problem.operator}{then} takes one", cure
    if sum(problem.columns) != problem.n:
        return f"n={problem.n}, weights of {problem.n_text} columns", "n counts the columns of all weights"
    return None


def _of_fp8(problem: Problem) -> _Obstacle:
    is_whole = problem.b_is_transposed and problem.epilogue.scaling and problem.out_dtype
    if problem.dtype != FLOAT8 or is_whole:
        return None
    found = f"{problem.dtype} without b_is_transposed, scaling or out_dtype"
    return found, "Products of fp8 are scaled, and kept in 16 bits or more"
