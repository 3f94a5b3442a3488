"""What a schedule of the catalog is made of, before a problem fills it."""

from __future__ import annotations

from msgspec import Struct

from overweave.schedules.communication import Mover
from overweave.schedules.options import Option


class Template(Struct, frozen=True):
    """A named schedule: the communication it stands on, whether a tile kernel computes, and what can be asked.

    helped: a library matmul computes, and a kernel of ours moves what it needs, or adds what it made.
    mover: who carries what it moves, if that is not to be asked.
    moves_behind: its reduction kernel only moves sums, on all SMs, behind the tiles.
    """

    operator: str
    method: str
    is_fused: bool
    summary: str
    options: tuple[Option, ...] = ()
    helped: bool = False
    mover: Mover | None = None
    moves_behind: bool = False

    @property
    def has_kernels(self) -> bool:
        """Whether a kernel of ours runs, whose rows must start at multiples of 16 bytes."""
        return self.is_fused or self.helped

    @property
    def has_messages(self) -> bool:
        """Whether what moves are packed messages."""
        return self.method.endswith("packed")
