"""The words that name a problem beyond a bare product: several weights over one gather, an epilogue, RMSNorm."""

from __future__ import annotations

from typing import get_args

from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.dtype import FLOAT8
from overweave.ir.epilogue import Activation, Epilogue, Norm, applied, told_apart
from overweave.ir.operators.forms import BIAS, GATE, NORM_EPS, REGISTERED, RESIDUAL
from overweave.ir.problem import Problem
from overweave.schedules.catalog.forms import check_forms

RMS_NORM = "rms_norm"
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
FP8_STEP = 16  # k and n of fp8 operands are multiples of it, for torch's scaled matmul and for 16-byte rows
_WORDS = (BIAS, *ACTIVATIONS, GATE, RESIDUAL, RMS_NORM)


def with_epilogue(problem: Problem, columns: tuple[int, ...] = (), after: str = "") -> Problem:
    """Return a bare problem with several weights and an epilogue. Raises InputError.

    columns: of each weight, if there are several. after: words joined by `+`: `bias`, an activation (`silu`, `gelu`,
    `gelu_tanh`), `gate`, `residual`, as the keywords of operators, or `residual+rms_norm`, as `ow.RmsNorm`; or names of
    epilogues that were registered.
    """
    check_sizes(problem, columns)
    words = [word for word in after.split("+") if word]
    known = (*_WORDS, *REGISTERED)
    unknown = [word for word in words if word not in known]
    if unknown or len(set(words)) < len(words):
        found = f"{unknown[0][:40]!r} is none" if unknown else "a word is there twice"
        raise InputError(f"{problem.operator} after {after[:60]!r}", found, f"Join some of {', '.join(known)} by +")
    activations = [word for word in ACTIVATIONS if word in words]
    if len(activations) > 1:
        raise InputError(f"{problem.operator} after {after}", " and ".join(activations), "Leave out one of them")
    norms, has_residual = RMS_NORM in words, RESIDUAL in words
    asked = f"{problem.operator}{f' after {after}' if words else ''}"
    forms = [each for name, each in REGISTERED.items() if name in words]
    more, rows = told_apart([applied(form, form.numbers.values(), problem.record.adds) for form in forms])
    epilogue = replace(
        problem.epilogue,
        bias=BIAS in words,
        activation=activations[0] if activations else None,
        residual=has_residual and not norms,
        gate=GATE in words,
        more=more,
    )
    norm = Norm(eps=NORM_EPS, residual=has_residual) if norms else None
    whole = replace(problem, columns=columns if len(columns) > 1 else (), epilogue=epilogue, norm=norm, rows=rows)
    check_forms(asked, whole)
    return whole


def check_sizes(problem: Problem, columns: tuple[int, ...] = ()) -> None:
    """Raise InputError for fp8 of sizes that torch cannot multiply. columns: of each of several weights."""
    for n in columns or (problem.n,):
        if problem.dtype == FLOAT8 and (n % FP8_STEP or problem.k % FP8_STEP):
            raise unaligned(problem.operator, n, problem.k)


def unaligned(operator: str, n: int, k: int) -> InputError:
    """Return the error for fp8 operands of such sizes."""
    cure = f"Pad both to multiples of {FP8_STEP}, as torch._scaled_mm wants them"
    return InputError(f"{operator}: fp8 operands", f"k={k}, n={n}", cure)


def as_benchmarked(problem: Problem) -> Problem:
    """Return a bare problem in the form in which it is measured: fp8 scaled by rows, w stored as `[n, k]`, into
    bf16."""
    if problem.dtype != FLOAT8:
        return problem
    return replace(problem, b_is_transposed=True, epilogue=Epilogue(scaling="rows"), out_dtype="bfloat16")


def bare_product(problem: Problem) -> Problem:
    """Return the product alone, of one weight: the inverse of `with_epilogue`."""
    fields = problem.operator, problem.m, problem.n, problem.k, problem.world_size, problem.dtype
    operator, m, n, k, world_size, dtype = fields
    return as_benchmarked(Problem(operator=operator, m=m, n=n, k=k, world_size=world_size, dtype=dtype))
