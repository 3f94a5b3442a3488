"""The loops of a symbolically interpreted kernel: iteration counts, and variables after some iterations."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from overweave.compiler.frontend.symbols.polynomials import BlockOf, LoopIndex, Polynomial, atom_poly, tags_of
from overweave.compiler.frontend.symbols.values import (
    LOOP_CARRIED,
    PROGRAM_ID,
    Condition,
    Constant,
    Descriptor,
    Number,
    SymbolicValue,
    opaque,
    value_tags,
)

TILES = "tiles"


class Loop:
    """A loop of `count` iterations. variable: its value in iteration `iteration`. is_tile_loop: the loop over tiles.

    is_guard: its body runs only if `count > 0`. is_streamed: it walks a streamed axis. test: a further condition of its
    its body, of a `while` that cannot be counted, or where another end cuts it.
    """

    def __init__(
        self,
        line: int,
        count: Polynomial,
        variable: SymbolicValue | None = None,
        iteration: Polynomial | None = None,
        is_tile_loop: bool = False,
        is_guard: bool = False,
        is_streamed: bool = False,
        test: Condition | None = None,
    ) -> None:
        self.test = test
        self.count, self.is_tile_loop, self.is_guard, self.is_streamed = count, is_tile_loop, is_guard, is_streamed
        self.variable = Constant(None) if variable is None else variable
        self.iteration = atom_poly(LoopIndex(line, count)) if iteration is None else iteration

    @property
    def reordered_loops(self) -> frozenset[str]:
        """The streamed axes that the loop walks."""
        atoms = self.variable.poly.atoms if isinstance(self.variable, Number) and self.is_streamed else frozenset()
        return frozenset(atom.axis for atom in atoms if isinstance(atom, BlockOf))

    @property
    def tags(self) -> frozenset[str]:
        """The tags of a variable that the loop updates in an unknown way."""
        return tags_of(self.count) | {LOOP_CARRIED} | ({PROGRAM_ID} if self.is_tile_loop else set())


def loop_marker(name: str, value: SymbolicValue) -> SymbolicValue:
    """Return an opaque value of the same form, whose change in an iteration `step_per_iteration` can recognise."""
    if isinstance(value, Descriptor):
        offsets = tuple(opaque(name, tags=frozenset({LOOP_CARRIED})).poly for _ in value.offsets)
        return replace(value, offsets=offsets)
    rank = value.rank if isinstance(value, Number) else 0
    return Number(opaque(name, tags=frozenset({LOOP_CARRIED})).poly, rank)


def step_per_iteration(marker: SymbolicValue, after: SymbolicValue, loop: Loop) -> Any:
    """Return by how much an iteration increases a variable (a tuple): () if not at all; its tags if not by a constant.

    marker, after: its value before and after the iteration.
    """
    if marker == after:
        return ()
    if isinstance(marker, Number) and isinstance(after, Number) and marker.rank == after.rank:
        pairs = [(marker.poly, after.poly)]
    elif isinstance(marker, Descriptor) and isinstance(after, Descriptor):
        pairs = list(zip(marker.offsets, after.offsets, strict=False))
    else:
        return value_tags(after)
    steps = tuple(new - old for old, new in pairs)
    loop_atoms = loop.iteration.atoms - loop.count.atoms
    is_constant = all(LOOP_CARRIED not in value_tags(Number(step)) and not step.atoms & loop_atoms for step in steps)
    return steps if is_constant else value_tags(after)


def after_iterations(value: SymbolicValue, step: Any, loop: Loop, iterations: Polynomial) -> SymbolicValue:
    """Return a variable after so many iterations. step: of `step_per_iteration`; tags give an opaque value."""
    if step == ():
        return value
    if isinstance(value, Descriptor) and isinstance(step, tuple):
        offsets = tuple(offset + iterations * by for offset, by in zip(value.offsets, step, strict=True))
        return replace(value, offsets=offsets)
    if isinstance(value, Number) and isinstance(step, tuple):
        return Number(value.poly + iterations * step[0], value.rank)
    rank = value.rank if isinstance(value, Number) else 0
    return Number(opaque("a sum", tags=value_tags(value) | loop.tags | step).poly, rank)
