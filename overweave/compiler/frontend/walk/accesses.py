"""The results of a walk through a kernel: its loads and stores, as data."""

from __future__ import annotations

from msgspec import Struct

from overweave.compiler.frontend.symbols.directives import AccessDirective, StreamDirective
from overweave.compiler.frontend.symbols.polynomials import Polynomial
from overweave.compiler.frontend.symbols.values import Condition, SymbolicValue
from overweave.compiler.frontend.walk.evaluate import Arguments


class Reached(Struct, frozen=True):
    """A load or store. address: a pointer or descriptor. arguments: of the call, positional and by keyword.

    guard: the condition under which it runs. reordered_loops: what comes in another order around it: TILES, and the
    streamed axis whose loop it stands in. line: in the kernel's file; of what calls it if it stands in another.
    """

    directive: AccessDirective | None
    kind: str
    address: SymbolicValue
    arguments: Arguments
    guard: Condition
    line: int
    reordered_loops: frozenset[str]
    is_in_helper: bool


class Begun(Struct, frozen=True):
    """The first index `low` of a streamed loop."""

    directive: StreamDirective
    low: Polynomial


class Followed(Struct, frozen=True):
    """All loads and stores of a tile, and where streamed loops begin. mismatches: first lines of the dispatch
    regions that compute other blocks than the first region does."""

    accesses: tuple[Reached, ...]
    mismatches: tuple[int, ...]
    loop_starts: tuple[Begun, ...]
