"""Gated activations between the two matmuls of experts: as models write them."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from overweave.errors import InputError
from overweave.moe import GPT_OSS, Glu, experts_matmul
from overweave.moe.glu import gated


def products(rows: int = 5, inner: int = 6) -> torch.Tensor:
    return 8 * torch.randn(rows, 2 * inner, generator=torch.Generator().manual_seed(0))


def test_the_gate_of_gpt_oss():
    h = products()
    gate, up = h[:, ::2].clamp(max=7.0), h[:, 1::2].clamp(-7.0, 7.0)  # as its model in Transformers has it
    torch.testing.assert_close(gated(h, GPT_OSS), (up + 1) * gate * torch.sigmoid(gate * 1.702))


def test_the_gate_of_mixtral():
    h = products()
    gate, up = h.chunk(2, -1)
    torch.testing.assert_close(gated(h, Glu()), torch.nn.functional.silu(gate) * up)


@pytest.mark.slow
@pytest.mark.parametrize("glu", [Glu(activation="gelu_tanh"), GPT_OSS])
def test_a_compiler_reads_it(glu: Glu):
    h = products()
    torch.testing.assert_close(torch.compile(gated, fullgraph=True, backend="aot_eager")(h, glu), gated(h, glu))


@pytest.mark.parametrize("glu", [Glu(activation="gelu"), Glu(activation="gelu", interleaved=True), GPT_OSS])
@pytest.mark.parametrize(("has_bias", "lies_as_k_n"), [*product((False, True), repeat=2)])
def test_packed_weights_are_gated_as_they_lie(glu: Glu, has_bias: bool, lies_as_k_n: bool):
    draw = torch.Generator().manual_seed(1)
    x, w = 4 * torch.randn(4, 3, generator=draw), 4 * torch.randn(2, 8, 3, generator=draw)
    w = w.transpose(1, 2).contiguous().transpose(1, 2) if lies_as_k_n else w
    bias = torch.randn(2, 8, generator=draw) if has_bias else None
    h, _ = experts_matmul(x, torch.tensor([[1], [0], [1], [0]]), w, bias=bias, glu=glu)
    packed = torch.cat([x[expert::2][:2] @ w[1 - expert].t() for expert in (1, 0)])
    if bias is not None:
        packed = packed + bias.repeat_interleave(2, 0)
    torch.testing.assert_close(h, gated(packed, glu))


@pytest.mark.parametrize(
    ("glu", "told"),
    [
        ("silu", "got str"),
        (Glu(activation="relu6"), "relu6"),
        (Glu(activation="gelu", slope=2.0), "Only silu"),
        (Glu(slope=0.0), "slope '0.0'"),
        (Glu(limit="high"), "limit 'high'"),  # type: ignore[arg-type]
        (Glu(limit=-1.0), "limit '-1.0'"),
        (Glu(limit=float("nan")), "limit 'nan'"),
        (Glu(shift=float("inf")), "shift 'inf'"),
    ],
)
def test_bad_gates_are_refused(glu: object, told: str):
    x, ids, w = torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 6, 4)
    with pytest.raises(InputError, match=told):
        experts_matmul(x, ids, w, glu=glu)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="an even number"):
        experts_matmul(x, ids, w[:, :5], glu=Glu())
