"""`all_reduce(x @ w)`: each rank multiplies its part of the reduced axis; every rank gets the whole sum."""

from __future__ import annotations

from overweave.ir.operators.record import Bar, CallMatrix, Cases, Forms, Operator, SizeRule

_LAYERS = r"Llama-3-(8B|70B)\.(o|down)\."  # where an all-reduce follows a matmul
_PREFILL = Cases(label="1,024 to 8,192 tokens", shapes=_LAYERS, least_m=1024, most_m=8192)
_DECODING = Cases(label="1 to 256 tokens", shapes=_LAYERS, most_m=256)

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
    bars=(
        Bar(of="against_library", cases=_PREFILL, mean=1.4),
        Bar(of="against_best", cases=_DECODING, mean=1.15),
    ),
)
