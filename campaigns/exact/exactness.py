"""Are results right? Random shapes and long runs of calls on emulated ranks, every result compared.

    python -m campaigns.exactness --depth library --shapes 200 --calls 1000
    python -m campaigns.exactness --depth interpreter --shapes 30 --calls 1000 --worlds 2

Integer data in {-1, 0, 1} with at most 32 non-zeros along the global k: every partial and total is exact, so results
are bit-equal to the reference. Float data: at most 1.05 times the error of torch + library collectives against fp64,
for each case of at least 4096 elements and over all elements of a dtype. Outputs start as NaN, inputs change at
every call, and in the long runs a random rank is late.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
import torch.distributed as dist

from campaigns.cases import ALL_GATHER, BY_ENGINES, OPERATORS, Named
from campaigns.cpu_ranks import run_on_any_ranks
from campaigns.exact.calls import Case, Form
from campaigns.gpu_ranks import Check, arguments
from overweave.ir.plan import MOST_WEIGHTS, Plan, indexed_name
from overweave.ir.problem import Problem
from overweave.ir.shards import shard_rows
from overweave.memory.group import Group, resolve
from overweave.ops.reference import PlainCollectives
from overweave.runtime.host.host import Depth, run_on_host
from overweave.schedules.catalog import catalog
from overweave.schedules.methods.registry import method_of

MOVERS = ("copy_engine", "copy_kernel")
# What options are drawn from, where a schedule has them.
VARIED: dict[str, tuple[int | str, ...]] = {
    "pieces": (1, 2, 3),
    "mover": MOVERS,
    "sums": ("kernel", "epilogue"),
    "library_sms": (16, 124, 130),  # of 132: so that tiles are a wave, or several
    "order": ("ring", "all_peers"),
    "carrier": ("copy_engine", "library"),
    "rows": ("own", "cyclic"),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WORLDS = (1, 2, 3, 4, 8)
LARGEST: dict[Depth, int] = {"library": 512, "interpreter": 256}
NON_ZEROS = 32
ERROR_RATIO = 1.05
JUDGED_ALONE = 4096
LATE_UP_TO_S = 3e-3


class Data(NamedTuple):
    """A rank's tensors, and the exact product it should hold (fp64)."""

    x: torch.Tensor
    w: torch.Tensor
    exact: torch.Tensor


