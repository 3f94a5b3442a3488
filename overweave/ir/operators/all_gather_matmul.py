"""`all_gather(x) @ w`: gathers rows before its matmul."""

from __future__ import annotations

from overweave.ir.operators.record import (
    LINK_BOUND,
    MLP,
    SHARDED,
    Bar,
    CallMatrix,
    Cases,
    Demo,
    Forms,
    Operator,
    SizeRule,
)

_NO_MLP = "(?!MLP-)"
_MANY_ROWS = Cases(label="other shapes of 4,096 rows on", shapes=_NO_MLP, least_m=4096, link_bound=False)
_FEW_ROWS = Cases(label="fewer rows", shapes=_NO_MLP, most_m=4095, link_bound=False)

OPERATOR = Operator(
    name="all_gather_matmul",
    summary="all_gather(x) @ w",
    x=CallMatrix("x", ("m", "k"), "gathered", "m"),
    w=CallMatrix("w", ("k", "n"), "sharded", "n"),
    y=CallMatrix("y", ("m", "n"), "sharded", "n"),
    split="n",
    forms=Forms(gate=True, several_weights=True, returns_gathered=True),
    reference=lambda tensors, by: by.matmul(by.all_gather(tensors["x"]), tensors["w"]),
    size_rule=SizeRule("push", "per_shard"),
    dual="matmul_reduce_scatter",
    baselines=("torch.fused", "per_shard"),
    bars=(
        Bar(of="of_ceiling", cases=MLP, mean=1.03, each=1.05),
        Bar(of="efficiency", cases=MLP, mean=0.88, each=0.8),
        Bar(of="of_ceiling", cases=_MANY_ROWS, mean=1.04),
        Bar(of="beyond_ceiling_us", cases=_FEW_ROWS, each=12.0),
        Bar(of="of_communication", cases=LINK_BOUND, each=1.12),
        *SHARDED,
    ),
    # The first half of an MLP with 8,192 tokens, hidden 4,096 and 14,336.
    demo=Demo("push", m=8192, n=3584, k=4096),
)
