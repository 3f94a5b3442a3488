"""A cooperative scheduler of one rank's operations: queues of steps, whose heads may start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from overweave.ir.schedule import Operation, Schedule, Wait


@dataclass(frozen=True)
class PendingStep:
    """One operation, or all operations of a kernel's queue: a kernel waits for signals itself.

    first, last: positions among the rank's operations, in launch order. waits: what must be signalled before it starts.
    """

    queue: str
    operations: tuple[Operation, ...]
    first: int
    last: int
    waits: tuple[Wait, ...] = ()
    is_kernel: bool = False


@dataclass(frozen=True)
class StepQueue:
    """The steps of one queue. after: queues whose earlier steps must have completed."""

    after: tuple[str, ...]
    steps: tuple[PendingStep, ...]


def step_queues(schedule: Schedule, rank: int, kernel_queues: frozenset[str] = frozenset()) -> dict[str, StepQueue]:
    """Return the queues of a rank by name. kernel_queues: those whose operations run as one step."""
    steps: dict[str, list[PendingStep]] = {queue.name: [] for queue in schedule.queues}
    for position, operation in enumerate(schedule.of_rank(rank)):
        step = PendingStep(operation.queue, (operation,), position, position, tuple(operation.all_waits))
        steps[operation.queue].append(step)
    for queue in kernel_queues & steps.keys():
        if parts := steps[queue]:
            operations = tuple(part.operations[0] for part in parts)
            steps[queue] = [PendingStep(queue, operations, parts[0].first, parts[-1].last, is_kernel=True)]
    return {queue.name: StepQueue(queue.after, tuple(steps[queue.name])) for queue in schedule.queues}


class Agenda:
    """The state of one call.

    A step starts when it is the head of its queue and the queue's `after` queues have completed all earlier steps.
    Issue queues run one step at a time, too, as one resident block would. left: how many steps have not completed.
    """

    def __init__(self, queues: Mapping[str, StepQueue]) -> None:
        self._queues = queues
        self._heads = dict.fromkeys(queues, 0)  # the first step that has not completed, by queue
        self._running: dict[str, Callable[[], bool]] = {}  # whether a head that has started has completed, by queue
        self.left = sum([len(queue.steps) for queue in queues.values()])

    def heads(self) -> list[PendingStep]:
        """Return the first step of every queue that has not completed."""
        queues = ((queue.steps, self._heads[name]) for name, queue in self._queues.items())
        return [steps[head] for steps, head in queues if head < len(steps)]

    def startable(self) -> list[PendingStep]:
        """Return the steps that may start once their own waits are satisfied."""
        steps = []
        for name, queue in self._queues.items():
            head = self._heads[name]
            if head == len(queue.steps) or name in self._running:
                continue
            if not queue.after or all(self._has_passed(other, queue.steps[head].last) for other in queue.after):
                steps.append(queue.steps[head])
        return steps

    def start(self, step: PendingStep, is_done: Callable[[], bool] | None) -> None:
        """Mark a step as started. is_done: returns whether it has completed; None: it has already."""
        if is_done is None:
            self._heads[step.queue] += 1
            self.left -= 1
        else:
            self._running[step.queue] = is_done

    def poll_completed(self) -> list[PendingStep]:
        """Return the running steps that have completed since the last call."""
        steps = []
        for name, is_done in list(self._running.items()):
            if is_done():
                del self._running[name]
                steps.append(self._queues[name].steps[self._heads[name]])
                self.start(steps[-1], None)
        return steps

    def _has_passed(self, name: str, position: int) -> bool:
        steps, head = self._queues[name].steps, self._heads[name]
        return head == len(steps) or steps[head].first > position
