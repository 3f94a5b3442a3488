"""`all_to_all(x @ w)`: sends rows back to the ranks that they came from (the combine of mixture of experts)."""

from __future__ import annotations

from overweave.ir.operators.record import CallMatrix, Forms, Operator, SizeRule

OPERATOR = Operator(
    name="matmul_all_to_all",
    summary="all_to_all(x @ w)",
    x=CallMatrix("x", ("m", "k"), "sharded"),
    w=CallMatrix("w", ("k", "n"), "sharded", "n"),
    y=CallMatrix("y", ("m", "n"), "exchanged"),
    split=None,
    forms=Forms(epilogue=False, scaling=False),
    reference=lambda tensors, by: by.all_to_all(by.matmul(tensors["x"], tensors["w"])),
    size_rule=SizeRule("push", "per_peer"),
    dual="all_to_all_matmul",
    baselines=("per_peer", "decomposed"),
)
