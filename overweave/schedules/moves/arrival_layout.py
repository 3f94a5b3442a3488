"""Where addends land on every rank, until they are added: room for the rows that arrive, no more."""

from __future__ import annotations

from msgspec import Struct

from overweave.ir.schedule import Range
from overweave.schedules.communication import SLOTS, shifted, united
from overweave.schedules.moves.provenance import Carried


class ArrivalLayout(Struct, frozen=True):
    """Where what arrives lies: of each rank, only the rows for which something does; layer by layer."""

    ranges: list[tuple[Range, ...]]
    layers: int

    @classmethod
    def of(cls, carried: list[Carried], ranks: int) -> ArrivalLayout:
        beside = [one for one in carried if one.lands.buffer == SLOTS]
        ranges = [united(sorted(one.box.rows for one in beside if one.target == rank)) for rank in range(ranks)]
        return cls(ranges, max((one.lands.layer + 1 for one in beside), default=0))

    @property
    def stride(self) -> int:
        """Rows of a layer."""
        return max((sum(hi - lo for lo, hi in ranges) for ranges in self.ranges), default=0)

    @property
    def rows(self) -> int:
        return self.layers * self.stride

    def place(self, rank: int, layer: int, rows: Range) -> Range:
        first = layer * self.stride
        for lo, hi in self.ranges[rank]:
            if lo <= rows[0] and rows[1] <= hi:
                return shifted(rows, first - lo)
            first += hi - lo
        raise AssertionError(f"nothing arrives for rows {rows} on rank {rank}")
