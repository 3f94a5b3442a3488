"""Pairs of placements, before and behind a matmul or attention, on meshes of one dimension and of two."""

from __future__ import annotations

from itertools import product

from tests.lower.emulated import Case

PATHS = ("direct", "template", "synth")
Pair = tuple[str, ...]  # placements of the inputs in order, then of the result
SPREAD = ("R", "S0", "S1")
ONE = [*product(SPREAD, SPREAD, SPREAD), ("S1", "S0", "P")]
ONE += [(*pair, y) for pair in (("P", "R"), ("R", "P")) for y in (*SPREAD, "P")]
TWO = [
    ("S0 R", "R S1", "S0 S1"),
    ("S0 S1", "S0 S1", "S0 S1"),
    ("S0 S0", "S1 S1", "S1 S1"),
    ("S0 S0", "R R", "R R"),
    ("S1 S1", "S0 S0", "S0 S0"),
    ("S1 S1", "S0 S0", "R R"),
    ("S0 S1", "R S0", "S0 S0"),
    ("S0 S1", "R S0", "S0 R"),
    ("S1 S0", "S0 R", "P S0"),
    ("R R", "S1 S1", "S0 S0"),
    ("R R", "R R", "S0 S1"),
    ("P R", "R S1", "R S1"),
    ("P P", "R R", "S0 S1"),
    ("P S0", "R R", "S0 S0"),
    ("R P", "S0 R", "S1 R"),
    ("S1 R", "S0 S1", "S1 S0"),
    ("S0 S1", "S1 S0", "S1 S0"),
    ("S1 S0", "S1 S0", "R S0"),
    ("R S0", "S0 S0", "S0 S0"),
    ("S1 R", "S0 R", "P R"),
]
ATTENTION = [
    ("S2", "S2", "S2", "S2"),  # Ulysses: heads in exchange for rows, and back
    ("S2", "R", "R", "S2"),
    ("S0", "S0", "S0", "S0"),
    ("S1", "S1", "S1", "S2"),
    ("S0", "S1", "S2", "R"),
    ("R", "R", "R", "S1"),
]
ATTENTION_TWO = [
    ("S0 S2", "S0 S2", "S0 S2", "S0 S2"),
    ("S1 S2", "S1 S2", "S1 S2", "S1 S2"),
    ("S2 S2", "S2 S2", "S2 S2", "S2 S2"),
    ("S2 S0", "R S0", "R S0", "S1 S0"),
]


def cases(pairs: list[Pair], path: str) -> list[Case]:
    names = ("x", "w") if len(pairs[0]) == 3 else ("q", "k", "v")
    return [(dict(zip(names, pair, strict=False)), pair[-1], path) for pair in pairs]