def random_case(chance: random.Random, world_size: int, depth: Depth) -> Case:
    """Any schedule, dtype and layout, one weight or several; every tenth m is smaller than the group."""
    operator, dtype = chance.choice(OPERATORS), chance.choice(DTYPES)
    name = chance.choice(catalog.names(operator))
    largest = LARGEST[depth]
    # Kernels load rows in bulk: they must start at multiples of 16 bytes.
    step = 16 // dtype.itemsize if depth == "interpreter" else 1
    n, k = (step * chance.randint(1, largest // step) for _ in range(2))
    m = chance.randrange(world_size) if chance.random() < 0.1 else chance.randint(1, largest)
    known = {option.name for option in method_of(name).options}
    options = {name: chance.choice(values) for name, values in VARIED.items() if name in known}
    if options.get("sums") == "epilogue" and "mover" in known:
        options["mover"] = "copy_engine"
    if options.get("rows") == "cyclic":
        m = -(-m // world_size) * world_size
    plan = " ".join([name.partition(".")[2], *(f"{name}={value}" for name, value in options.items())])
    columns = _columns(chance, n, step) if operator == ALL_GATHER else ()
    return Case(operator, m, n, k, dtype, chance.random() < 0.5, plan, Form(weights=len(columns) or 1), columns)


def _columns(chance: random.Random, n: int, step: int) -> tuple[int, ...]:
    """In every other case, n as the columns of two or three weights, where it has so many steps."""
    cuts = range(step, n, step)
    if chance.random() < 0.5 or len(cuts) < MOST_WEIGHTS - 1:
        return ()
    ends = sorted(chance.sample(cuts, chance.randint(1, MOST_WEIGHTS - 1)))
    return tuple(hi - lo for lo, hi in zip((0, *ends), (*ends, n), strict=True))


def make_data(problem: Problem, rank: int, seed: int, is_integer: bool = True) -> Data:
    """The same on every rank for one seed, without a word between them: each makes all and keeps its own."""
    generator = torch.Generator().manual_seed(seed)
    gathers = problem.operator == ALL_GATHER
    global_k = problem.k * (1 if gathers else problem.world_size)
    width = (problem.world_size if gathers else 1) * problem.n
    dtype = getattr(torch, problem.dtype)
    if is_integer:
        x = torch.zeros(problem.m, global_k)
        where = torch.randint(0, global_k, (problem.m, NON_ZEROS), generator=generator)
        x.scatter_(1, where, torch.randint(0, 2, where.shape, generator=generator).float() * 2 - 1)
        w = torch.randint(-1, 2, (global_k, width), generator=generator).float()
    else:
        x = torch.randn(problem.m, global_k, generator=generator)
        w = torch.randn(global_k, width, generator=generator)
    x, w = x.to(dtype), w.to(dtype)
    rows = slice(*shard_rows(problem.m, problem.world_size, rank))
    extent = problem.n if gathers else problem.k
    own = slice(rank * extent, (rank + 1) * extent)
    if gathers:
        own_x, own_w, exact = x[rows], w[:, own], x.double() @ w[:, own].double()
    else:
        parts = [x[slice(*part)] for part in problem.result_ranges(rank)]
        summed = torch.cat(parts)
        own_x, own_w, exact = x[:, own], w[own], summed.double() @ w.double()
    own_w = own_w.t().contiguous().t() if problem.b_is_transposed else own_w.contiguous()
    return Data(own_x.contiguous(), own_w, exact)


def compute(plan: Plan, group: Group, data: Data, depth: Depth) -> torch.Tensor:
    """Our result, into outputs of NaN: one for each weight, side by side."""
    inputs, outputs = {"x": data.x}, {}
    for index, w in enumerate(data.w.split(plan.problem.widths, dim=1)):
        inputs[indexed_name("w", index)] = w.t().contiguous().t() if plan.problem.b_is_transposed else w.contiguous()
        shape = len(data.exact), w.shape[1]
        outputs[indexed_name("y", index)] = torch.full(shape, torch.nan, dtype=data.x.dtype)
    run_on_host(plan, group, inputs, outputs, depth=depth)
    return torch.cat(list(outputs.values()), dim=1)


def library_result(problem: Problem, group: Group, data: Data) -> torch.Tensor:
    """torch + library collectives, in the same dtype: the reference of the operator's record."""
    collectives = PlainCollectives(group.process_group, problem.m, problem.strip)
    found: torch.Tensor = problem.record.reference({"x": data.x, "w": data.w}, collectives)
    return found


def try_shapes(depth: Depth, count: int, seed: int) -> list[str]:
    """One rank's part: random cases, first with integers, then with floats."""
    group, chance = resolve(None), random.Random(seed)
    wrong: list[str] = []
    errors = {str(dtype): [0.0, 0.0] for dtype in DTYPES}
    for index in range(count):
        case = random_case(chance, group.world_size, depth)
        plan, own = case.built(group.world_size), seed + 2 * index
        data = make_data(plan.problem, group.rank, own)
        if not torch.equal(compute(plan, group, data, depth), data.exact.to(data.x.dtype)):
            wrong.append(f"{case}: rank {group.rank} is not bit-equal")
        data = make_data(plan.problem, group.rank, own + 1, is_integer=False)
        ours, library = compute(plan, group, data, depth), library_result(plan.problem, group, data)
        sums = torch.tensor(
            [_squares(ours - data.exact), _squares(library - data.exact), _squares(data.exact), data.exact.numel()],
            dtype=torch.float64,
        )
        dist.all_reduce(sums, group=group.process_group)
        ours_squares, library_squares, squares, elements = sums.tolist()
        if not ours_squares <= library_squares * ERROR_RATIO**2 and elements >= JUDGED_ALONE:
            ratio = (ours_squares / max(library_squares, 1e-300)) ** 0.5
            wrong.append(f"{case}: error {ratio:.3f} times that of the library")
        # Every element counts once, relative to the size of its case's elements.
        scale = elements / squares if squares else 0.0
        errors[str(case.dtype)][0] += ours_squares * scale
        errors[str(case.dtype)][1] += library_squares * scale
    ratios = {dtype: (ours / library) ** 0.5 for dtype, (ours, library) in errors.items() if library}
    if not group.rank:
        print("error ratios:", ", ".join(f"{dtype} {ratio:.4f}" for dtype, ratio in ratios.items()), flush=True)
    return wrong + [f"all {dtype}: {ratio:.3f}" for dtype, ratio in ratios.items() if not ratio <= ERROR_RATIO]


def try_calls(depth: Depth, count: int, seed: int) -> list[str]:
    """One rank's part: successive calls of several plans in turn, without anything between them, a random rank late."""
    group, chance, own_chance = resolve(None), random.Random(seed), random.Random(seed + 1)
    wrong: list[str] = []
    plans = [_long_run_case(one, group.world_size).built(group.world_size) for one in BY_ENGINES]
    for call in range(count):
        plan = chance.choice(plans)
        data = make_data(plan.problem, group.rank, seed + call)
        if own_chance.randrange(group.world_size) == group.rank:
            time.sleep(own_chance.uniform(0, LATE_UP_TO_S))
        result = compute(plan, group, data, depth)
        if not torch.equal(result, data.exact.to(result.dtype)):
            wrong.append(f"call {call}, {plan.name}: rank {group.rank} is not bit-equal")
    return wrong


def _long_run_case(one: Named, world_size: int) -> Case:
    plan = one.with_words("pieces=2" if one.method.takes("pieces") else "").plan
    return Case(one.operator, 8 * world_size + 3, 32, 16, plan=plan)


def _squares(difference: torch.Tensor) -> float:
    """NaN, where a result is missing, counts as infinite."""
    return float(difference.double().square().nan_to_num(nan=torch.inf).sum())


def checks(asked: argparse.Namespace, device: str) -> Iterator[Check]:
    """Random shapes, dealt to the worlds, and successive calls."""
    ranks, worlds = dist.get_world_size(), len(asked.worlds)
    share = asked.shapes // worlds + (asked.worlds.index(ranks) < asked.shapes % worlds)
    for name, tried, count in (("random shapes", try_shapes, share), ("successive calls", try_calls, asked.calls)):
        yield Check(f"{asked.depth}: {name}", partial(tried, asked.depth, count, asked.seed + ranks), count)


def main() -> int:
    parser = arguments(str(__doc__), deadline_s=120.0)
    parser.add_argument("--depth", choices=("library", "interpreter"), default="library")
    parser.add_argument("--shapes", type=int, default=200, help="random shapes, dealt to the worlds")
    parser.add_argument("--calls", type=int, default=1000, help="successive calls, in each world")
    if parser.parse_known_args()[0].depth == "interpreter":
        import_module("overweave.runtime.host.interpreted")  # once, before the ranks fork
    return run_on_any_ranks(parser, checks, WORLDS)


if __name__ == "__main__":
    sys.exit(main())
