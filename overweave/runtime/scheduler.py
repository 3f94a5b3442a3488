"""A rank's operations as a cooperative scheduler sees them: queues of steps, of which the heads may start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from overweave.ir.schedule import Operation, Schedule


@dataclass(frozen=True)
class PendingStep:
    """One operation, or all operations of a kernel's queue, which start together and wait for signals by themselves.

    first, last: positions among the rank's operations, in launch order.
    """

    queue: str
    operations: tuple[Operation, ...]
    first: int
    last: int
    is_kernel: bool = False


@dataclass
class _Line:
    """The steps of one queue that have not completed; `running` says whether the head is done."""

    after: tuple[str, ...]
    steps: list[PendingStep]
    head: int = 0
    running: Callable[[], bool] | None = None


@dataclass
class Agenda:
    """The state of one call. A step starts when it heads its queue and its `after` queues are done with what was
    launched earlier; issue queues too run one step at a time, which is what one resident block would do."""

    lines: dict[str, _Line] = field(default_factory=dict)

    @classmethod
    def of(cls, schedule: Schedule, rank: int, kernel_queues: frozenset[str] = frozenset()) -> Agenda:
        """`kernel_queues`: those whose operations run as one step."""
        steps: dict[str, list[PendingStep]] = {queue.name: [] for queue in schedule.queues}
        for position, operation in enumerate(schedule.of_rank(rank)):
            steps[operation.queue].append(PendingStep(operation.queue, (operation,), position, position))
        for queue in kernel_queues & steps.keys():
            if parts := steps[queue]:
                operations = tuple(part.operations[0] for part in parts)
                steps[queue] = [PendingStep(queue, operations, parts[0].first, parts[-1].last, is_kernel=True)]
        return cls({queue.name: _Line(queue.after, steps[queue.name]) for queue in schedule.queues})

    @property
    def is_done(self) -> bool:
        """Whether every step has completed."""
        return all(line.head == len(line.steps) for line in self.lines.values())

    def heads(self) -> Iterator[PendingStep]:
        """Steps that may start, their own waits aside."""
        for line in self.lines.values():
            if line.running is None and line.head < len(line.steps):
                step = line.steps[line.head]
                if all(self._is_past(queue, step.last) for queue in line.after):
                    yield step

    def start(self, step: PendingStep, is_done: Callable[[], bool] | None) -> None:
        """The step has started; it is complete once `is_done()`, or at once if None."""
        line = self.lines[step.queue]
        if is_done is None:
            line.head += 1
        else:
            line.running = is_done

    def finished(self) -> Iterator[PendingStep]:
        """Steps that ran beside this loop and have completed since the last look."""
        for line in self.lines.values():
            if line.running is not None and line.running():
                line.running = None
                line.head += 1
                yield line.steps[line.head - 1]

    def _is_past(self, queue: str, position: int) -> bool:
        line = self.lines[queue]
        return line.head == len(line.steps) or line.steps[line.head].first > position
