"""Which forms of a problem an operator has: epilogues, several weights, fp8, other outputs."""

from __future__ import annotations

from overweave.errors import InputError
from overweave.ir.dtype import FLOAT8
from overweave.ir.operators.registry import those_with
from overweave.ir.plan import MOST_PACKED_RANKS, MOST_WEIGHTS, Problem


def check_forms(asked: str, problem: Problem, is_fused: bool) -> None:
    """is_fused: whether a tile kernel computes. Raises InputError for a form that the operator has not."""
    forms = problem.record.forms
    if problem.epilogue.gate and not forms.gate:
        cure = f"Only {those_with(lambda forms: forms.gate)} has a gate"
        raise InputError(asked, f"epilogue {problem.epilogue}", cure)
    if problem.epilogue.bits and not forms.extras:
        raise InputError(asked, f"epilogue {problem.epilogue}", f"{problem.operator} ends with its product")
    if problem.norm and problem.epilogue != problem.epilogue.of_parts:
        found = f"epilogue {problem.epilogue} beside {problem.norm}"
        raise InputError(asked, found, "A sum ends with one of them: a norm has a residual of its own")
    if problem.epilogue.gate and problem.epilogue.bias:
        raise InputError(asked, f"epilogue {problem.epilogue}", "What is gated has no bias")
    if problem.columns:
        _check_columns(asked, problem, is_fused)
    if problem.dtype == FLOAT8:
        _check_fp8(asked, problem)
    if problem.returns_gathered and not forms.returns_gathered:
        cure = f"Only {those_with(lambda forms: forms.returns_gathered)} gathers anything"
        raise InputError(asked, "returns_gathered", cure)


def _check_columns(asked: str, problem: Problem, is_fused: bool) -> None:
    weights = f"{len(problem.columns)} weights"
    if not problem.record.forms.several_weights:
        cure = f"Only {those_with(lambda forms: forms.several_weights)} takes several"
        raise InputError(asked, weights, cure)
    if sum(problem.columns) != problem.n:
        found = f"n={problem.n}, weights of {problem.n_text} columns"
        raise InputError(asked, found, "n counts the columns of all weights")
    if is_fused and len(problem.columns) > MOST_WEIGHTS:
        raise InputError(asked, weights, f"A tile kernel takes {MOST_WEIGHTS}; name a library plan")
    if problem.epilogue.residual or problem.epilogue.gate:
        found = f"epilogue {problem.epilogue} of {weights}"
        raise InputError(asked, found, "Only the product of one weight has a residual or a gate")


def _check_fp8(asked: str, problem: Problem) -> None:
    if not (problem.b_is_transposed and problem.epilogue.scaling and problem.out_dtype):
        found = f"{problem.dtype} without b_is_transposed, scaling or out_dtype"
        raise InputError(asked, found, "Products of fp8 are scaled, and kept in 16 bits or more")


def messages_obstacle(problem: Problem) -> str:
    """Why packed messages cannot carry what a problem moves; empty if they can."""
    if problem.world_size > MOST_PACKED_RANKS:
        return f"packed messages serve {MOST_PACKED_RANKS} ranks at most"
    travels = problem.record.gathers and problem.world_size > 1
    return "packed messages carry no scales of rows" if problem.epilogue.scaling == "rows" and travels else ""
