"""A cooperative scheduler of one rank's operations: queues of steps, whose heads may start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from overweave.ir.schedule import Operation, Schedule


@dataclass(frozen=True)
class PendingStep:
    """One operation, or all operations of a kernel's queue: a kernel waits for signals itself.

    first, last: positions among the rank's operations, in launch order.
    """

    queue: str
    operations: tuple[Operation, ...]
    first: int
    last: int
    is_kernel: bool = False


@dataclass
class _PendingQueue:
    """The steps of one queue. after: queues whose earlier steps must have completed. head: index of the first step that
    has not completed. running: returns whether the head, which has started, has completed; None before it starts."""

    after: tuple[str, ...]
    steps: list[PendingStep]
    head: int = 0
    running: Callable[[], bool] | None = None


@dataclass
class Agenda:
    """The state of one call. queues: name -> queue.

    A step starts when it is the head of its queue and the queue's `after` queues have completed all earlier steps.
    Issue queues run one step at a time, too, as one resident block would.
    """

    queues: dict[str, _PendingQueue] = field(default_factory=dict)

    @classmethod
    def of(cls, schedule: Schedule, rank: int, kernel_queues: frozenset[str] = frozenset()) -> Agenda:
        """Return the queues of a rank. kernel_queues: those whose operations run as one step."""
        steps: dict[str, list[PendingStep]] = {queue.name: [] for queue in schedule.queues}
        for position, operation in enumerate(schedule.of_rank(rank)):
            steps[operation.queue].append(PendingStep(operation.queue, (operation,), position, position))
        for queue in kernel_queues & steps.keys():
            if parts := steps[queue]:
                operations = tuple(part.operations[0] for part in parts)
                steps[queue] = [PendingStep(queue, operations, parts[0].first, parts[-1].last, is_kernel=True)]
        return cls({queue.name: _PendingQueue(queue.after, steps[queue.name]) for queue in schedule.queues})

    @property
    def is_done(self) -> bool:
        """Return whether every step has completed."""
        return all(queue.head == len(queue.steps) for queue in self.queues.values())

    def startable(self) -> Iterator[PendingStep]:
        """Yield the steps that may start once their own waits are satisfied."""
        for queue in self.queues.values():
            if queue.running is None and queue.head < len(queue.steps):
                step = queue.steps[queue.head]
                if all(self._has_passed(name, step.last) for name in queue.after):
                    yield step

    def start(self, step: PendingStep, is_done: Callable[[], bool] | None) -> None:
        """Mark a step as started. is_done: returns whether it has completed; None: it has already."""
        queue = self.queues[step.queue]
        if is_done is None:
            queue.head += 1
        else:
            queue.running = is_done

    def poll_completed(self) -> Iterator[PendingStep]:
        """Yield the running steps that have completed since the last call."""
        for queue in self.queues.values():
            if queue.running is not None and queue.running():
                queue.running = None
                queue.head += 1
                yield queue.steps[queue.head - 1]

    def _has_passed(self, name: str, position: int) -> bool:
        queue = self.queues[name]
        return queue.head == len(queue.steps) or queue.steps[queue.head].first > position
