"""The grouped matmul as callers see it on a CPU: plain torch, its gradients, a compiler's look, and what it refuses."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from overweave.errors import InputError
from overweave.moe import grouped_matmul
from overweave.moe.grouped import grouped_outer
from overweave.runtime.library.grouped import Grouped, aligned

ENDS = (3, 3, 10, 25, 28)
ROWS, K, N, TOKENS = 30, 12, 10, 17
ACTIVATIONS: dict[str | None, Any] = {
    None: lambda value: value,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda value: functional.gelu(value, approximate="tanh"),
}


def offs(*ends: int) -> torch.Tensor:
    return torch.tensor(ends or ENDS, dtype=torch.int32)


def operands(**of: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, K, **of), torch.randn(len(ENDS), K, N, **of)


def by_pairs(x: torch.Tensor, w: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """A loop over rows, each by its expert; `into` after that."""
    act, weights, rows = ACTIVATIONS[given.get("activation")], given.get("row_weights"), given.get("rows")
    made = []
    for row in range(ENDS[-1]):
        expert = next(e for e, end in enumerate(ENDS) if row < end)
        own = x[row if rows is None else rows[row].long()]
        value = own @ w[expert]
        biases = given.get("bias", torch.zeros(len(ENDS), 2 * N))[expert].view(-1, N)
        value = value + biases[0]
        if given.get("gate") is not None:
            limit, slope, shift = given.get("gating") or (math.inf, 1.0, 0.0)
            gate = (own @ given["gate"][expert] + biases[1]).clamp(max=limit)
            gate = gate * torch.sigmoid(slope * gate) if slope != 1 else act(gate)
            value = (value.clamp(-limit, limit) + shift) * gate
        else:
            value = act(value)
        made.append(value if weights is None else value * weights[row])
    y = torch.stack(made)
    if given.get("into") is None:
        return y
    return torch.zeros(ROWS, N, dtype=y.dtype).index_copy(0, given["into"][: ENDS[-1]].long(), y)


GATES = {
    "plain": (("bias",), None),
    "gated": (("gate",), None),
    "gated, with biases": (("gate", "bias"), None),
    "gated within limits": (("gate", "bias"), (2.0, 1.0, 1.0)),
    "shifted": (("gate",), (math.inf, 1.0, 0.5)),
    "of a slope": (("gate", "bias"), (2.0, 1.702, 1.0)),
}


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize(
    ("activation", "gate"),
    [each for each in product(ACTIVATIONS, GATES) if each[1] != "of a slope" or each[0] == "silu"],
)
def test_values_and_gradients_are_those_of_a_loop_over_pairs(activation: str | None, gate: str, moves: bool):
    torch.manual_seed(0)
    x = torch.randn(TOKENS if moves else ROWS, K, requires_grad=True)
    w = torch.randn(len(ENDS), K, N, requires_grad=True)
    reads, gating = GATES[gate]
    given: dict[str, Any] = {"activation": activation, "gating": gating}
    shapes = {"gate": (len(ENDS), K, N), "bias": (len(ENDS), 2, N) if "gate" in reads else (len(ENDS), N)}
    beside: dict[str, tuple[int, ...]] = {name: shapes[name] for name in reads}
    beside |= {"row_weights": (ROWS,)} if moves else {}
    given |= {name: torch.randn(shape, requires_grad=True) for name, shape in beside.items()}
    leaves = [x, w, *(given[name] for name in beside)]
    if moves:
        given |= {"rows": torch.randint(0, TOKENS, (ROWS,), dtype=torch.int32), "into": torch.randperm(ROWS).int()}
    got, want = grouped_matmul(x, w, offs(), **given), by_pairs(x, w, given)
    stored = slice(ENDS[-1]) if not moves else given["into"][: ENDS[-1]].long()
    got, want = got[stored], want[stored]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    g = torch.randn_like(got)
    for one, other in zip(torch.autograd.grad(got, leaves, g), torch.autograd.grad(want, leaves, g), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_gradients_of_rows_behind_the_last_group_are_zeros():
    x, w = operands(requires_grad=True)
    grouped_matmul(x, w, offs()).sum().backward()
    assert x.grad is not None
    assert not x.grad[ENDS[-1] :].any()
    assert x.grad[: ENDS[-1]].any(1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_meaning_is_torchs(dtype: torch.dtype):
    if not hasattr(functional, "grouped_mm"):
        pytest.skip("this torch has no grouped_mm")
    x, w = (torch.randint(-2, 3, shape).to(dtype) for shape in ((ROWS, 16), (len(ENDS), 16, 24)))
    if dtype == torch.bfloat16:
        assert torch.equal(grouped_matmul(x, w, offs())[:28], functional.grouped_mm(x, w, offs=offs())[:28])
    g = torch.randint(-2, 3, (28, 24)).to(dtype)
    outer = torch.stack([x[lo:hi].T.float() @ g[lo:hi].float() for lo, hi in zip((0, *ENDS), ENDS, strict=False)])
    assert torch.equal(grouped_outer(x[:28], g, offs()), outer.to(dtype))


@pytest.mark.slow
def test_a_compiler_sees_the_whole_of_it():
    def loss(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return grouped_matmul(x, w, ends, row_weights=weights, activation="silu").relu().sum()

    x, w = operands(requires_grad=True)
    leaves = [x, w, torch.randn(ROWS, requires_grad=True)]
    eager = torch.autograd.grad(loss(x, w, offs(28, 28, 29, 30, 30), leaves[2]), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x, w, offs(28, 28, 29, 30, 30), leaves[2]), leaves)
    for one, other in zip(eager, found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_the_fake_has_the_shapes_of_the_real_one():
    x, w = operands()
    rows = torch.zeros(50, dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.overweave.grouped_matmul.default,
        (x, w, offs(), None, None, "", rows, None, None, None, None, torch.bfloat16, ()),
        test_utils=("test_schema", "test_faketensor"),
    )


REFUSED: dict[str, dict[str, Any]] = {
    "k": {"w": torch.zeros(5, K + 1, N)},
    "dtypes": {"w": torch.zeros(5, K, N, dtype=torch.bfloat16)},
    "lists": {"offs": [3, 3, 10, 25, 28]},
    "no weights": {"w": None},
    "a number for a bias": {"bias": 5},
    "gating in words": {"gate": torch.zeros(5, K, N), "gating": ("a", 1.0, 0.0)},
    "a number type": {"x": torch.zeros(ROWS, K).long(), "w": torch.zeros(5, K, N).long()},
    "dimensions": {"x": torch.zeros(ROWS)},
    "no expert": {"w": torch.zeros(0, K, N), "offs": torch.zeros(0, dtype=torch.int32)},
    "offs of another number": {"offs": offs(1, 2)},
    "offs of int64": {"offs": offs().long()},
    "descending offs": {"offs": offs(3, 2, 10, 25, 28)},
    "negative offs": {"offs": offs(-1, 3, 10, 25, 28)},
    "offs beyond the rows": {"offs": offs(3, 3, 10, 25, 31)},
    "an unknown activation": {"activation": "relu"},
    "a bias of one product beside a gate": {"bias": torch.zeros(5, N), "gate": torch.zeros(5, K, N)},
    "gating without a gate": {"gating": (7.0, 1.0, 0.0)},
    "a slope of gelu": {"gate": torch.zeros(5, K, N), "activation": "gelu", "gating": (7.0, 2.0, 0.0)},
    "a gate that lies otherwise": {"gate": torch.zeros(5, N, K).transpose(1, 2)},
    "rows of int64": {"rows": torch.zeros(4).long()},
    "scales without fp8": {"scale_x": torch.ones(ROWS), "scale_w": torch.ones(5, N)},
    "an out_dtype": {"out_dtype": torch.int32},
    "weights of rows": {"row_weights": torch.ones(ROWS + 1)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str):
    x, w = operands()
    with pytest.raises(InputError):
        grouped_matmul(**({"x": x, "w": w, "offs": offs()} | REFUSED[name]))


def test_rows_of_all_matrices_are_laid_at_words_of_16_bytes():
    """And mean the same. What lies so is not copied."""
    x, w = torch.randn(7, 13).bfloat16(), torch.randn(2, 11, 13).bfloat16().transpose(1, 2)
    call = Grouped(x, w, offs(3, 7), torch.randn(2, 11), None, "", None, None, None, None, None, torch.bfloat16)
    laid = aligned(call)
    assert laid.x.stride(0) % 8 == 0
    assert laid.w.shape == (2, 13, 16)
    assert laid.w.stride(1) == 1
    assert laid.w.stride(2) % 8 == 0
    assert laid.w.stride(0) % laid.w.stride(2) == 0
    assert laid.bias is not None
    assert torch.equal(laid.x, x)
    assert torch.equal(laid.w[..., :11], w)
    assert not laid.w[..., 11:].any()
    assert aligned(laid).w.data_ptr() == laid.w.data_ptr()
    assert aligned(laid).x.data_ptr() == laid.x.data_ptr()
