"""What each step of a finer-grain schedule brings to a rank, and where it lies there.

A step has one piece of the shard of every rank. What arrives in a step lies side by side, so that one matmul can read
it as it is; only a rank's own piece must be gathered there, if at all.
SOURCE: FiCCO (Design Space Exploration of DMA based Finer-Grain Compute Communication Overlap) V-A, V-B, Figure 11.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from overweave.ir.schedule import Range
from overweave.ir.shards import piece_rows
from overweave.schedules.communication import Split, is_empty


class Point(Struct, frozen=True):
    """One of the eight schedules that three choices span.

    cut: what a piece of a shard is, whole rows or whole columns. steps: uniform, each with a piece of every rank, the
    own too; hetero, the own shard first, then steps of peers' pieces. matmul: fused, one for a step; unfused, one for a
    piece.
    """

    cut: Literal["rows", "columns"]
    steps: Literal["uniform", "hetero"]
    matmul: Literal["fused", "unfused"]

    @property
    def name(self) -> str:
        """As the paper has it: 1-D of rows, 2-D of columns."""
        return f"{self.steps}_{self.matmul}_{'1d' if self.cut == 'rows' else '2d'}"


class Piece(Struct, frozen=True):
    """Rows of a rank's shard, in the whole tensor, and columns of them. Never empty.

    place: the rows of a landing buffer where the piece lies, from column 0 on; None of a rank's own that stays in x.
    """

    owner: int
    step: int
    rows: Range
    cols: Range
    place: Range | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]


class Pieces(Struct, frozen=True):
    """All pieces of a gather of `[rows, k]`. is_by_library: whether one collective brings each step."""

    point: Point
    split: Split
    k: int
    is_by_library: bool

    def cuts(self) -> tuple[Range, ...]:
        """The ranges of columns that are pieces; none of rows. Vector loads of a matmul begin where a cut does."""
        if self.point.cut == "rows":
            return ()
        whole = piece_rows((0, self.k), self.split.world_size, self.split.alignment)
        return tuple(cols for cols in whole if not is_empty(cols))

    def of_owners(self) -> list[list[Piece]]:
        """The pieces of each rank's shard, in the order in which they are sent."""
        found, cuts, size = [], self.cuts(), self.split.world_size
        for owner in range(size):
            rows, whole = self.split.shard(owner), (0, self.k)
            in_rows = piece_rows(rows, size, self.split.alignment)
            boxes = [(rows, cols) for cols in cuts] or [(piece, whole) for piece in in_rows]
            pieces = [Piece(owner, step, rows, cols) for step, (rows, cols) in enumerate(boxes)]
            found.append([piece for piece in pieces if not is_empty(piece.rows)])
        return found

    def landed(self) -> list[list[list[Piece]]]:
        """Of each rank the pieces of each step, in the order in which they lie there. No step is empty."""
        by_step: dict[int, dict[int, Piece]] = {}
        for piece in (piece for of_owner in self.of_owners() for piece in of_owner):
            by_step.setdefault(piece.step, {})[piece.owner] = piece
        steps = [by_step[step] for step in sorted(by_step)]
        return [self._placed(rank, steps) for rank in range(self.split.world_size)]

    def _placed(self, rank: int, steps: list[dict[int, Piece]]) -> list[list[Piece]]:
        """In rank order where the own piece lies among the others, else in ring order, the own one last."""
        is_uniform, is_fused = self.point.steps == "uniform", self.point.matmul == "fused"
        in_order = list(range(self.split.world_size))
        owners = in_order if is_uniform or self.is_by_library else [*self.split.peers(rank), rank]
        placed, top = [], 0
        for step in steps:
            is_joined = self.is_by_library or (is_uniform and is_fused and len(step) > 1)
            pieces = []
            for piece in (step[owner] for owner in owners if owner in step):
                is_here = piece.owner != rank or is_joined
                place = (top, top + piece.shape[0]) if is_here else None
                pieces.append(replace(piece, place=place))
                top = place[1] if place else top
            placed.append(pieces)
        return placed
