"""A GPU of few SMs on which a plan runs: streams, kernels, blocks that hold an SM while they wait. It only finds hangs.

Of the package it knows what a Plan is, and nothing of the proof, of the simulator, or of who launches
(`gpu_launch.py` says that anew). Each rank has a stream for the caller and one for each queue beside it. A stream does
one thing after the other. A kernel's blocks claim tiles in order, each holds its SM until its tile's signals are there;
a library matmul needs an SM and frees it; a part of a collective keeps one until all parts have theirs. Who gets a free
SM first is the adversary's choice: fixed orders of the streams, and orders by chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, permutations, product
from random import Random

from campaigns.oracle.plans.gpu_launch import CALLERS, TILES, Launch, launches, own_streams
from overweave.ir.plan import COPY_ENGINE, COPY_KERNEL, LIBRARY, Plan
from overweave.ir.schedule import Collective, Operation, Wait

MOST_ORDERS, BY_CHANCE = 24, 8
SMS_OF_A_GPU = 132  # what `programs` of a plan is compared with
Order = Callable[[], Iterable[str]]  # of a rank's streams, asked before each step


class _Kernel:
    """A launch that has begun. left: the operation of each tile that nobody claimed. blocks: what each block is at.

    Every operation has tiles for all of its blocks: a small plan stands for large ones.
    """

    def __init__(self, operations: tuple[Operation, ...], most: int) -> None:
        self.left = [one for one in operations for _ in range(max(one.instances, most))]
        self.most, self.claimed = most, 0
        self.blocks: list[Operation] = []

    def claim(self) -> Operation:
        self.claimed += 1
        return self.left.pop(0)


class _Rank:
    """One rank's GPU."""

    def __init__(self, world: _World, rank: int, order: Order) -> None:
        self.world, self.rank, self.order = world, rank, order
        self.free = world.sms
        self.queued: dict[str, list[Launch]] = {name: [] for name in (CALLERS, *own_streams(world.plan))}
        self.waits_behind: dict[int, list[Launch]] = {}  # launches of other streams that must have ended, by launch
        launched = launches(world.plan, rank)
        for at, one in enumerate(launched):
            self.waits_behind[id(one)] = [its for its in launched[:at] if its.queue in one.behind]
            self.queued[one.stream].append(one)
        self.launched = launched  # kept: launches are told apart by identity
        self.kernels: dict[str, _Kernel] = {}
        self.standing: dict[str, Collective] = {}  # parts that hold an SM, by stream
        self.done: set[int] = set()

    def step(self) -> bool:
        """Does one thing that can be done; whether there was one."""
        return any(self._advance(stream) for stream in self.order())

    @property
    def is_over(self) -> bool:
        return not any(self.queued.values())

    def _advance(self, stream: str) -> bool:
        if stream in self.kernels:
            return self._run(stream)
        if stream in self.standing or not self.queued[stream]:
            return False
        launch = self.queued[stream][0]
        if not all(id(one) in self.done for one in self.waits_behind[id(launch)]):
            return False
        if launch.engine == COPY_ENGINE:
            return self._copy(stream, launch)
        if launch.engine == LIBRARY:
            return self._call(stream, launch.operations[0])
        if not self.free or not self.world.has(self.rank, launch.gate) or not self._pushes_have_begun(launch):
            return False
        self.kernels[stream] = _Kernel(launch.operations, self._blocks(launch))
        return True

    def _pushes_have_begun(self, launch: Launch) -> bool:
        """Whether pushes that tiles at peers wait for have their SMs: as many tiles are claimed as there are blocks."""
        for one in self.launched if launch.pushes_first else ():
            if one.engine == COPY_KERNEL and id(one) not in self.done:
                kernel = self.kernels.get(one.stream)
                if kernel is None or (kernel.left and kernel.claimed < kernel.most):
                    return False
        return True

    def _blocks(self, launch: Launch) -> int:
        """How many SMs a kernel takes at most. A copy kernel has few programs, here one; tiles leave some to others."""
        if launch.engine == COPY_KERNEL:
            return 1 if has_few_pushes(self.world.plan) else self.world.sms
        return self.world.sms - (self.world.left if launch.engine in TILES else 0)

    def _copy(self, stream: str, launch: Launch) -> bool:
        left = [one for one in launch.operations if one.name not in self.world.over]
        if not self.world.has(self.rank, left[0].all_waits):
            return False
        self.world.end(left[0])
        if len(left) == 1:
            self._pop(stream)
        return True

    def _call(self, stream: str, operation: Operation) -> bool:
        if not self.free or not self.world.has(self.rank, operation.all_waits):
            return False
        if isinstance(operation, Collective):
            if not self.world.is_its_turn(operation):
                return False
            self.free -= 1
            self.standing[stream] = operation
        else:
            self.world.end(operation)
            self._pop(stream)
        return True

    def _run(self, stream: str) -> bool:
        """A block ends its tile and claims another or leaves, or another block takes a free SM."""
        kernel = self.kernels[stream]
        for at, operation in enumerate(kernel.blocks):
            if self.world.has(self.rank, operation.all_waits):
                if operation not in (*kernel.left, *kernel.blocks[:at], *kernel.blocks[at + 1 :]):
                    self.world.end(operation)
                if kernel.left:
                    kernel.blocks[at] = kernel.claim()
                    return True
                del kernel.blocks[at]
                self.free += 1
                if not kernel.blocks:
                    del self.kernels[stream]
                    self._pop(stream)
                return True
        if kernel.left and self.free and len(kernel.blocks) < kernel.most:
            self.free -= 1
            kernel.blocks.append(kernel.claim())
            return True
        return False

    def _pop(self, stream: str) -> None:
        self.done.add(id(self.queued[stream].pop(0)))

    def leave(self, label: str) -> None:
        """The collective is over."""
        for stream, part in list(self.standing.items()):
            if part.label == label:
                del self.standing[stream]
                self.free += 1
                self.world.end(part)
                self._pop(stream)


