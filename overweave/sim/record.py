"""Recorder of a simulated run: spans per operation or per tile, and an arrow for each signal."""

from __future__ import annotations

from overweave.ir.schedule import Operation, Schedule
from overweave.ir.timeline.operations import arrows
from overweave.ir.timeline.timeline import BEGIN, WAIT, SpanKind, Timeline, TimelineSpan, make_timeline
from overweave.sim.processor import Batch


class Recorder:
    """Collects spans. with_tiles: one track per program and one span per tile instead of one span per operation."""

    def __init__(self, with_tiles: bool) -> None:
        self._with_tiles = with_tiles
        self._spans: list[TimelineSpan] = []
        self._first: dict[str, int] = {}  # operation -> index of its first span
        self._last: dict[str, int] = {}  # and of its last one
        self._tiles: dict[str, tuple[float, float, float]] = {}  # operation -> claim, begin and end of its tiles, us

    def add_prologue(self, rank: int, track: str, begin_us: float, end_us: float) -> None:
        self._spans.append(TimelineSpan(rank, track, "begin", BEGIN, begin_us, end_us))

    def add_join(self, rank: int, track: str, begin_us: float, end_us: float) -> None:
        self._spans.append(TimelineSpan(rank, track, "join", WAIT, begin_us, end_us))

    def add_wait(self, operation: Operation, begin_us: float, end_us: float) -> None:
        if end_us > begin_us:
            self._spans.append(TimelineSpan(operation.rank, operation.queue, operation.name, WAIT, begin_us, end_us))

    def add_span(self, operation: Operation, kind: SpanKind, begin_us: float, end_us: float) -> None:
        self._add(operation, TimelineSpan(operation.rank, operation.queue, operation.name, kind, begin_us, end_us))

    def add_batch(self, operation: Operation, kind: SpanKind, batch: Batch, end_us: float) -> None:
        """Add the tiles of a batch that has ended; without tiles, widen the operation's span to cover them."""
        if self._with_tiles:
            for position, program in enumerate(batch.programs):
                track, name = f"{operation.queue}.{program:03d}", f"{operation.name}.{batch.first + position}"
                if batch.begin_us > batch.claimed_us:
                    self._spans.append(
                        TimelineSpan(operation.rank, track, name, WAIT, batch.claimed_us, batch.begin_us)
                    )
                self._tile(operation, track, name, kind, batch, end_us)
            return
        claimed, begin, end = self._tiles.get(operation.name, (batch.claimed_us, batch.begin_us, end_us))
        self._tiles[operation.name] = min(claimed, batch.claimed_us), min(begin, batch.begin_us), max(end, end_us)

    def _tile(self, operation: Operation, track: str, name: str, kind: SpanKind, batch: Batch, end_us: float) -> None:
        """Add the span of a tile; of a tile that waited late: its product, its wait and the rest."""
        begin_us = batch.begin_us
        late_wait = batch.late_wait_us or (end_us, end_us)
        if late_wait[0] < late_wait[1]:
            self._add(operation, TimelineSpan(operation.rank, track, name, kind, begin_us, late_wait[0]))
            self._spans.append(TimelineSpan(operation.rank, track, name, WAIT, *late_wait))
            begin_us = late_wait[1]
        self._add(operation, TimelineSpan(operation.rank, track, name, kind, begin_us, end_us))

    def end_tiles(self, operation: Operation, kind: SpanKind) -> None:
        """Add the spans of an operation whose last tile has ended."""
        if operation.name in self._tiles:
            claimed, begin, end = self._tiles.pop(operation.name)
            self.add_wait(operation, claimed, begin)
            self.add_span(operation, kind, begin, end)

    def timeline(self, name: str, schedule: Schedule, with_arrows: bool) -> Timeline:
        """Return all spans. with_arrows: from each operation that signals to each that waits for it."""
        drawn = arrows(schedule, self._first, self._last) if with_arrows else ()
        return make_timeline(name, "simulated", schedule.world_size, self._spans, drawn)

    def _add(self, operation: Operation, span: TimelineSpan) -> None:
        self._first.setdefault(operation.name, len(self._spans))
        self._last[operation.name] = len(self._spans)
        self._spans.append(span)
