"""A shape as command lines give it: `M,N,K` of the global matmul, before tensor parallelism splits it."""

from __future__ import annotations

import typer

from overweave.errors import InputError
from overweave.ir.operators.record import Dim
from overweave.ir.operators.registry import operator_of
from overweave.ir.problem import Problem
from overweave.ir.schedule import LIMIT

SHAPE_HELP = "M,N,K of the global matmul, before tensor parallelism; M,N1+N2,K of several weights"


def problem_of_shape(operator: str, shape: str, world_size: int) -> Problem:
    """One rank's problem for the global `M,N,K`, in bf16. Raises InputError."""
    sizes = local_shape(operator, shape, world_size)
    return Problem(operator=operator, world_size=world_size, dtype="bfloat16", m=sizes["m"], n=sizes["n"], k=sizes["k"])


def local_shape(operator: str, shape: str, world_size: int) -> dict[Dim, int]:
    """`m`, `n` and `k` of one rank's matmul from `M,N,K` of the global one. Raises InputError.

    Where ranks do not divide it, each has as much as the first, as `tuner.shapes.Case` splits it.
    """
    sizes = _sizes(shape)
    if world_size < 1:
        raise InputError(f"shape {shape} for {operator}", f"{world_size} ranks", "Give at least one")
    return {size: -(-sizes[size] // parts) for size, parts in operator_of(operator).parts(world_size).items()}


def _sizes(shape: str) -> dict[Dim, int]:
    return dict(zip(("m", "n", "k"), three_numbers(shape), strict=True))


def tell_of_rounding(operator: str, shape: str, world_size: int) -> None:
    """Says on the error stream what a shape that ranks do not divide is taken for."""
    split = operator_of(operator).split
    if split is None:
        return
    for each in shapes_of(shape):
        whole = _sizes(each)[split]
        if whole % world_size:
            own = -(-whole // world_size)
            typer.echo(f"{split}={whole} does not divide by {world_size} ranks: each is taken to have {own}", err=True)


def three_numbers(shape: str, least: int = 0) -> tuple[int, int, int]:
    """`M,N,K`, each `least` or more and of 31 bits. Raises InputError."""
    words = [word.strip() for word in shape.split(",")]
    are_numbers = all(word.isascii() and word.isdecimal() and len(word) < 11 for word in words)
    if len(words) != 3 or not are_numbers or not all(least <= int(word) <= LIMIT for word in words):
        found = f"not three numbers, each {least} to {LIMIT}"
        raise InputError(f"shape {shape[:60]!r}", found, "Write for example --shape 8192,14336,4096")
    m, n, k = map(int, words)
    return m, n, k


def shapes_of(shape: str) -> list[str]:
    """`M,N1+N2,K` as a shape for each weight; what is no shape, as it is."""
    words = shape.split(",")
    parts = words[1].split("+") if len(words) == 3 else []
    if not all(part.strip() for part in parts):
        return [shape]
    return [f"{words[0]},{part},{words[2]}" for part in parts] or [shape]
