"""A GPU of few SMs on which a plan runs: streams, kernels, blocks that hold an SM while they wait. It only finds hangs.

Of the package it knows what a Plan is, and nothing of the proof, of the simulator, or of who launches
(`launches` says that anew). Each rank has a stream for the caller and one for each queue beside it. A stream does
one thing after the other. A kernel's blocks claim tiles in order, each holds its SM until its tile's signals are there;
a library matmul needs an SM and frees it; a part of a collective keeps one until all parts have theirs. Who gets a free
SM first is the adversary's choice: fixed orders of the streams, and orders by chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, permutations, product
from random import Random

from msgspec import Struct

from overweave.ir.plan import (
    AUTHOR_KERNEL,
    COPY_ENGINE,
    COPY_KERNEL,
    LIBRARY,
    PACKED_KERNEL,
    REDUCE_KERNEL,
    TILE_KERNEL,
    Plan,
)
from overweave.ir.schedule import Apply, Collective, Compute, Copy, Operation, Put, ReducePut, Region, Wait

# How the host of each rank launches a plan, in words of this folder: streams, their order, what holds a launch back.
# `ir/launch` says the same to the GPU runtime and to the proof. The model that judges both has it from here, so that
# a mistake there shows as a difference; `tests/campaigns/oracle/test_gpu_model.py` holds one against the other.
# SOURCE: docs/design/0002-device-protocol.md, a call.

CALLERS = ""
TILES = (TILE_KERNEL, AUTHOR_KERNEL)


class Launch(Struct, frozen=True):
    """Operations that one launch, or one stretch of a copy engine's stream, runs.

    stream: CALLERS, or the queue's own. gate: what the stream waits for before a kernel. behind: queues with streams of
    their own whose earlier launches must have ended. pushes_first: whether the kernel of pushes must have its SMs.
    """

    engine: str
    queue: str
    stream: str
    operations: tuple[Operation, ...]
    gate: tuple[Wait, ...] = ()
    behind: tuple[str, ...] = ()
    pushes_first: bool = False

    @property
    def is_kernel(self) -> bool:
        return self.engine not in (COPY_ENGINE, LIBRARY)


def own_streams(plan: Plan) -> frozenset[str]:
    """The queues that do not run on the caller's stream."""
    engines = {one.queue: one.engine for one in plan.realization.engines}
    callers = [one for one in plan.schedule.queues if engines[one.name] in (*TILES, PACKED_KERNEL)]
    callers = callers or [one for one in plan.schedule.queues if engines[one.name] == LIBRARY][:1]
    joined = {one.name for one in callers} | {name for one in callers for name in one.after}
    found = set()
    for queue in plan.schedule.queues:
        engine = engines[queue.name]
        free = not queue.after
        if engine == COPY_ENGINE or (free and engine in (REDUCE_KERNEL, COPY_KERNEL)):
            found.add(queue.name)
        if free and engine == LIBRARY and queue.name not in joined:
            found.add(queue.name)
    return frozenset(found)


def launches(plan: Plan, rank: int) -> tuple[Launch, ...]:
    """What a rank launches, in the order of its host."""
    engines = {one.queue: one.engine for one in plan.realization.engines}
    own = [one for one in plan.schedule.operations if one.rank == rank]
    aside = own_streams(plan)
    found: list[Launch] = []
    for queue, operations in _together(own, engines, aside):
        engine, is_aside = engines[queue], queue in aside
        is_kernel = engine not in (COPY_ENGINE, LIBRARY)
        pushes = [one for one in own if engines[one.queue] == COPY_KERNEL and one.queue in aside]
        found.append(
            Launch(
                engine=engine,
                queue=queue,
                stream=queue if is_aside else CALLERS,
                operations=operations,
                gate=gate_of(own, queue) if is_kernel and is_aside else (),
                behind=() if is_aside else tuple(name for name in _after(plan, queue) if name in aside),
                pushes_first=engine in TILES and bool(pushes) and _start_at_once(pushes),
            )
        )
    return tuple(found)


