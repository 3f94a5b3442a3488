"""Library collectives: a part holds SMs from its start, the collective runs once all its parts have theirs.

A part that finds no free SM waits for tiles to leave, as a library's kernel does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec import Struct

from overweave.hardware.machine import Machine
from overweave.ir.dtype import Dtype
from overweave.ir.schedule import Collective
from overweave.sim import cost
from overweave.sim.events import Clock
from overweave.sim.processor import Batch, Kernel, Processor, TileRun

Ended = Callable[[float, float], None]  # hears when a part has ended: since when it stood, and since when it ran


class _Part(Struct):
    operation: Collective
    run: TileRun
    begin_us: float
    ended: Ended


class Collectives:
    """All collectives of one run."""

    def __init__(self, clock: Clock, machine: Machine, processors: list[Processor]) -> None:
        self._clock, self._machine, self._processors = clock, machine, processors
        self._sms = min(machine.sharing.collective.sms, machine.processor.sms)
        self._standing: dict[str, list[_Part]] = {}  # parts that have their SMs, by label

    def start(self, operation: Collective, dtype: Dtype, ended: Ended) -> None:
        """It is the turn of a rank's part, and its signals are there. dtype: of what moves."""
        run = TileRun(self._sms, 0.0, 0.0, lambda batch: None)
        part = _Part(operation, run, self._clock.now, ended)
        run.when_claimed = partial(self._stand, part, dtype)
        self._processors[operation.rank].launch(Kernel([run], self._sms))

    def _stand(self, part: _Part, dtype: Dtype) -> None:
        """A part has its SMs; the last one lets all run."""
        parts = self._standing.setdefault(part.operation.label, [])
        parts.append(part)
        if len(parts) < len(part.operation.ranks):
            return
        took = cost.collective_us(self._machine, [each.operation for each in parts], dtype)
        for each in parts:
            each.run.tile_us = took
            left = _Left(self._sms, partial(each.ended, each.begin_us, self._clock.now))
            each.run.finished = left.leave
            self._clock.after(0.0, partial(self._processors[each.operation.rank].open, each.run))


class _Left:
    """Counts the programs of a part that have ended."""

    def __init__(self, programs: int, ended: Callable[[], None]) -> None:
        self._programs, self._ended = programs, ended

    def leave(self, batch: Batch) -> None:
        self._programs -= len(batch.programs)
        if not self._programs:
            self._ended()
