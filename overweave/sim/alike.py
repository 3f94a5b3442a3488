"""Which ranks of a group over several islands a simulation needs: those of one island, if all do the same.

Nothing but a library's collectives joins islands, so that an island needs of the others only that they have come.
Islands that are alike come at the same time: one of them, simulated alone, takes what all take together. That is exact
if islands have as many ranks each and every rank has as many rows. Where they have not, the largest island is taken,
the first of several, and every collective is taken to begin when the ranks of that island are there.
"""

from __future__ import annotations

from overweave.hardware.machine import Machine

MOST_WHOLE = 32  # ranks, up to which all of them are simulated


def ranks_to_simulate(machine: Machine, world_size: int) -> tuple[int, ...]:
    """Return the ranks whose operations a simulation needs; (): of all ranks."""
    return max(islands_among(machine, world_size), key=len, default=()) if world_size > MOST_WHOLE else ()


def islands_among(machine: Machine, world_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the islands of a machine's first ranks, as of a Problem: () if they are one."""
    among = tuple(tuple(rank for rank in island if rank < world_size) for island in machine.islands)
    there = tuple(filter(None, among))
    return there if len(there) > 1 else ()


def told(only: tuple[int, ...], world_size: int) -> str:
    """Return which ranks were simulated, as a sentence; "" for all."""
    if not only:
        return ""
    whose = f"ranks {only[0]} to {only[-1]} of {world_size}"
    return (
        f"simulated: {whose}, one island; the others are taken to do the same at the same time, and nothing is proven"
    )
