"""From what ranks recorded to one Timeline: tiles dealt to programs, waits between operations, one clock."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.timeline.timeline import KINDS
from overweave.memory.group import resolve
from overweave.runtime.host.host import subtract_poll_time, trace_on_host
from overweave.runtime.trace import (
    HEAD,
    NOT_A_TILE,
    Record,
    gather_records,
    make_measured_timeline,
    operation_record,
    tile_records,
    with_waits,
)
from overweave.schedules.catalog.catalog import build
from tests.ranks import run_ranks

US = 1000
COMPUTE, COPY, WAIT, BEGIN = (KINDS.index(kind) for kind in ("compute", "copy", "wait", "begin"))


def plan(name: str = "all_gather_matmul.push", m: int = 64) -> Plan:
    operator = name.split(".")[0]
    problem = Problem(operator=operator, m=m, n=64, k=64, world_size=2, dtype="bfloat16")
    is_fused = name.endswith((".push", ".scatter"))
    return build(name, problem, {"pieces": 1, "block_m": 16, "block_n": 64} if is_fused else {})


def tiles(times: list[tuple[int, int, int]], programs: int) -> list[Record]:
    """Of rank 0, whose first two tiles are of its own shard and whose other two wait for the peer's."""
    return tile_records(plan(), 0, "tiles", without_addends(times), programs)


def without_addends(times: list[tuple[int, int, int]]) -> torch.Tensor:
    return torch.nn.functional.pad(torch.tensor(times) * US, (0, 2))


def test_a_program_runs_one_tile_after_the_other():
    records = tiles([(0, 0, 10), (0, 0, 12), (10, 10, 20), (12, 12, 25)], 2)
    assert [(record.tile, record.program) for record in records] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert all(record.kind == COMPUTE for record in records)
    assert (records[2].begin_ns, records[2].end_ns) == (10 * US, 20 * US)


def test_a_wait_is_a_span_if_there_was_something_to_wait_for():
    records = tiles([(0, 5, 10), (0, 0, 12), (10, 18, 20), (12, 12, 25)], 2)
    assert sorted((record.tile, record.kind) for record in records) == [
        (0, COMPUTE),
        (1, COMPUTE),
        (2, COMPUTE),
        (2, WAIT),
        (3, COMPUTE),
    ]
    assert [(each.begin_ns, each.end_ns) for each in records if each.kind == WAIT] == [(10 * US, 18 * US)]


