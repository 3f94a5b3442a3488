"""`all_reduce(x @ w)`: each rank's part of the reduced axis, and all of the sum on every rank."""

from __future__ import annotations

from overweave.ir.operators.record import Forms, Operand, Operator, SizeRule

OPERATOR = Operator(
    name="matmul_all_reduce",
    summary="all_reduce(x @ w)",
    x=Operand("x", ("m", "k"), "sharded", "k"),
    w=Operand("w", ("k", "n"), "sharded", "k"),
    y=Operand("y", ("m", "n"), "summed"),
    split="k",
    forms=Forms(norm=True),
    reference=lambda tensors, by: by.all_reduce(by.matmul(tensors["x"], tensors["w"])),
    size_rule=SizeRule("two_shot", "sequential"),
    dual="",
    baselines=("torch.one_shot", "torch.two_shot", "decomposed"),
)
