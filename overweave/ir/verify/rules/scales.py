"""Whether the rows of a product are multiplied by their own scales: in the schedule, and where the
kernel reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

from overweave.ir.dtype import Dtype
from overweave.ir.operators.forms import SCALE_DTYPE
from overweave.ir.plan import Plan
from overweave.ir.schedule import INPUT, Buffer, Compute
from overweave.ir.tensors import scale_of
from overweave.ir.verify.rules.values import UNKNOWN, RegionValue, clip
from overweave.ir.verify.rules.verdict import Findings


def check_shapes(compute: Compute, findings: Findings) -> None:
    """Check that each part of `a` has one column of scales, on its own rank."""
    if compute.scales and len(compute.scales) != len(compute.a):
        message = f"{len(compute.scales)} columns of scales for {len(compute.a)} parts of `a`"
        findings.add("form", compute, message, compute.scales[0])
        return
    for part, scales in zip(compute.a if compute.scales else (), compute.scales, strict=True):
        if scales.rank != compute.rank:
            findings.add("ownership", compute, "its scales must lie on its own rank", scales)
        if scales.shape != (part.shape[0], 1):
            findings.add("form", compute, f"{scales} does not hold one scale for each row of {part}", scales)


def scale_mismatch(a: RegionValue, scales: RegionValue) -> str:
    """Return why a column does not hold the scales of the rows of `a`; "" if it does, or if either is unknown. A rank
    with a range of `a`'s columns has scales of its own: element `[i, j]` of them is of row i, from column j on."""
    if any(piece.tensor == UNKNOWN for piece in (*a, *scales)):
        return ""
    for piece in a:
        for scale in clip(scales, (piece.lo_i, piece.hi_i), (0, 1)):
            expected = (scale_of(piece.tensor), piece.row + scale.lo_i, piece.col - piece.lo_j, ())
            if (scale.tensor, scale.row, scale.col, scale.terms) != expected:
                actual = f"{'a sum of ' if scale.terms else ''}{scale.tensor}[{scale.row},{scale.col}]"
                return f"scales by {actual} where it needs {expected[0]}[{expected[1]},{expected[2]}]"
    return ""


def check_scaling(plan: Plan, findings: Findings) -> None:
    """Check that every Compute has scales of its rows if the epilogue multiplies by them, and none otherwise."""
    needs_scales = plan.problem.epilogue.scaling == "rows"
    for operation in plan.schedule.operations:
        if isinstance(operation, Compute) and needs_scales != bool(operation.scales):
            message = (
                "has no scales of its rows" if needs_scales else "has scales of its rows, which no epilogue applies"
            )
            findings.add("form", operation, message)


def check_scale_rows(compute: Compute, buffers: Mapping[str, Buffer], dtype: Dtype, findings: Findings) -> None:
    """Check that fp32 scales lie beside the rows of `a`: of the own shard, or in the workspace, at the same row."""
    for part, scales in zip(compute.a if compute.scales else (), compute.scales, strict=True):
        buffer = buffers[scales.buffer]
        if (buffer.home == INPUT) != (buffers[part.buffer].home == INPUT) or scales.rows != part.rows:
            findings.add("lowering", compute, f"the kernel looks for scales beside {part}", scales)
        if (buffer.dtype or dtype, buffer.cols) != (SCALE_DTYPE, 1):
            message = (
                f"scales are {buffer.cols} columns of {buffer.dtype or dtype}; the kernel reads one of {SCALE_DTYPE}"
            )
            findings.add("lowering", compute, message, scales)
