"""Whether the rows of a product are multiplied by their own scales: in the schedule, and where the kernel looks."""

from __future__ import annotations

from collections.abc import Mapping

from overweave.ir.dtype import Dtype
from overweave.ir.operators.forms import SCALE_DTYPE
from overweave.ir.plan import Plan
from overweave.ir.schedule import INPUT, Buffer, Compute
from overweave.ir.tensors import scale_of
from overweave.ir.verify.rules.values import UNKNOWN, RegionValue, clipped
from overweave.ir.verify.rules.verdict import Findings


def check_shapes(compute: Compute, findings: Findings) -> None:
    """One column beside each part of `a`, on its own rank."""
    if compute.scales and len(compute.scales) != len(compute.a):
        said = f"{len(compute.scales)} columns of scales for {len(compute.a)} parts of `a`"
        findings.add("form", compute, said, compute.scales[0])
        return
    for part, scales in zip(compute.a if compute.scales else (), compute.scales, strict=True):
        if scales.rank != compute.rank:
            findings.add("ownership", compute, "its scales must lie on its own rank", scales)
        if scales.shape != (part.shape[0], 1):
            findings.add("form", compute, f"{scales} does not hold one scale for each row of {part}", scales)


def mismatch(a: RegionValue, scales: RegionValue) -> str:
    """Why a column does not hold the scales of the rows of `a`; empty if it does, or if either is unknown.

    Who has a range of `a`'s columns has scales of its own: element `[i, j]` of them is of row i, from column j on.
    """
    if any(piece.tensor == UNKNOWN for piece in (*a, *scales)):
        return ""
    for piece in a:
        for held in clipped(scales, (piece.lo_i, piece.hi_i), (0, 1)):
            wanted = (scale_of(piece.tensor), piece.row + held.lo_i, piece.col - piece.lo_j, ())
            if (held.tensor, held.row, held.col, held.terms) != wanted:
                found = f"{'a sum of ' if held.terms else ''}{held.tensor}[{held.row},{held.col}]"
                return f"scales by {found} where it needs {wanted[0]}[{wanted[1]},{wanted[2]}]"
    return ""


def check_scaling(plan: Plan, findings: Findings) -> None:
    """Every Compute has scales of its rows if the epilogue multiplies by them, and none otherwise."""
    wanted = plan.problem.epilogue.scaling == "rows"
    for operation in plan.schedule.operations:
        if isinstance(operation, Compute) and wanted != bool(operation.scales):
            said = "has no scales of its rows" if wanted else "has scales of its rows, which no epilogue applies"
            findings.add("form", operation, said)


def check_places(compute: Compute, buffers: Mapping[str, Buffer], dtype: Dtype, findings: Findings) -> None:
    """The kernel reads fp32 scales beside the rows of `a`: of the own shard, or in the workspace, at the same row."""
    for part, scales in zip(compute.a if compute.scales else (), compute.scales, strict=True):
        buffer = buffers[scales.buffer]
        if (buffer.home == INPUT) != (buffers[part.buffer].home == INPUT) or scales.rows != part.rows:
            findings.add("lowering", compute, f"the kernel looks for scales beside {part}", scales)
        if (buffer.dtype or dtype, buffer.cols) != (SCALE_DTYPE, 1):
            said = f"scales are {buffer.cols} columns of {buffer.dtype or dtype}; the kernel reads one of {SCALE_DTYPE}"
            findings.add("lowering", compute, said, scales)
