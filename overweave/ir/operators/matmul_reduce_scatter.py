"""`reduce_scatter(x @ w)`: each rank multiplies its part of the reduced axis, and gets its rows of the sum."""

from __future__ import annotations

from overweave.ir.operators.record import CallMatrix, Demo, Forms, Operator, SizeRule

OPERATOR = Operator(
    name="matmul_reduce_scatter",
    summary="reduce_scatter(x @ w)",
    x=CallMatrix("x", ("m", "k"), "sharded", "k"),
    w=CallMatrix("w", ("k", "n"), "sharded", "k"),
    y=CallMatrix("y", ("m", "n"), "summed", "m"),
    split="k",
    forms=Forms(norm=True, several_products=True),
    reference=lambda tensors, by: by.reduce_scatter(by.matmul(tensors["x"], tensors["w"])),
    # MEASURED: own_pieces 1, 2, 4 give 613.5, 606.3, 605.2 us, geometric mean over mlp, W=4 (4 x H200, 2026-11-20).
    size_rule=SizeRule("scatter", "sequential", {"own_pieces": 4}),
    dual="all_gather_matmul",
    baselines=("torch.fused", "per_shard", "decomposed"),
    # The second half of an MLP with 8,192 tokens, hidden 4,096 and 14,336.
    demo=Demo("scatter", m=8192, n=4096, k=3584),
)
