"""The shape argument: `M,N,K` of the global matmul, before tensor parallelism."""

from __future__ import annotations

import typer

from overweave.errors import InputError
from overweave.ir.operators.record import Operator
from overweave.ir.schedule import LIMIT
from overweave.tuner.space.shapes import ShapeCase

SHAPE_HELP = "M,N,K of the global matmul, before tensor parallelism; M,N1+N2,K of several weights"
AFTER_HELP = "What happens to the product: bias+silu+residual, gate+silu, residual+rms_norm, ..."


def case_of(shape: str, after: str = "", least_rows: int = 0) -> ShapeCase:
    """Return the case of `M,N,K` or `M,N1+N2,K`. Raises InputError."""
    words = [word.strip() for word in shape.split(",")]
    m, columns, k = (words[0], words[1].split("+"), words[2]) if len(words) == 3 else ("", [], "")
    are_sizes = bool(columns) and all(_is_size(word, 1) for word in (*columns, k)) and _is_size(m, least_rows)
    if not are_sizes:
        found = f"not three numbers, m {least_rows} to {LIMIT}, n and k 1 to {LIMIT}"
        raise InputError(f"shape {shape[:60]!r}", found, "Write for example --shape 8192,14336,4096")
    widths = tuple(map(int, columns))
    name = f"{m}x{'+'.join(columns)}x{k}{f' {after}' if after else ''}"
    return ShapeCase(name, int(m), sum(widths), int(k), widths if len(widths) > 1 else (), after)


def _is_size(word: str, least: int) -> bool:
    return word.isascii() and word.isdecimal() and len(word) < 11 and least <= int(word) <= LIMIT


def report_rounding(operator: Operator, case: ShapeCase, world_size: int) -> None:
    """Print to the error stream how a shape that ranks do not divide is rounded up."""
    wholes = {"m": (case.m,), "n": case.columns or (case.n,), "k": (case.k,)}
    for whole in wholes[operator.split] if operator.split else ():
        if whole % world_size:
            rounded = -(-whole // world_size)
            typer.echo(
                f"{operator.split}={whole} does not divide by {world_size} ranks: each is taken to have {rounded}",
                err=True,
            )
