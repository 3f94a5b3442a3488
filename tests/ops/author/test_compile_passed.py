"""What a call of a compiled kernel is told of the tensors that it passes."""

from __future__ import annotations

from overweave.ir.footprint import Dim, Operand
from overweave.ops.author.arguments import expected_rows


def test_whose_rows_are_asked_for_and_how():
    operand = Operand("Y", "y_ptr", (Dim(32), Dim(8)))
    assert expected_rows(operand, 16)[0] == "this rank's"
    assert "torch.chunk" in expected_rows(operand, 16)[1]
    assert expected_rows(operand, 32) == ("all", "Pass all of it, contiguous")
    whole, cure = expected_rows(operand, 96)
    assert whole == "every rank's 32 rows, all"
    assert "numbers are those of what one rank writes" in cure
