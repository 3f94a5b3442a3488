"""NCCL collectives: each rank's part holds SMs from its start; the collective runs once all its parts have theirs.

A part that finds no free SM waits until tiles end, as NCCL's kernel does.
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

Ended = Callable[[float, float], None]  # called at the end of a part: with its start, and when the collective ran


class _Part(Struct):
    """One rank's part of a collective. running: its programs that have not ended."""

    operation: Collective
    run: TileRun
    running: int
    begin_us: float
    on_end: Ended


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
        """most_sms: SMs that a part takes, where the plan limits NCCL; 0: no limit."""
        self._clock, self._processors, self._costs = clock, processors, costs
        self._sms = min(machine.sharing.collective.sms, most_sms or machine.processor.sms)
        self._ready: dict[str, list[_Part]] = {}  # label -> parts that have their SMs

    def start(self, operation: Collective, on_end: Ended) -> None:
        """Start a rank's part, whose queue is free and whose signals have arrived."""
        run = TileRun(self._sms, 0.0, 0.0, lambda batch: None)
        part = _Part(operation, run, self._sms, self._clock.now, on_end)
        run.on_all_claimed = partial(self._on_sms_claimed, part)
        self._processors[operation.rank].launch(RunningKernel([run], self._sms))

    def _on_sms_claimed(self, part: _Part) -> None:
        """Count a part that has its SMs; the last one starts the collective."""
        parts = self._ready.setdefault(part.operation.label, [])
        parts.append(part)
        if len(parts) < len(part.operation.ranks):
            return
        duration_us = self._costs.collective_us([member.operation for member in parts])
        for member in parts:
            member.run.tile_us = duration_us
            member.run.on_batch_end = partial(self._on_batch_end, member, self._clock.now)
            processor = self._processors[member.operation.rank]
            processor.count_collectives(1)
            self._clock.after(0.0, partial(processor.release, member.run))

    def _on_batch_end(self, part: _Part, run_us: float, batch: Batch) -> None:
        part.running -= len(batch.programs)
        if not part.running:
            self._processors[part.operation.rank].count_collectives(-1)
            part.on_end(part.begin_us, run_us)
