"""Small plans of new kinds on GPUs, bit for bit: library queues beside tiles, sub-groups, chunks by columns.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.gpu.small_plans
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import torch

from campaigns.gpu_ranks import Report, join
from campaigns.oracle.plans.library_queues import ROWS, K, N, gathered_beside, gathered_in_pairs, reduced_beside
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.memory.group import Group, resolve
from overweave.runtime.gpu.bound import bind
from tests.ir.column_chunks import gathered, scattered

CALLS = 20
Case = tuple[str, Plan, dict[str, torch.Tensor], torch.Tensor]


def integers(seed: int, rows: int, cols: int) -> torch.Tensor:
    made = torch.randint(-3, 4, (rows, cols), generator=torch.Generator().manual_seed(seed))
    return made.float().cuda()


def cases(group: Group) -> Iterator[Case]:
    """Name, plan, operands and the right result of this rank."""
    size, rank = group.world_size, group.rank
    parts = [integers(one, ROWS, K) @ integers(9 + one, K, N) for one in range(size)]
    total = torch.stack(parts).sum(0)
    operands = {"x": integers(rank, ROWS, K), "w": integers(9 + rank, K, N)}
    for after in ((), ("tiles",)):
        where = "behind the tiles" if after else "beside the tiles"
        yield f"all-reduce of groups of rows {where}", reduced_beside(size, after=after), operands, total
    whole, height = integers(30, ROWS, K), ROWS // size
    own = {"x": whole[rank * height : (rank + 1) * height].clone(), "w": operands["w"]}
    yield "all-gather that tiles wait for", gathered_beside(size, 24), own, whole @ own["w"]
    pair = torch.cat([torch.full((4, 8), float(one)) for one in (rank - rank % 2, rank - rank % 2 + 1)]).cuda()
    x = torch.full((4, 8), float(rank), device="cuda")
    yield "all-gather in pairs", gathered_in_pairs(size), {"x": x, "w": x}, pair
    for operator, make in (("all_gather_matmul", gathered), ("matmul_reduce_scatter", scattered)):
        problem = Problem(operator=operator, m=ROWS, n=N, k=K, world_size=size, dtype="float32")
        given, right = (own, whole @ own["w"]) if make is gathered else (operands, total.chunk(size)[rank])
        yield f"{operator} by columns", make(problem, 2), given, right


def wrong(case: Case, group: Group) -> list[str]:
    """The calls whose result differs."""
    _, plan, operands, right = case
    tensors = operands | {"y": torch.empty_like(right)}
    run, failures = bind(plan, group, tensors), []
    for call in range(CALLS):
        tensors["y"].fill_(torch.nan)
        run(dict(tensors))
        torch.cuda.synchronize()
        if not torch.equal(tensors["y"], right):
            failures.append(f"call {call}")
    return failures


def main() -> None:
    join(timedelta(seconds=30))
    group, report, started = resolve(None), Report(), time.monotonic()
    for case in cases(group):
        report.line(case[0], CALLS, wrong(case, group), started)
    report.finish()


if __name__ == "__main__":
    main()
