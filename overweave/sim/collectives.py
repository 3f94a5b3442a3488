"""NCCL collectives of one run: each rank's part holds SMs from its start; a collective runs once all parts have theirs.

A part that finds no free SM waits until tiles end, as NCCL's kernel does. Between islands bytes share NICs with those
of other collectives. Ranks that are not simulated are taken to begin together with those that are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec import Struct

from overweave.ir.schedule import Collective
from overweave.sim.cost import Costs, Segment
from overweave.sim.events import EventQueue, Gate
from overweave.sim.nccl import CrossingCall
from overweave.sim.ports import Ports
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
    """All collectives of one run. processors: of the ranks that are simulated."""

    def __init__(
        self, clock: EventQueue, processors: dict[int, StreamingMultiprocessors], costs: Costs, ports: Ports
    ) -> None:
        self._clock, self._processors, self._costs, self._ports = clock, processors, costs, ports
        self._ready: dict[str, list[_Part]] = {}  # label -> parts that have their SMs

    def start(self, operation: Collective, on_end: Ended) -> None:
        """Start a rank's part, whose queue is free and whose signals have arrived."""
        sms = self._costs.collective_sms(operation)
        run = TileRun(sms, 0.0, 0.0, lambda batch: None)
        part = _Part(operation, run, sms, self._clock.now, on_end)
        run.on_all_claimed = partial(self._on_sms_claimed, part)
        self._processors[operation.rank].launch(RunningKernel([run], sms))

    def _on_sms_claimed(self, part: _Part) -> None:
        """Count a part that has its SMs; the last one starts the collective."""
        parts = self._ready.setdefault(part.operation.label, [])
        parts.append(part)
        if len(parts) < sum(rank in self._processors for rank in part.operation.ranks):
            return
        for member in parts:
            member.run.on_batch_end = partial(self._on_batch_end, member, self._clock.now)
            self._processors[member.operation.rank].count_collectives(1)
        crossing = self._costs.crossing([member.operation for member in parts])
        if crossing is None:
            duration_us = self._costs.collective_us(part.operation)
            self._clock.after(0.0, partial(self._release, parts, duration_us))
        else:
            self._cross(crossing, partial(self._release, parts, 0.0))

    def _cross(self, crossing: CrossingCall, on_end: Callable[[], None]) -> None:
        """Run a collective over several islands: its steps, then its bytes, inside islands and between them at once."""
        moved = Gate(on_end)

        def move() -> None:
            self._clock.after(crossing.inside_us, moved.arrive)
            for flow in own:
                self._ports.copy(Segment(*flow), moved.arrive)

        own = [flow for flow in crossing.flows if flow.source in self._processors]
        moved.missing = 1 + len(own)
        self._clock.after(crossing.latency_us, move)

    def _release(self, parts: list[_Part], tile_us: float) -> None:
        for part in parts:
            part.run.tile_us = tile_us
            self._processors[part.operation.rank].release(part.run)

    def _on_batch_end(self, part: _Part, run_us: float, batch: Batch) -> None:
        part.running -= len(batch.programs)
        if not part.running:
            self._processors[part.operation.rank].count_collectives(-1)
            part.on_end(part.begin_us, run_us)