def gate_of(own: list[Operation], queue: str) -> tuple[Wait, ...]:
    """The waits for own results of the first operation of the queue that has such waits."""
    results = {
        (one.pad, one.signal)
        for operation in own
        if isinstance(operation, Compute | Apply)
        for one in operation.notifies
        if one.rank == operation.rank
    }
    for operation in own:
        if operation.queue == queue:
            gate = tuple(wait for wait in operation.waits if (wait.pad, wait.signals[0]) in results)
            if gate:
                return gate
    return ()


def _start_at_once(pushes: Iterable[Operation]) -> bool:
    """Whether no push waits. What only waits stands at the end of their queue."""
    return all(isinstance(one, Copy) or (isinstance(one, Put) and not one.waits) for one in pushes)


def _after(plan: Plan, queue: str) -> tuple[str, ...]:
    return next(one.after for one in plan.schedule.queues if one.name == queue)


def _together(
    own: list[Operation], engines: Mapping[str, str], aside: frozenset[str]
) -> list[tuple[str, tuple[Operation, ...]]]:
    """Operations by launch. A kernel stands where its first operation does. What a stream of its own waits for must be
    launched before, where this rank makes it: the hardware queue that they share could block otherwise."""
    place_of: dict[str, int] = {}  # of each kernel
    makers: dict[tuple[str, int], int] = {}  # by own signal, where its last maker is launched
    at: list[int] = []
    for index, one in enumerate(own):
        is_kernel = engines[one.queue] not in (COPY_ENGINE, LIBRARY)
        at.append(place_of.setdefault(one.queue, index) if is_kernel else index)
        for notify in one.notifies:
            if notify.rank == one.rank:
                key = notify.pad, notify.signal
                makers[key] = max(at[index], makers.get(key, at[index]))
    places: list[tuple[int, int, int]] = []  # where launched, whether behind what is launched there, the operation
    last: dict[str, tuple[int, int]] = {}
    for index, one in enumerate(own):
        place = (at[index], 0)
        if one.queue in aside and engines[one.queue] in (COPY_ENGINE, LIBRARY):
            awaited = ((wait.pad, signal) for wait in one.all_waits for signal in range(*wait.signals))
            made = max((makers.get(key, -1) for key in awaited), default=-1)
            place = max(last.get(one.queue, (-1, 0)), (made, 1) if made >= index else (index, 0))
            last[one.queue] = place
        places.append((*place, index))
    grouped: list[tuple[str, tuple[Operation, ...]]] = []
    for _, _, index in sorted(places):
        one = own[index]
        if grouped and grouped[-1][0] == one.queue and engines[one.queue] != LIBRARY:
            grouped[-1] = one.queue, (*grouped[-1][1], one)
        else:
            grouped.append((one.queue, (one,)))
    return grouped


# Which accesses to memory the launches of a plan leave unordered: what a stream, an event, a gate or a signal orders.
# A second look at what the proof says of races, by what is launched and not by what queues declare:
# a queue that is `after` another one is behind it only if its launch is. Sets of operations are bits of an int.