class _World:
    """All ranks. over: names of operations that ended. left: how many SMs the tile kernel leaves: one to pushes that
    wait for its tiles, one to library calls."""

    def __init__(self, plan: Plan, sms: int, orders: Iterable[Order]) -> None:
        self.plan, self.sms, self.left = plan, sms, sms_left(plan)
        self.counts: Counter[tuple[int, str, int]] = Counter()
        self.over: set[str] = set()
        self.ranks = [_Rank(self, rank, order) for rank, order in enumerate(orders)]
        self.turns = {one.rank: _collectives(one.launched) for one in self.ranks}

    def has(self, rank: int, waits: Iterable[Wait]) -> bool:
        return all(self.counts[rank, wait.pad, at] >= wait.count for wait in waits for at in range(*wait.signals))

    def is_its_turn(self, part: Collective) -> bool:
        """A library runs the collectives of a group in the order in which they are enqueued, whatever their streams."""
        enqueued = self.turns[part.rank]
        earlier = enqueued[: enqueued.index(part)]
        return all(one.name in self.over for one in earlier if one.ranks == part.ranks)

    def end(self, operation: Operation) -> None:
        """The operation is over. Its signals count when its last tile has ended: counts below that free nobody."""
        self.over.add(operation.name)
        for notify in operation.notifies:
            self.counts[notify.rank, notify.pad, notify.signal] += operation.instances

    def hangs(self) -> bool:
        while sum(rank.step() for rank in self.ranks) or self._meet():  # each rank does its step
            pass
        return not all(rank.is_over for rank in self.ranks)

    def _meet(self) -> bool:
        """Lets a collective run whose parts all stand."""
        standing = [part for rank in self.ranks for part in rank.standing.values()]
        labels = Counter(part.label for part in standing)
        whole = next((part for part in standing if labels[part.label] == len(part.ranks)), None)
        for rank in self.ranks if whole else ():
            rank.leave(whole.label if whole else "")
        return whole is not None


def _collectives(launched: Iterable[Launch]) -> list[Collective]:
    return [one for launch in launched for one in launch.operations if isinstance(one, Collective)]


def sms_left(plan: Plan) -> int:
    """How many SMs the tile kernel leaves to others in the model: one to each kind."""
    return bool(plan.sms_for_pushes) + bool(plan.realization.library_sms)


def has_few_pushes(plan: Plan) -> bool:
    """Whether a kernel of pushes leaves SMs of the GPU to others, however it is placed."""
    return plan.realization.copy is not None and plan.realization.copy.programs < SMS_OF_A_GPU


def _orders(streams: tuple[str, ...], ranks: int) -> Iterator[tuple[str, list[Order]]]:
    """Ways to choose who goes first, with a name for each."""
    fixed = list(islice(permutations(streams), MOST_ORDERS))
    chosen = [(one,) * ranks for one in fixed]
    chosen += list(islice((one for one in product(fixed, repeat=ranks) if len(set(one)) > 1), MOST_ORDERS))
    for orders in chosen:
        shown = " | ".join(",".join(name or "caller" for name in one) for one in orders)
        yield f"streams in the order {shown}", [_fixed(one) for one in orders]
    for seed in range(BY_CHANCE):
        rng = Random(seed)
        yield f"streams by chance, seed {seed}", [_shuffled(rng, streams)] * ranks


def _fixed(order: tuple[str, ...]) -> Order:
    return lambda: order


def _shuffled(rng: Random, streams: tuple[str, ...]) -> Order:
    return lambda: rng.sample(streams, len(streams))


def hang(plan: Plan, most_sms: int = 3) -> str:
    """How the plan hangs where 1 to `most_sms` SMs are left to its kernels; empty if no order of streams makes it."""
    streams = (CALLERS, *sorted(own_streams(plan)))
    has_tiles = any(one.engine in TILES for one in plan.realization.engines)
    for free in range(1, most_sms + 1):
        sms = free + max(sms_left(plan) if has_tiles else 0, has_few_pushes(plan))
        for shown, orders in _orders(streams, plan.schedule.world_size):
            if _World(plan, sms, orders).hangs():
                return f"{sms} SMs, {shown}"
    return ""
