"""Problems in words: what may be beside a bare product, and what is refused."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.dtype import FLOAT8, Dtype
from overweave.ir.epilogue import Epilogue, Norm
from overweave.ir.problem import Problem
from overweave.tuner.space.shapes import as_benchmarked, bare_product, with_epilogue

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


def product(operator: str = GATHER, dtype: Dtype = "bfloat16") -> Problem:
    return as_benchmarked(Problem(operator=operator, m=512, n=96, k=64, world_size=2, dtype=dtype))


def test_what_a_problem_may_have_beside_its_product():
    one = product()
    for after, epilogue in (
        ("", Epilogue()),
        ("silu+bias", Epilogue(bias=True, activation="silu")),
        ("gate+silu+residual", Epilogue(gate=True, activation="silu", residual=True)),
    ):
        assert with_epilogue(one, (), after) == replace(one, epilogue=epilogue)
        assert bare_product(with_epilogue(one, (), after)) == one
    assert with_epilogue(one, (48, 32, 16)) == replace(one, columns=(48, 32, 16))
    assert with_epilogue(one, (96,)) == one
    assert bare_product(with_epilogue(one, (48, 48))) == one
    for operator in (SCATTER, REDUCE):
        ending = with_epilogue(product(operator), (), "bias+residual")
        assert ending == replace(product(operator), epilogue=Epilogue(bias=True, residual=True))
        assert bare_product(ending) == product(operator)
    normed = with_epilogue(product(REDUCE), (), "residual+rms_norm")
    assert normed.norm == Norm(eps=1e-5, residual=True)
    assert bare_product(normed) == product(REDUCE)


def test_fp8_stays_scaled():
    problem = with_epilogue(product(dtype=FLOAT8), (), "bias+gelu")
    assert problem.epilogue == Epilogue(scaling="rows", bias=True, activation="gelu")
    assert bare_product(problem) == product(dtype=FLOAT8)
    gated = with_epilogue(product(dtype=FLOAT8), (), "gate+silu")
    assert gated.epilogue == Epilogue(scaling="rows", gate=True, activation="silu")
    assert gated.multiplied_columns == 2 * gated.n


@pytest.mark.parametrize(
    ("problem", "columns", "after", "found"),
    [
        (product(), (), "tanh", "'tanh' is none"),
        (product(), (), "bias+bias", "twice"),
        (product(), (), "silu+gelu", "silu and gelu"),
        (product(), (), "bias+gate", "bias beside a gate"),
        (product(dtype=FLOAT8), (), "bias+gate", "bias beside a gate"),
        (product(), (48, 48), "residual", "takes one"),
        (product(dtype=FLOAT8), (48, 48), "gate", "takes one"),
        (product(SCATTER), (48, 48), "", "takes one"),
        (product(SCATTER), (), "gate+silu", "takes no gate"),
        (product(), (), "rms_norm", "takes no norm"),
        *((product(each), (), "bias+rms_norm", "bias beside a norm") for each in (REDUCE, SCATTER)),
        (product(dtype=FLOAT8), (40, 56), "", "n=40"),
    ],
)
def test_what_is_refused(problem: Problem, columns: tuple[int, ...], after: str, found: str):
    with pytest.raises(InputError, match=found):
        with_epilogue(problem, columns, after)
