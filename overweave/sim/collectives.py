"""Library collectives: a part holds SMs from its start, the collective runs once all its parts have theirs.

A part that finds no free SM waits for tiles to leave, as a library's kernel does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec import Struct

from overweave.hardware.machine import Machine
from overweave.ir.schedule import Collective
from overweave.sim.cost import Costs
from overweave.sim.events import EventQueue
from overweave.sim.processor import Batch, RunningKernel, StreamingMultiprocessors, TileRun

Ended = Callable[[float, float], None]  # hears when a part has ended: since when it stood, and since when it ran


class _Part(Struct):
    """running: its programs that have not ended."""

    operation: Collective
    run: TileRun
    running: int
    begin_us: float
    ended: Ended


class Collectives:
    """All collectives of one run."""

    def __init__(
        self,
        clock: EventQueue,
        machine: Machine,
        processors: list[StreamingMultiprocessors],
        costs: Costs,
        most_sms: int = 0,
    ) -> None:
        """most_sms: that a part takes, where the plan says how many the library has; 0: as many as it likes."""
        self._clock, self._processors, self._costs = clock, processors, costs
        self._sms = min(machine.sharing.collective.sms, most_sms or machine.processor.sms)
        self._standing: dict[str, list[_Part]] = {}  # parts that have their SMs, by label

    def start(self, operation: Collective, ended: Ended) -> None:
        """It is the turn of a rank's part, and its signals are there."""
        run = TileRun(self._sms, 0.0, 0.0, lambda batch: None)
        part = _Part(operation, run, self._sms, self._clock.now, ended)
        run.when_claimed = partial(self._stand, part)
        self._processors[operation.rank].launch(RunningKernel([run], self._sms))

    def _stand(self, part: _Part) -> None:
        """A part has its SMs; the last one lets all run."""
        parts = self._standing.setdefault(part.operation.label, [])
        parts.append(part)
        if len(parts) < len(part.operation.ranks):
            return
        took_us = self._costs.collective_us([each.operation for each in parts])
        for each in parts:
            each.run.tile_us = took_us
            each.run.finished = partial(self._leave, each, self._clock.now)
            processor = self._processors[each.operation.rank]
            processor.count_collectives(1)
            self._clock.after(0.0, partial(processor.open, each.run))

    def _leave(self, part: _Part, met_us: float, batch: Batch) -> None:
        part.running -= len(batch.programs)
        if not part.running:
            self._processors[part.operation.rank].count_collectives(-1)
            part.ended(part.begin_us, met_us)
