"""Breaks right plans and compares verify with runs on a GPU of few SMs (`gpu_model.py`).

`python -m campaigns.plan_mutations --count 2000`. A mutant that verify accepts must end for every order of streams, and
must meet what its launch requires. One that verify refuses for residency alone, and that ends, is counted: the proof
demands more than these runs see.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from time import perf_counter

from msgspec.structs import replace

from campaigns.oracle.gpu_model import hang, is_modelled
from campaigns.oracle.library_queues import gathered_beside, reduced_beside
from campaigns.oracle.library_scatter import scatter
from overweave.errors import OverweaveError
from overweave.ir.dtype import Dtype
from overweave.ir.launch.gates import gate_obstacle
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.plan import COPY_ENGINE, COPY_KERNEL, PACKED_KERNEL, Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Operation
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import METHODS
from overweave.schedules.tiles.order import tile_orders

Mutation = Callable[[Random, Plan], Plan]
OPTIONS: tuple[dict[str, str | int], ...] = (
    {},
    {"mover": "copy_kernel"},
    {"pieces": 2},
    {"sms": 1},
    {"mover": "copy_kernel", "sms": 1},
)
SMALL_M = (48, 100)


def right_plans() -> Iterator[Plan]:
    """Small plans of two ranks and three: of every method, and with library queues beside others."""
    for name, method in METHODS.items():
        for ranks, m, options in ((ranks, m, one) for ranks in (2, 3) for m in SMALL_M for one in OPTIONS):
            if set(options) <= {option.name for option in method.options}:
                problem = Problem(operator=method.operator, m=m, n=64, k=32, world_size=ranks, dtype="bfloat16")
                plan = build(name, problem, options)
                engines = {one.engine for one in plan.realization.engines}
                if PACKED_KERNEL not in engines and is_modelled(plan):
                    yield plan
    yield from (reduced_beside(2), gathered_beside(2, 24))
    yield from (scatter(COPY_KERNEL, ("copies",)), scatter(COPY_ENGINE, ("main",), parts=2))


def _with_queue(rng: Random, plan: Plan, after: Callable[[tuple[str, ...], list[str]], tuple[str, ...]]) -> Plan:
    chosen = rng.choice(plan.schedule.queues)
    others = [queue.name for queue in plan.schedule.queues if queue.name != chosen.name]
    changed = replace(chosen, after=after(chosen.after, others))
    queues = tuple(changed if queue is chosen else queue for queue in plan.schedule.queues)
    return replace(plan, schedule=replace(plan.schedule, queues=queues))


def drop_after(rng: Random, plan: Plan) -> Plan:
    """A queue starts whatever it was behind: a kernel gets a stream of its own."""
    return _with_queue(rng, plan, lambda after, others: ())


def other_after(rng: Random, plan: Plan) -> Plan:
    return _with_queue(rng, plan, lambda after, others: tuple(rng.sample(others, rng.randint(0, len(others)))))


def launch_order(rng: Random, plan: Plan) -> Plan:
    """One operation of a rank is launched earlier or later."""
    operations = list(plan.schedule.operations)
    at = rng.randrange(len(operations))
    moved = operations.pop(at)
    operations.insert(rng.randint(max(0, at - 6), min(len(operations), at + 6)), moved)
    return replace(plan, schedule=replace(plan.schedule, operations=tuple(operations)))


def other_sms(rng: Random, plan: Plan) -> Plan:
    """The tile kernel leaves other SMs to library calls, or a copy kernel takes others."""
    realization = replace(plan.realization, library_sms=rng.choice((0, 24)))
    if realization.copy is not None:
        realization = replace(realization, copy=replace(realization.copy, programs=rng.choice((1, 16, 200))))
    return replace(plan, realization=realization)


def drop_waits(rng: Random, plan: Plan) -> Plan:
    """One operation waits for nothing."""
    return _with_operation(rng, plan, lambda one: replace(one, waits=()))


def other_rank_signals(rng: Random, plan: Plan) -> Plan:
    """One operation tells the other ranks' signals as well."""
    return _with_operation(rng, plan, lambda one: replace(one, notifies=one.notifies[::-1]))