class _Order:
    """start, late: what has ended when an operation starts, and when it reads what it waits for late."""

    def __init__(self, plan: Plan) -> None:
        self.operations = plan.schedule.operations
        self.number = {one.name: at for at, one in enumerate(self.operations)}
        self.full: dict[tuple[int, str, int], int] = {}
        self.makers: dict[tuple[int, str, int], int] = {}
        for at, one in enumerate(self.operations):
            for notify in one.notifies:
                key = notify.rank, notify.pad, notify.signal
                self.full[key] = self.full.get(key, 0) + one.instances
                self.makers[key] = self.makers.get(key, 0) | 1 << at
        self.behind = [0] * len(self.operations)
        for rank in range(plan.schedule.world_size):
            self._add_launches(plan, rank)
        self.behind_late = [self._contributors(one.rank, getattr(one, "late_waits", ())) for one in self.operations]
        self.start = [0] * len(self.operations)
        self.late, self.done = list(self.start), list(self.start)
        while self._grow():
            pass

    def _add_launches(self, plan: Plan, rank: int) -> None:
        last: dict[str, int] = {}  # what the last launch of each stream runs
        launched = launches(plan, rank)
        for at, launch in enumerate(launched):
            earlier = [one for one in launched[:at] if one.queue in launch.behind]
            before = self._contributors(rank, launch.gate)
            before |= last.get(launch.stream, 0) | self._bits([one for each in earlier for one in each.operations])
            for one in launch.operations:
                number = self.number[one.name]
                self.behind[number] = before | self._contributors(rank, one.waits)
                if not launch.is_kernel:
                    before = 1 << number
            last[launch.stream] = self._bits(launch.operations) if launch.is_kernel else before

    def _bits(self, operations: tuple[Operation, ...] | list[Operation]) -> int:
        return sum({1 << self.number[one.name] for one in operations})

    def _contributors(self, rank: int, waits: tuple[Wait, ...]) -> int:
        """Whoever must have ended for the waits to pass. A partial count is no promise of anybody's."""
        found = 0
        for wait in waits:
            for at in range(*wait.signals):
                key = rank, wait.pad, at
                found |= self.makers.get(key, 0) if self.full.get(key) == wait.count else 0
        return found

    def _grow(self) -> bool:
        """Once more over all operations; whether any set grew."""
        before, meeting = list(self.done), dict[str, int]()
        for at, one in enumerate(self.operations):
            self.start[at] = self._closed(self.behind[at])
            self.late[at] = self.start[at] | self._closed(self.behind_late[at])
            self.done[at] = self.late[at] | 1 << at
            if isinstance(one, Collective):
                meeting[one.label] = meeting.get(one.label, 0) | self.start[at]
        for at, one in enumerate(self.operations):
            if isinstance(one, Collective):
                self.done[at] |= meeting[one.label]
        return self.done != before

    def _closed(self, behind: int) -> int:
        found, left = 0, behind
        while left:
            lowest = left & -left
            found |= self.done[lowest.bit_length() - 1] | lowest
            left ^= lowest
        return found


def _accesses(operation: Operation, order: _Order) -> Iterator[tuple[Region, bool, int]]:
    """(region, whether written, what has ended by then)."""
    at = order.number[operation.name]
    late: tuple[Region, ...] = ()
    if isinstance(operation, Compute):
        late = operation.addends
    elif isinstance(operation, Apply):
        late = tuple(need.region for need in operation.late_needs)
    for region in operation.reads:
        yield region, False, order.late[at] if region in late else order.start[at]
    for region in operation.writes:
        yield region, True, order.start[at]


def race(plan: Plan) -> str:
    """Two accesses to one element, one of them a write, of which neither is ordered before the other; or nothing."""
    order = _Order(plan)
    places: dict[tuple[str, int], list[tuple[Operation, Region, bool, int]]] = {}
    for one in plan.schedule.operations:
        for region, is_write, past in _accesses(one, order):
            if not region.is_empty:
                places.setdefault((region.buffer, region.rank), []).append((one, region, is_write, past))
    for accesses in places.values():
        for at, (one, region, writes, past) in enumerate(accesses):
            for other, its, also_writes, its_past in accesses[:at]:
                if one is other or not (writes or also_writes) or not _overlap(region, its) or _commute(one, other):
                    continue
                is_behind, is_before = past >> order.number[other.name] & 1, its_past >> order.number[one.name] & 1
                if not (is_behind or is_before):
                    return f"{one.name} and {other.name} meet in {region}, and no launch or signal orders them"
                reader, writer = (one, other) if is_before else (other, one)
                if writes != also_writes and writes == bool(is_behind) and region not in writer.reads:
                    return f"{reader.name} reads {region}, which {writer.name} writes only after it"
    return ""


def _overlap(one: Region, other: Region) -> bool:
    (a, b), (c, d) = (one.rows, one.cols), (other.rows, other.cols)
    return max(a[0], c[0]) < min(a[1], c[1]) and max(b[0], d[0]) < min(b[1], d[1])


def _commute(one: Operation, other: Operation) -> bool:
    """Additions in any order; parts of one collective, which the library orders."""
    if isinstance(one, Collective) and isinstance(other, Collective):
        return one.label == other.label
    return all(isinstance(each, ReducePut) and each.unordered for each in (one, other))


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
