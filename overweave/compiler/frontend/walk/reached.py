"""What a walk through a kernel finds."""

from __future__ import annotations

from msgspec import Struct

from overweave.compiler.frontend.symbols.directives import AccessDirective, StreamDirective
from overweave.compiler.frontend.symbols.polynomials import (
    Polynomial,
)
from overweave.compiler.frontend.symbols.values import (
    Condition,
    SymbolicValue,
)
from overweave.compiler.frontend.walk.evaluate import Arguments


class Reached(Struct, frozen=True):
    """A load or store. said: its directive, if it has one. place: a pointer or descriptor. given: of the call.

    guard: what must hold for it to be reached. line: of the call. within: the loops around it whose turns come in
    another order than the kernel's, of tiles or of a streamed axis.
    """

    said: AccessDirective | None
    kind: str
    place: SymbolicValue
    given: Arguments
    guard: Condition
    line: int
    within: frozenset[str]


class Begun(Struct, frozen=True):
    """Where a streamed loop begins."""

    said: StreamDirective
    low: Polynomial


class Followed(Struct, frozen=True):
    """Everything that a tile reaches, the regions whose blocks are not those of the first by their lines, and where
    streamed loops begin."""

    reached: tuple[Reached, ...]
    other_blocks: tuple[int, ...]
    begun: tuple[Begun, ...]
