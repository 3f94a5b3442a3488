"""Which back ends can carry which exchange of a kernel's tensor, and why the others cannot.

What a schedule knows is judged here, before anything is planned; what a kernel's text adds, by the compiler; alignment,
residency and races, by the proof of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator

from overweave.errors import InputError
from overweave.schedules.communication import CARRYING_TILES, COPYING_KERNELS, Mover

MOVERS: tuple[Mover, ...] = ("copy_engine", *COPYING_KERNELS, *CARRYING_TILES)  # type: ignore[assignment]
GATHERS = ("push", "receive")

_PULLS = "a peer's shard is there only once the peer has said so, and what kernels carry waits for nothing"
_SUMS = "what travels on are sums, which no tile stores"
_REGISTERS = "a tile is stored from registers, and its rows are no longer than it is wide: too short for bulk copies"


def obstacle(method: str, mover: Mover) -> str:
    """Why a back end cannot carry an exchange; empty if it can. method: the second word of a schedule's name."""
    if mover == "copy_engine" or method in GATHERS:
        return ""
    if method == "pull":
        return _PULLS
    if method == "ring":
        return _SUMS
    return _REGISTERS if mover == "bulk_tiles" else ""


def check_mover(name: str, method: str, mover: Mover) -> None:
    """Raises InputError, with the reason, for a back end that cannot carry the exchange `name`."""
    if found := obstacle(method, mover):
        raise InputError(f"{name} mover={mover}", found, f"Use mover={'|'.join(legal(method))}")


def legal(method: str) -> Iterator[Mover]:
    """The back ends that can."""
    return (mover for mover in MOVERS if not obstacle(method, mover))
