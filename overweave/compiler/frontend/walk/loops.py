"""Loops of a kernel as its walk sees them: their turns, and what goes on in them by a step."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from overweave.compiler.frontend.symbols.polynomials import (
    BlockOf,
    LoopIndex,
    Polynomial,
    one,
    tags_of,
)
from overweave.compiler.frontend.symbols.values import (
    CARRIED,
    NUMBERED,
    Constant,
    Descriptor,
    Number,
    SymbolicValue,
    comes_from,
    unknown,
)

TILES = "tiles"


class Loop:
    """A loop: its variable, the number of its turn, how many turns there are. is_guard: what stands in it is reached
    where there are any."""

    def __init__(
        self,
        line: int,
        count: Polynomial,
        variable: SymbolicValue | None = None,
        turn: Polynomial | None = None,
        is_of_tiles: bool = False,
        is_guard: bool = False,
        is_streamed: bool = False,
    ) -> None:
        self.count, self.is_of_tiles, self.is_guard, self.is_streamed = count, is_of_tiles, is_guard, is_streamed
        self.variable = Constant(None) if variable is None else variable
        self.turn = one(LoopIndex(line, count)) if turn is None else turn

    @property
    def reordered(self) -> frozenset[str]:
        """What it walks, if that comes in another order than the kernel's."""
        if self.is_of_tiles:
            return frozenset({TILES})
        atoms = self.variable.poly.atoms if isinstance(self.variable, Number) and self.is_streamed else frozenset()
        return frozenset(atom.axis for atom in atoms if isinstance(atom, BlockOf))

    @property
    def tags(self) -> frozenset[str]:
        """What a variable comes from that goes on in it, in whatever way."""
        return tags_of(self.count) | {CARRIED} | ({NUMBERED} if self.is_of_tiles else set())


def marked(name: str, value: SymbolicValue) -> SymbolicValue:
    if isinstance(value, Descriptor):
        offsets = tuple(unknown(name, tags=frozenset({CARRIED})).poly for _ in value.offsets)
        return replace(value, offsets=offsets)
    rank = value.rank if isinstance(value, Number) else 0
    return Number(unknown(name, tags=frozenset({CARRIED})).poly, rank)


def step_of(mark: SymbolicValue, after: SymbolicValue, loop: Loop) -> Any:
    if mark == after:
        return ()
    if isinstance(mark, Number) and isinstance(after, Number) and mark.rank == after.rank:
        pairs = [(mark.poly, after.poly)]
    elif isinstance(mark, Descriptor) and isinstance(after, Descriptor):
        pairs = list(zip(mark.offsets, after.offsets, strict=False))
    else:
        return None
    steps = tuple(new - old for old, new in pairs)
    turning = loop.turn.atoms - loop.count.atoms
    is_even = all(CARRIED not in comes_from(Number(one)) and not one.atoms & turning for one in steps)
    return steps if is_even else None


def after_turns(value: SymbolicValue, step: Any, loop: Loop, turns: Polynomial) -> SymbolicValue:
    """A variable after so many turns."""
    if step == ():
        return value
    if isinstance(value, Descriptor) and step is not None:
        offsets = tuple(old + turns * by for old, by in zip(value.offsets, step, strict=True))
        return replace(value, offsets=offsets)
    if isinstance(value, Number) and step is not None:
        return Number(value.poly + turns * step[0], value.rank)
    rank = value.rank if isinstance(value, Number) else 0
    return Number(unknown("a sum", tags=comes_from(value) | loop.tags).poly, rank)
