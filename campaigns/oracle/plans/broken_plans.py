"""Right plans, and ways to break what a plan adds to its schedule. None where there is nothing to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from msgspec.structs import replace

from campaigns.oracle.plans import broken_blocks
from campaigns.oracle.plans.library_queues import gathered_beside, reduced_beside
from campaigns.oracle.plans.library_scatter import scatter
from overweave.ir.dtype import Dtype
from overweave.ir.epilogue import Epilogue, Norm
from overweave.ir.operators.registry import OPERATORS, operator_of
from overweave.ir.plan import (
    COPY_ENGINE,
    COPY_KERNEL,
    LIBRARY,
    PACKED_KERNEL,
    REDUCE_KERNEL,
    Engine,
    Plan,
)
from overweave.ir.problem import Problem
from overweave.ir.schedule import (
    ECHOES,
    INPUT,
    OUTPUT,
    SYMMETRIC,
    Collective,
    Compute,
    Get,
    Operation,
    Put,
    Queue,
    Wait,
)
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import METHODS

Mutation = Callable[[Random, Plan], Plan | None]
OPTIONS: tuple[dict[str, str | int], ...] = (
    {},
    {"mover": "copy_kernel"},
    {"pieces": 2},
    {"sms": 1},
    {"sums": "epilogue"},
    {"mover": "copy_kernel", "sms": 1},
    {"carrier": "library"},
    {"sms": 26, "library_sms": 24, "block_m": 64, "block_n": 32},
)
SMALL_M = (48, 100)
SIDE_KERNELS = (REDUCE_KERNEL, COPY_KERNEL)
TOO_MANY_SIGNALS = 1 << 13
NORM = Norm(eps=1e-5, residual=True)


def right_plans() -> Iterator[Plan]:
    """Small plans of two ranks and three: of every method, with a norm where a kernel of sums ends with one, and with
    library queues beside others."""
    for name, method in METHODS.items():
        for ranks, m, options in ((ranks, m, one) for ranks in (2, 3) for m in SMALL_M for one in OPTIONS):
            if set(options) <= {option.name for option in method.options}:
                rows = operator_of(method.operator).whole_rows(m, ranks)
                problem = Problem(operator=method.operator, m=rows, n=64, k=32, world_size=ranks, dtype="bfloat16")
                plan = build(name, problem, options)
                if PACKED_KERNEL not in engines_of(plan).values():
                    yield plan
        if method.norms == REDUCE_KERNEL:
            problem = Problem(operator=method.operator, m=48, n=64, k=32, world_size=3, dtype="bfloat16", norm=NORM)
            yield build(name, problem, {})
    yield from (reduced_beside(2), reduced_beside(3), gathered_beside(2, 24))
    yield from (scatter(COPY_KERNEL, ("copies",)), scatter(COPY_ENGINE, ("main",), parts=2))


def engines_of(plan: Plan) -> dict[str, str]:
    return {one.queue: one.engine for one in plan.realization.engines}


def _with(plan: Plan, **changes: Any) -> Plan:
    """The plan with another schedule."""
    return replace(plan, schedule=replace(plan.schedule, **changes))


def _with_queue(plan: Plan, chosen: Queue, after: tuple[str, ...]) -> Plan:
    queues = tuple(replace(one, after=after) if one is chosen else one for one in plan.schedule.queues)
    return _with(plan, queues=queues)


def _with_operation(plan: Plan, chosen: Operation, changed: Operation) -> Plan:
    return _with(plan, operations=tuple(changed if one is chosen else one for one in plan.schedule.operations))


# Streams, order and waits: right or wrong, as the runs tell.


def drop_after(rng: Random, plan: Plan) -> Plan | None:
    """A queue starts whatever it was behind: a kernel gets a stream of its own."""
    return _with_queue(plan, rng.choice(plan.schedule.queues), ())


def other_after(rng: Random, plan: Plan) -> Plan | None:
    chosen = rng.choice(plan.schedule.queues)
    others = [queue.name for queue in plan.schedule.queues if queue is not chosen]
    return _with_queue(plan, chosen, tuple(rng.sample(others, rng.randint(0, len(others)))))


def launch_order(rng: Random, plan: Plan) -> Plan | None:
    """One operation of a rank is launched earlier or later."""
    operations = list(plan.schedule.operations)
    at = rng.randrange(len(operations))
    moved = operations.pop(at)
    operations.insert(rng.randint(max(0, at - 6), min(len(operations), at + 6)), moved)
    return _with(plan, operations=tuple(operations))


def other_sms(rng: Random, plan: Plan) -> Plan | None:
    """The tile kernel leaves other SMs to library calls, or a copy kernel takes others."""
    realization = replace(plan.realization, library_sms=rng.choice((0, 24)))
    if realization.copy is not None:
        realization = replace(realization, copy=replace(realization.copy, programs=rng.choice((1, 16, 200))))
    return replace(plan, realization=realization)


def drop_waits(rng: Random, plan: Plan) -> Plan | None:
    """One operation waits for nothing before it starts."""
    chosen = rng.choice(plan.schedule.operations)
    return _with_operation(plan, chosen, replace(chosen, waits=()))


def other_rank_signals(rng: Random, plan: Plan) -> Plan | None:
    """One operation tells another rank."""
    chosen = rng.choice(plan.schedule.operations)
    if not chosen.notifies:
        return None
    first, *rest = chosen.notifies
    other = (first.rank + 1) % plan.schedule.world_size
    return _with_operation(plan, chosen, replace(chosen, notifies=(replace(first, rank=other), *rest)))


def residency_without_tiles(rng: Random, plan: Plan) -> Plan | None:
    """Kernels and library calls beside each other where no kernel computes tiles: streams and order at random."""
    pushes: Engine = rng.choice((COPY_ENGINE, COPY_KERNEL))
    after = tuple(rng.sample(("main", "copies"), rng.randint(0, 2)))
    changed = scatter(pushes, after, parts=rng.randint(1, 2))
    return changed if rng.random() < 0.4 else rng.choice((launch_order, other_after))(rng, changed)


def premise_of_launch(rng: Random, plan: Plan) -> Plan | None:
    """What a launch requires beside the schedule: what holds a kernel back, where memory lies, how many signals."""
    kind = rng.random()
    engines = engines_of(plan)
    if kind < 0.5:
        behind = [one for one in plan.schedule.queues if engines[one.name] in SIDE_KERNELS and one.after]
        return _with_queue(plan, rng.choice(behind), ()) if behind else None
    if kind < 0.8:
        chosen = rng.choice([one for one in plan.schedule.buffers if one.home not in (INPUT, OUTPUT)] or [None])
        homes = [home for home in (INPUT, OUTPUT, SYMMETRIC) if chosen is None or home != chosen.home]
        changed = tuple(replace(one, home=rng.choice(homes)) if one is chosen else one for one in plan.schedule.buffers)
        return replace(_with(plan, buffers=changed), problem=replace(plan.problem, operator=""))
    pads = tuple(replace(one, size=TOO_MANY_SIGNALS) for one in plan.schedule.pads)
    return _with(plan, pads=pads)


# What is never right, whatever the runs say.


def goal_against_problem(rng: Random, plan: Plan) -> Plan | None:
    """Another problem than the schedule's."""
    changes: tuple[dict[str, object], ...] = (
        {"m": plan.problem.m + 1}, {"n": plan.problem.n + 16}, {"k": plan.problem.k * 2},
        {"operator": rng.choice([name for name in OPERATORS if name != plan.problem.operator])},
        {"out_dtype": "float16"}, {"columns": (plan.problem.n // 2, plan.problem.n // 2)},
    )  # fmt: skip
    return replace(plan, problem=replace(plan.problem, **rng.choice(changes)))


def goal_dropped(rng: Random, plan: Plan) -> Plan | None:
    goals = list(plan.schedule.goal)
    goals.pop(rng.randrange(len(goals)))
    return _with(plan, goal=tuple(goals))


def dtype_of_collective(rng: Random, plan: Plan) -> Plan | None:
    """One end of a library's collective holds numbers of another dtype."""
    parts = [one for one in plan.schedule.operations if isinstance(one, Collective)]
    ends = {(one.sources[0].buffer, one.destinations[0].buffer) for one in parts}
    names = [rng.choice(pair) for pair in sorted(ends) if pair[0] != pair[1]]
    return _with_dtype(rng, plan, rng.choice(names)) if names else None


def _with_dtype(rng: Random, plan: Plan, name: str) -> Plan:
    dtypes: tuple[Dtype, ...] = ("float16", "float32", "bfloat16")
    other = rng.choice([one for one in dtypes if one != plan.dtype_of(name)])
    buffers = tuple(replace(one, dtype=other) if one.name == name else one for one in plan.schedule.buffers)
    return _with(plan, buffers=buffers)


def rounding(rng: Random, plan: Plan) -> Plan | None:
    """Sums that the method's record lets be rounded in between are said to be added in fp32."""
    method = METHODS.get(plan.name)
    is_rounded = method is not None and method.adds is not None and method.adds.precision == "result"
    # Islands are pairs where ranks are even in number; islands of one rank add nothing inside.
    has_pairs = method is None or not method.has_levels or plan.schedule.world_size % 2 == 0
    if not is_rounded or not has_pairs or plan.schedule.world_size < 3:
        return None
    return replace(plan, realization=replace(plan.realization, partial_sums="float32"))


def products_added_in_16_bits(rng: Random, plan: Plan) -> Plan | None:
    """What library matmuls add to each other's products in is of the plan's dtype, so that each addition rounds."""
    added = {one.out[0].buffer for one in plan.schedule.operations if isinstance(one, Compute) and one.accumulate}
    if not added:
        return None
    buffers = tuple(replace(one, dtype=None) if one.name in added else one for one in plan.schedule.buffers)
    return _with(plan, buffers=buffers)


def residual_elsewhere(rng: Random, plan: Plan) -> Plan | None:
    """Products that do not lie in the result are given rows of a residual."""
    results = {buffer.name for buffer in plan.schedule.buffers if buffer.home == OUTPUT}
    made = {one.out[0].buffer for one in plan.schedule.operations if isinstance(one, Compute)}
    changed = replace(plan.problem, epilogue=Epilogue(residual=True))
    return replace(plan, problem=changed) if made - results and changed.product_epilogue.residual else None


def norm_of_no_row(rng: Random, plan: Plan) -> Plan | None:
    """Rows that are written by what does not norm are owed a norm, or the tiles that norm them hold half a row."""
    sums, engines = plan.realization.reduction, engines_of(plan)
    if plan.problem.norm is not None:
        if sums is None:
            return None
        halved = replace(sums, block_n=sums.block_n // 2)
        return replace(plan, realization=replace(plan.realization, reduction=halved))
    results = {buffer.name for buffer in plan.schedule.buffers if buffer.home == OUTPUT}
    writers = {
        engines[one.queue] for one in plan.schedule.operations if any(part.buffer in results for part in one.writes)
    }
    if not plan.problem.record.forms.norm or writers <= {REDUCE_KERNEL, LIBRARY}:
        return None
    return replace(plan, problem=replace(plan.problem, norm=NORM))


def graph_safety(rng: Random, plan: Plan) -> Plan | None:
    """What a replay of a captured call does otherwise: a word that streams set twice, a peer's tensor, no head."""
    return rng.choice((_word_set_twice, _peers_tensor, _without_head))(rng, plan)


def _word_set_twice(rng: Random, plan: Plan) -> Plan | None:
    engines = engines_of(plan)
    told = [one for one in plan.schedule.operations if engines[one.queue] in (COPY_ENGINE, LIBRARY) and one.notifies]
    if not told:
        return None
    chosen = rng.choice(told)
    notify = chosen.notifies[0]

    def counted(wait: Wait, rank: int) -> Wait:
        hears = (rank, wait.pad) == (notify.rank, notify.pad) and notify.signal in range(*wait.signals)
        return replace(wait, count=2) if hears and wait.signals[1] - wait.signals[0] == 1 else wait

    doubled = replace(chosen, notifies=(*chosen.notifies, notify))
    operations = tuple(
        replace(one, waits=tuple(counted(wait, one.rank) for wait in one.waits))
        for one in (doubled if each is chosen else each for each in plan.schedule.operations)
    )
    return _with(plan, operations=operations)


def _peers_tensor(rng: Random, plan: Plan) -> Plan | None:
    """A move reads a peer's operand, or writes its result, in place of the workspace there."""
    moves = [one for one in plan.schedule.operations if isinstance(one, Put | Get) and one.sources]
    if not moves:
        return None
    chosen = rng.choice(moves)
    field, home = ("destinations", OUTPUT) if isinstance(chosen, Put) else ("sources", INPUT)
    part = getattr(chosen, field)[0]
    (rows, cols), fits = part.shape, [one for one in plan.schedule.buffers if one.home == home]
    fits = [one for one in fits if one.rows >= rows and one.cols >= cols]
    if not fits:
        return None
    other = replace(part, buffer=rng.choice(fits).name, rows=(0, rows), cols=(0, cols))
    return _with_operation(plan, chosen, replace(chosen, **{field: (other, *getattr(chosen, field)[1:])}))


def _without_head(rng: Random, plan: Plan) -> Plan | None:
    return _with(plan, reuse=ECHOES, credits=()) if plan.schedule.pads else None


def dtype_of_buffer(rng: Random, plan: Plan) -> Plan | None:
    """One buffer holds numbers of another dtype."""
    return _with_dtype(rng, plan, rng.choice(plan.schedule.buffers).name)


_NEVER: tuple[Mutation, ...] = (
    goal_against_problem,
    goal_dropped,
    dtype_of_collective,
    rounding,
    graph_safety,
    products_added_in_16_bits,
    residual_elsewhere,
    norm_of_no_row,
    broken_blocks.normed_rows_travel,
)
_SOMETIMES: tuple[Mutation, ...] = (
    *(drop_after, other_after, launch_order, other_sms, drop_waits, other_rank_signals),
    *(dtype_of_buffer, residency_without_tiles, premise_of_launch),
    broken_blocks.library_moves_permuted_blocks,
    *broken_blocks.RUN,
)
RUN = tuple(one.__name__ for one in broken_blocks.RUN)  # small enough to run every interleaving
NEVER_RIGHT = tuple(one.__name__ for one in _NEVER)
MUTATIONS: dict[str, Mutation] = {one.__name__: one for one in (*_SOMETIMES, *_NEVER)}
