"""Which back ends can carry which exchange of a kernel's tensor, and why the others cannot.

What a schedule knows is judged here, before anything is planned; what a kernel's text adds, by the compiler; alignment,
residency and races, by the proof of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from overweave.errors import ScheduleError
from overweave.ir.schedule import Notify
from overweave.schedules.communication import CARRYING_TILES, COPIES, COPYING_KERNELS, TILES, Mover
from overweave.schedules.moves.moves import AUTO, Box, Get, Put

MOVERS: tuple[Mover, ...] = ("copy_engine", *COPYING_KERNELS, *CARRYING_TILES)

ENGINE: Final = "copy_engine"
PUSHES = f"{COPIES}.kernel"  # the queue of the kernel that moves chunks
PULLS = "a peer's shard is there only once the peer has said so, and what kernels carry waits for nothing"
REGISTERS = "a tile is stored from registers, and its rows are no longer than it is wide: too short for bulk copies"
FORWARDS = "what ranks pass on would wait for tiles of peers, which wait for what is passed on"
_OPEN = "it is left open, and only compile_auto chooses"
_COLUMNS = "kernels move whole rows"
_TRAVELS = "it has to arrive first, and what kernels carry waits for nothing but tiles of its own rank"
_AFTER = "it comes after another move, and what kernels carry waits for nothing but tiles of its own rank"


def check_told(at: int, move: Put | Get, told: Sequence[Notify]) -> None:
    """Raises ScheduleError where others than the peer wait for what a kernel, or tiles, carry."""
    if move.mover != ENGINE and len(told) > 1:
        found = f"ranks {sorted({notify.rank for notify in told})} wait for it, and kernels tell the peer alone"
        raise ScheduleError(f"move {at}: carry {move.chunk} by mover={move.mover}", found, "Use mover=copy_engine")


def queue_of(move: Put | Get, has_lanes: bool) -> str:
    """Where a move of a list stands. has_lanes: whether those of the copy engine are in several lanes."""
    if move.mover in COPYING_KERNELS:
        return PUSHES
    if move.mover in CARRYING_TILES:
        return TILES
    return f"{COPIES}.{move.lane}" if has_lanes else COPIES


def move_obstacle(move: Put | Get, box: Box, whole: Box, is_own: bool) -> str:
    """Why its back end cannot carry a move of a list; empty if it can. is_own: nothing of it has come from a peer."""
    if move.mover == AUTO:
        return _OPEN
    if move.mover == ENGINE:
        return ""
    if isinstance(move, Get):
        return PULLS
    if box.cols != whole.cols:
        return _COLUMNS
    if not is_own:
        return _TRAVELS
    return _AFTER if move.after else ""