def test_a_tile_that_is_fetched_ahead_runs_when_its_program_is_free():
    records = tiles([(0, 0, 10), (5, 6, 20), (15, 16, 30), (25, 26, 40)], 1)
    assert [(record.begin_ns // US, record.end_ns // US) for record in records] == [
        (0, 10),
        (10, 20),
        (20, 30),
        (30, 40),
    ]


def test_waits_are_gaps_before_what_has_something_to_wait_for():
    operations = tuple(plan("matmul_reduce_scatter.scatter").schedule.of_rank(0))
    copies = [index for index, operation in enumerate(operations) if operation.queue == "copies"]
    records = [
        Record(HEAD, BEGIN, NOT_A_TILE, 0, 0, 5 * US),
        operation_record(copies[0], operations[copies[0]], 50 * US, 60 * US),
    ]
    (wait,) = set(with_waits(operations, records)) - set(records)
    assert (wait.kind, wait.begin_ns, wait.end_ns) == (WAIT, 5 * US, 50 * US)


def test_a_wait_for_addends_stands_inside_the_tile():
    problem = Problem(operator="matmul_reduce_scatter", m=32, n=64, k=64, world_size=2, dtype="bfloat16")
    options = {"pieces": 1, "block_m": 16, "block_n": 64, "sums": "epilogue"}
    made = build("matmul_reduce_scatter.scatter", problem, options)
    times = torch.tensor([(0, 0, 10, 0, 0), (10, 10, 50, 20, 45)]) * US
    records = tile_records(made, 0, "tiles", times, 1)
    assert [(each.kind, each.begin_ns // US, each.end_ns // US) for each in records] == [
        (COMPUTE, 0, 10),
        (COMPUTE, 10, 20),
        (WAIT, 20, 45),
        (COMPUTE, 45, 50),
    ]


def both_ranks() -> list[list[Record]]:
    """Rank 1 pushes from 100 to 200; rank 0 claims a tile of that shard at 150 and takes until 400 to see it."""
    made = plan()
    records = []
    for rank in (0, 1):
        operations = tuple(made.schedule.of_rank(rank))
        push = next(index for index, operation in enumerate(operations) if operation.name.startswith("push"))
        begin = Record(HEAD, BEGIN, NOT_A_TILE, 0, 90 * US, 95 * US)
        records.append([begin, operation_record(push, operations[push], 100 * US, 200 * US)])
    times = without_addends([(96, 96, 150), (150, 400, 500), (150, 400, 500), (150, 400, 500)])
    records[0] += tile_records(made, 0, "tiles", times, 4)
    return records


def test_a_timeline_starts_with_the_first_call_and_has_an_arrow_for_each_signal():
    timeline = make_measured_timeline(plan(), both_ranks())
    assert timeline.spans[0].begin_us == 0
    assert timeline.total_us == 410
    arrows = [(timeline.spans[arrow.source], timeline.spans[arrow.target]) for arrow in timeline.arrows]
    assert [(source.rank, source.kind, target.rank, target.kind) for source, target in arrows] == [
        (1, "copy", 0, "compute")
    ]
    assert {track for rank, track in timeline.tracks() if rank == 0} == {
        "tiles", "copies", "tiles.000", "tiles.001", "tiles.002", "tiles.003"
    }  # fmt: skip


def test_an_interpreted_poll_is_no_wait():
    records = subtract_poll_time(plan(), both_ranks())[0]
    waits = [record for record in records if record.kind == WAIT]
    assert waits
    assert {(record.begin_ns, record.end_ns) for record in waits} == {(150 * US, 200 * US)}
    waiting = {record.tile for record in waits}
    assert all(record.begin_ns == 200 * US for record in records if record.kind == COMPUTE and record.tile in waiting)


def gathered_on_rank() -> list[list[int]] | None:
    group = resolve(None)
    own = [Record(HEAD, BEGIN, NOT_A_TILE, 0, 1000 * group.rank + 7, 1000 * group.rank + 9)] * group.rank
    by_rank = gather_records(group, own, zero_ns=1000 * group.rank)
    return None if by_rank is None else [[number for record in records for number in record] for records in by_rank]


def traced_on_rank() -> list[object]:
    group, made = resolve(None), plan("matmul_reduce_scatter.per_shard")
    torch.manual_seed(group.rank)
    x, w, y = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16(), torch.full((32, 64), torch.nan).bfloat16()
    timeline = trace_on_host(made, group, {"x": x, "w": w}, {"y": y})
    partial = x.float() @ w.float()
    dist.all_reduce(partial)
    is_near = torch.allclose(y.float(), partial[32 * group.rank : 32 * group.rank + 32], rtol=0.05, atol=0.5)
    if timeline is None:
        return [is_near]
    names = {span.name for span in timeline.spans if span.kind != "begin"}
    return [is_near, sorted(names), timeline.total_us]


@pytest.mark.slow
def test_records_of_all_ranks_come_together_on_rank_0():
    head = [HEAD, BEGIN, NOT_A_TILE, 0, 7, 9]
    assert run_ranks(gathered_on_rank, 3) == [[[], head, head * 2], None, None]


@pytest.mark.slow
def test_a_traced_call_computes_and_times_every_operation():
    (is_near, names, total_us), (peer_is_near,) = run_ranks(traced_on_rank, 2)
    assert is_near
    assert peer_is_near
    made = plan("matmul_reduce_scatter.per_shard")
    assert set(names) == {
        operation.name for operation in made.schedule.operations if any(not r.is_empty for r in operation.writes)
    }
    assert total_us > 0
