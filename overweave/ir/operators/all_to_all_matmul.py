"""`all_to_all(x) @ w`: sends rows to the ranks that hold their weights (the dispatch of mixture of experts)."""

from __future__ import annotations

from overweave.ir.operators.record import CallMatrix, Forms, Operator, SizeRule

OPERATOR = Operator(
    name="all_to_all_matmul",
    summary="all_to_all(x) @ w",
    x=CallMatrix("x", ("m", "k"), "exchanged"),
    w=CallMatrix("w", ("k", "n"), "sharded", "n"),
    y=CallMatrix("y", ("m", "n"), "sharded", "n"),
    split=None,
    forms=Forms(epilogue=False, scaling=False),
    reference=lambda tensors, by: by.matmul(by.all_to_all(tensors["x"]), tensors["w"]),
    size_rule=SizeRule("push", "per_peer"),
    dual="matmul_all_to_all",
    baselines=("per_peer",),
)
