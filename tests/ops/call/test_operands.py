"""What the operators refuse, each with its own words, before they look for peers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from overweave.errors import InputError
from overweave.ir.operators.all_gather_matmul import OPERATOR
from overweave.ops.call.operands import DTYPES, check_kinds, check_operands

X, W = torch.zeros(3, 8), torch.zeros(8, 5)


def refusal(check, *arguments: object) -> str:
    with pytest.raises(InputError) as caught:
        check("operator", *arguments)
    assert caught.value.cure
    return str(caught.value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_dense_matrices_in_both_layouts_are_taken(dtype: torch.dtype, rows: int):
    x, w = torch.zeros(rows, 8, dtype=dtype), torch.zeros(8, 5, dtype=dtype)
    for weight in (w, w.t().contiguous().t()):
        check_operands("operator", x, weight)


@pytest.mark.parametrize(
    ("x", "w", "found"),
    [
        (torch.zeros(8), W, "x [rows, cols]: got [8]"),
        (torch.zeros(2, 3, 8), W, "got [2, 3, 8]"),
        (X, torch.zeros(()), "w [rows, cols]: got []"),
        (X.double(), W.double(), "got torch.float64"),
        (X.int(), W.int(), "got torch.int32"),
        (X, W.half(), "x is torch.float32 on cpu, w is torch.float16"),
        (X, W.to("meta"), "w is torch.float32 on meta"),
        (X.to("meta"), W.to("meta"), "on a CPU or a CUDA GPU: got meta"),
        (X, W.t(), "x is [3, 8], w is [5, 8]"),
        (X[:, :0], W[:0], "both at least 1: got [0, 5]"),
        (X, W[:, :0], "both at least 1: got [8, 0]"),
        (torch.zeros(8, 3).t(), W, "its strides are (1, 3)"),
        (torch.zeros(3, 16)[:, ::2], W, "its strides are (16, 2)"),
        (X, torch.zeros(8, 10)[:, ::2], "w [8, 5] has strides (10, 2)"),
        (X, torch.zeros(1, 5).expand(8, 5), "has strides (0, 1)"),
    ],
)
def test_other_operands_are_refused(x: torch.Tensor, w: torch.Tensor, found: str):
    assert found in refusal(check_operands, x, w)


@pytest.mark.parametrize(
    ("x", "w", "options", "found"),
    [
        (None, W, {}, "all_gather_matmul: x: got NoneType"),
        (X, [W] * 65, {}, "all_gather_matmul: w: got 65 weights"),
        (np.zeros((3, 8)), W, {}, "x: got ndarray"),
        (X.to_sparse(), W, {}, "its layout is torch.sparse_coo"),
        (X, W, {"m": 3.0}, "m: got float. Pass int or None"),
        (X, W, {"m": "3"}, "m: got str"),
        (X, W, {"m": True}, "m: got bool. Pass int or None"),
        (X, W, {"plan": 3}, "plan: got int"),
        (X, W, {"plan": ["push"]}, "plan: got list"),
        (X, W, {"return_gathered": None}, "return_gathered: got NoneType. Pass bool"),
        (X, W, {"bias": [1.0]}, "bias: got list. Pass Tensor or None"),
        (X, W, {"residual": X.to_sparse()}, "residual: its layout is torch.sparse_coo"),
        (X, W, {"activation": torch.nn.functional.silu}, "activation: got function. Pass str or None"),
        (X, W, {"out_dtype": "bfloat16"}, "out_dtype: got str. Pass dtype or None"),
    ],
)
def test_other_kinds_are_refused(x: object, w: object, options: dict[str, object], found: str):
    with pytest.raises(InputError) as caught:
        check_kinds(OPERATOR, {"x": x, "w": w, **options})
    assert caught.value.cure
    assert found in str(caught.value)