def _with_operation(rng: Random, plan: Plan, change: Callable[[Operation], Operation]) -> Plan:
    chosen = rng.choice(plan.schedule.operations)
    operations = tuple(change(one) if one is chosen else one for one in plan.schedule.operations)
    return replace(plan, schedule=replace(plan.schedule, operations=operations))


def goal_against_problem(rng: Random, plan: Plan) -> Plan:
    """Another problem than the schedule's."""
    changes: tuple[dict[str, object], ...] = (
        {"m": plan.problem.m + 1}, {"n": plan.problem.n + 16}, {"k": plan.problem.k * 2},
        {"operator": rng.choice([name for name in OPERATORS if name != plan.problem.operator])},
        {"out_dtype": "float32"}, {"columns": (plan.problem.n // 2, plan.problem.n // 2)},
    )  # fmt: skip
    return replace(plan, problem=replace(plan.problem, **rng.choice(changes)))


def goal_dropped(rng: Random, plan: Plan) -> Plan:
    goals = list(plan.schedule.goal)
    goals.pop(rng.randrange(len(goals)))
    return replace(plan, schedule=replace(plan.schedule, goal=tuple(goals)))


def dtype_of_buffer(rng: Random, plan: Plan) -> Plan:
    """One buffer holds numbers of another dtype."""
    chosen = rng.choice(plan.schedule.buffers)
    dtypes: tuple[Dtype, ...] = ("float16", "float32", "bfloat16")
    other = rng.choice([one for one in dtypes if one != plan.dtype_of(chosen.name)])
    buffers = tuple(replace(one, dtype=other) if one is chosen else one for one in plan.schedule.buffers)
    return replace(plan, schedule=replace(plan.schedule, buffers=buffers))


ORDERS: dict[str, Mutation] = {
    one.__name__: one for one in (drop_after, other_after, launch_order, other_sms, drop_waits, other_rank_signals)
}
NEVER_RIGHT: dict[str, Mutation] = {one.__name__: one for one in (goal_against_problem, goal_dropped)}
MUTATIONS = ORDERS | NEVER_RIGHT | {"dtype_of_buffer": dtype_of_buffer}


def mutants(count: int, seed: int) -> Iterator[tuple[str, Plan]]:
    """The name of a mutation, and a plan that it changed, tile tables made anew."""
    plans, rng = list(right_plans()), Random(seed)
    while count:
        name = rng.choice(list(MUTATIONS))
        plan = rng.choice(plans)
        changed = MUTATIONS[name](rng, plan)
        try:
            changed = replace(changed, tile_orders=tile_orders(changed.schedule, changed.realization))
        except (OverweaveError, LookupError):
            continue
        if changed != plan:
            count -= 1
            yield name, changed


def judged(name: str, plan: Plan) -> str:
    """What came of a mutant: `hole: ...` where verify was wrong to accept it."""
    verdict = verify_plan(plan, MachineLimits())
    if not verdict.ok:
        rules = {refusal.rule for refusal in verdict.refusals}
        return "refused, ends" if rules == {"residency"} and not hang(plan) else "refused"
    if name in NEVER_RIGHT:
        return "hole: another problem's plan is accepted"
    if how := hang(plan):
        return f"hole: it hangs with {how}"
    queues = [queue.name for queue in plan.schedule.queues]
    gates = (gate_obstacle(plan, rank, queue) for rank in range(plan.schedule.world_size) for queue in queues)
    if obstacle := next(filter(None, gates), ""):
        return f"hole: its launch refuses it: {obstacle}"
    return "accepted"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    started, found = perf_counter(), Counter[tuple[str, str]]()
    for name, plan in mutants(asked.count, asked.seed):
        outcome = judged(name, plan)
        if outcome.startswith("hole"):
            print(f"{name} of {plan.name}, {plan.schedule.world_size} ranks: {outcome}")
        found[name, outcome.partition(":")[0]] += 1
    for (name, outcome), times in sorted(found.items()):
        print(f"{name:24s} {outcome:16s} {times:6d}")
    holes = sum(times for (_, outcome), times in found.items() if outcome == "hole")
    print(f"{asked.count} mutants of plans, {holes} holes, {perf_counter() - started:.0f} s")
    raise SystemExit(bool(holes))


if __name__ == "__main__":
    main()
