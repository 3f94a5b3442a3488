"""A GPU of few SMs on which a plan runs: streams, kernels, blocks that hold an SM while they wait. It only finds hangs.

An executor of its own: it shares with the proof what a plan is and how it is launched (`ir/launch`), and nothing else.
Each rank has a stream for the caller and one for each queue beside it. A stream does one thing after the other. A
kernel's blocks take operations in order, each holds its SM until the operation's signals are there; a library matmul
needs an SM and frees it; a part of a collective keeps one until all parts have theirs. Which of the streams gets a free
SM first is the adversary's choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import permutations, product

from overweave.ir.launch.gates import first_own_waits, waits_for_nothing
from overweave.ir.launch.order import Action, launch_order
from overweave.ir.launch.streams import queues_beside
from overweave.ir.plan import AUTHOR_KERNEL, COPY_ENGINE, COPY_KERNEL, LIBRARY, TILE_KERNEL, Plan
from overweave.ir.schedule import Collective, Compute, Operation, Wait

CALLERS = ""
MOST_ORDERS = 64


class _Kernel:
    """A launch that has begun: which operations are left, and the blocks, each with the operation that it is at."""

    def __init__(self, operations: tuple[Operation, ...], blocks: int) -> None:
        self.left, self.most = list(operations), blocks
        self.blocks: list[Operation | None] = []  # None: between two operations

    @property
    def is_over(self) -> bool:
        return not self.left and not self.blocks


class _Rank:
    """One rank's GPU. order: of its streams, the first of which gets free SMs first."""

    def __init__(self, world: _World, rank: int, order: tuple[str, ...]) -> None:
        self.world, self.rank, self.order, plan = world, rank, order, world.plan
        self.free = world.sms
        self.engines = {one.queue: one.engine for one in plan.realization.engines}
        self.after = {queue.name: queue.after for queue in plan.schedule.queues}
        self.queued: dict[str, list[tuple[Action, frozenset[int]]]] = {name: [] for name in order}
        self.kernels: dict[str, _Kernel] = {}
        self.standing: dict[str, Collective] = {}  # parts that hold an SM, by stream
        self.done: set[int] = set()
        self.numbers: dict[int, int] = {}
        beside = queues_beside(plan)
        for number, action in enumerate(launch_order(plan, rank)):
            stream = action.queue if action.queue in beside else CALLERS
            behind = frozenset(
                self.numbers[id(one)]
                for one, _ in self.launches()
                if stream == CALLERS and one.queue in beside and one.queue in self.after[action.queue]
            )
            self.numbers[id(action)] = number
            self.queued[stream].append((action, behind))
        self.pushes_first = any(
            self.engines[one.queue] == COPY_KERNEL and one.queue in beside and waits_for_nothing(one.operations)
            for one, _ in self.launches()
        )

    def launches(self) -> list[tuple[Action, frozenset[int]]]:
        return [one for queue in self.queued.values() for one in queue]

    def step(self) -> bool:
        """Does one thing that can be done; whether there was one."""
        return any(self._advance(stream) for stream in self.order)

    def _advance(self, stream: str) -> bool:
        if stream in self.kernels:
            return self._run(stream)
        if stream in self.standing or not self.queued[stream]:
            return False
        action, behind = self.queued[stream][0]
        if not behind <= self.done or not self._may_start(action, stream):
            return False
        first, engine = action.operations[0], action.engine
        if engine == COPY_ENGINE:
            return self._copy(stream, action)
        if engine == LIBRARY:
            if not self.world.has(self.rank, first.all_waits) or not self.free:
                return False
            if isinstance(first, Collective):
                self.free -= 1
                self.standing[stream] = first
                return True
            return self._finish(stream, first)
        if not self.free:
            return False
        self.kernels[stream] = _Kernel(action.operations, self._blocks(action))
        return True

    def _may_start(self, action: Action, stream: str) -> bool:
        """What a stream waits for before it launches a kernel."""
        if stream != CALLERS and action.engine not in (COPY_ENGINE, LIBRARY):
            return self.world.has(self.rank, first_own_waits(self.world.plan, self.rank, action.queue))
        if action.engine in (TILE_KERNEL, AUTHOR_KERNEL) and self.pushes_first:
            queues = {one.queue for one, _ in self.launches() if self.engines[one.queue] == COPY_KERNEL}
            return not queues & {
                one.queue for name in queues for one, _ in self.queued[name] if name not in self.kernels
            }
        return True

    def _blocks(self, action: Action) -> int:
        """A copy kernel holds one SM of those that are left to it; others take what there is."""
        if action.engine == COPY_KERNEL:
            return 1
        left = _left(self.world.plan)
        return max(1, self.world.sms - left) if action.engine in (TILE_KERNEL, AUTHOR_KERNEL) else self.world.sms

    def _copy(self, stream: str, action: Action) -> bool:
        left = [one for one in action.operations if one.name not in self.world.over]
        if not self.world.has(self.rank, left[0].all_waits):
            return False
        self.world.end(left[0])
        if len(left) == 1:
            self._pop(stream)
        return True

    def _run(self, stream: str) -> bool:
        """A block goes on, or another one takes a free SM."""
        kernel = self.kernels[stream]
        for at, operation in enumerate(kernel.blocks):
            if operation is not None and self.world.has(self.rank, operation.all_waits):
                self.world.end(operation)
                kernel.blocks[at] = kernel.left.pop(0) if kernel.left else None
                if kernel.blocks[at] is None:
                    del kernel.blocks[at]
                    self.free += 1
                    self._end_kernel(stream)
                return True
        if kernel.left and self.free and len(kernel.blocks) < kernel.most:
            self.free -= 1
            kernel.blocks.append(kernel.left.pop(0))
            return True
        return False

    def _end_kernel(self, stream: str) -> None:
        if self.kernels[stream].is_over:
            del self.kernels[stream]
            self._pop(stream)

    def _finish(self, stream: str, operation: Operation) -> bool:
        self.world.end(operation)
        self._pop(stream)
        return True

    def _pop(self, stream: str) -> None:
        self.done.add(self.numbers[id(self.queued[stream].pop(0)[0])])

    def leave(self, label: str) -> None:
        """The collective is over."""
        for stream, part in list(self.standing.items()):
            if part.label == label:
                del self.standing[stream]
                self.free += 1
                self._finish(stream, part)

    @property
    def is_over(self) -> bool:
        return not any(self.queued.values())


