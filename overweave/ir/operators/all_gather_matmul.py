"""`all_gather(x) @ w`: gathers rows before its matmul."""

from __future__ import annotations

from overweave.ir.operators.record import CallMatrix, Demo, Forms, Operator, SizeRule

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
    # The first half of an MLP with 8,192 tokens, hidden 4,096 and 14,336.
    demo=Demo("push", m=8192, n=3584, k=4096),
)
