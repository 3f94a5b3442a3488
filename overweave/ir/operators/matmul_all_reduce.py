"""`all_reduce(x @ w)`: each rank multiplies its part of the reduced axis; every rank gets the whole sum."""

from __future__ import annotations

from overweave.ir.operators.record import CallMatrix, Forms, Operator, SizeRule

OPERATOR = Operator(
    name="matmul_all_reduce",
    summary="all_reduce(x @ w)",
    x=CallMatrix("x", ("m", "k"), "sharded", "k"),
    w=CallMatrix("w", ("k", "n"), "sharded", "k"),
    y=CallMatrix("y", ("m", "n"), "summed"),
    split="k",
    forms=Forms(norm=True, several_products=True),
    reference=lambda tensors, by: by.all_reduce(by.matmul(tensors["x"], tensors["w"])),
    size_rule=SizeRule("two_shot", "sequential"),
    dual="",
    baselines=("torch.one_shot", "torch.two_shot", "decomposed"),
)