class _World:
    """All ranks. over: names of operations that ended."""

    def __init__(self, plan: Plan, sms: int, orders: tuple[tuple[str, ...], ...]) -> None:
        self.plan, self.sms = plan, sms
        self.counts: Counter[tuple[int, str, int]] = Counter()
        self.over: set[str] = set()
        self.ranks = [_Rank(self, rank, order) for rank, order in enumerate(orders)]

    def has(self, rank: int, waits: Iterable[Wait]) -> bool:
        return all(self.counts[rank, wait.pad, at] >= wait.count for wait in waits for at in range(*wait.signals))

    def end(self, operation: Operation) -> None:
        self.over.add(operation.name)
        for notify in operation.notifies:
            self.counts[notify.rank, notify.pad, notify.signal] += operation.instances

    def hangs(self) -> bool:
        while any(rank.step() for rank in self.ranks) or self._meet():
            pass
        return not all(rank.is_over for rank in self.ranks)

    def _meet(self) -> bool:
        """Lets a collective run whose parts all stand."""
        standing = [part for rank in self.ranks for part in rank.standing.values()]
        labels = Counter(part.label for part in standing)
        whole = next((part for part in standing if labels[part.label] == len(part.ranks)), None)
        if whole is None:
            return False
        for rank in self.ranks:
            rank.leave(whole.label)
        return True


def _left(plan: Plan) -> int:
    """How many SMs the tile kernel leaves to others: one each."""
    return bool(plan.sms_for_pushes) + bool(plan.realization.library_sms)


def hang(plan: Plan, most_sms: int = 3) -> str:
    """How the plan hangs on GPUs of 1 to `most_sms` SMs that are left to it; empty if no order of streams makes it."""
    streams = (CALLERS, *sorted(queues_beside(plan)))
    has_tiles = any(one.engine in (TILE_KERNEL, AUTHOR_KERNEL) for one in plan.realization.engines)
    least = 1 + (_left(plan) if has_tiles else 0)
    orders = list(permutations(streams))[:MOST_ORDERS]
    ranks = plan.schedule.world_size
    alike = [(order,) * ranks for order in orders]
    mixed = list(product(orders, repeat=ranks))[: MOST_ORDERS * 4] if len(orders) ** ranks <= 4096 else []
    for sms in range(least, max(least, most_sms) + 1):
        for chosen in (*alike, *mixed):
            if _World(plan, sms, chosen).hangs():
                return f"{sms} SMs, streams in the order {' | '.join(','.join(one) for one in chosen)}"
    return ""


def is_modelled(plan: Plan) -> bool:
    """Whether every operation is of a kind that the model knows: what tiles add late waits for in one place."""
    return not any(isinstance(one, Compute) and one.late_waits for one in plan.schedule.operations)
