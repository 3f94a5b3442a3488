"""Which back ends can carry which exchange of a kernel's tensor, and why the others cannot.

What a schedule knows is judged here, before anything is planned; what a kernel's text adds, by the compiler; alignment,
residency and races, by the proof of the plan.
"""

from __future__ import annotations

from typing import Final

from overweave.errors import ScheduleError
from overweave.schedules.communication import CARRYING_TILES, COPIES, COPYING_KERNELS, PUSHES, TILES, Mover
from overweave.schedules.moves.moves import AUTO, MOST_LANES, Box, Get, Put, Written

MOVERS: tuple[Mover, ...] = ("copy_engine", *COPYING_KERNELS, *CARRYING_TILES)

ENGINE: Final = "copy_engine"
PULLS = "a peer's shard is there only once the peer has said so, and what kernels carry waits for nothing"
REGISTERS = "a tile is stored from registers, and its rows are no longer than it is wide: too short for bulk copies"
FORWARDS = "what ranks pass on would wait for tiles of peers, which wait for what is passed on"
_OPEN = "it is left open, and only compile_auto chooses"
_COLUMNS = "kernels move whole rows"
_TRAVELS = "it has to arrive first, and what kernels carry waits for nothing but tiles of its own rank"
_AFTER = "it comes after another move, and what kernels carry waits for nothing but tiles of its own rank"


def check_ends(asked: str, move: Put | Get, world_size: int) -> None:
    """Raises ScheduleError for a move that is not between two ranks, or in no lane."""
    ranks, lanes = range(world_size), max(MOST_LANES, world_size)
    if move.rank not in ranks or move.peer not in ranks or move.rank == move.peer:
        raise ScheduleError(asked, f"it moves between ranks {move.rank} and {move.peer}", "Name two ranks of the group")
    if not 0 <= move.lane < lanes:
        raise ScheduleError(asked, f"lane {move.lane}", f"Use lanes 0 to {lanes - 1}")


def several_lanes(written: Written) -> bool:
    """Whether the moves of the copy engine are in several lanes."""
    moves = (move for move in written.moves if isinstance(move, Put | Get) and move.mover == ENGINE)
    return len({move.lane for move in moves}) > 1


def queue_of(move: Put | Get, has_lanes: bool) -> str:
    """Where a move of a list stands. has_lanes: whether those of the copy engine are in several lanes."""
    if move.mover in COPYING_KERNELS:
        return PUSHES
    if move.mover in CARRYING_TILES:
        return TILES
    return f"{COPIES}.{move.lane}" if has_lanes else COPIES


def move_obstacle(move: Put | Get, box: Box, whole: Box, is_own: bool, is_written: bool) -> str:
    """Why its back end cannot carry a move of a list; empty if it can.

    is_own: nothing of it has come from a peer. is_written: tiles write what moves.
    """
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
    if move.after:
        return _AFTER
    return REGISTERS if is_written and move.mover == "bulk_tiles" else ""
