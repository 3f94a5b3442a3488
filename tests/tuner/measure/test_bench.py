"""The comparison on emulated ranks, with plain torch standing in for our operator."""

from __future__ import annotations

import os
from unittest.mock import patch

import msgspec
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from overweave.errors import InputError, MachineError
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.problem import Problem
from overweave.memory.group import resolve
from overweave.ops.operators import operator_for
from overweave.tuner.measure import bench, trial
from overweave.tuner.measure.baselines import (
    OURS,
    SEQUENTIAL,
    TORCH,
    TORCH_FUSED,
    methods_of,
)
from overweave.tuner.measure.bench import (
    BenchRequest,
    BenchRun,
    MethodRow,
    middle,
    regressions,
    runs,
    spread,
    summarize,
)
from overweave.tuner.measure.timer import Effort
from overweave.tuner.measure.trial import CheckedCall, agrees
from overweave.tuner.space.shapes import ShapeCase
from tests.ranks import run_ranks

EFFORT = Effort(rounds=6, warmup=1)
CASES = (ShapeCase("even", 64, 48, 32), ShapeCase("uneven", 37, 24, 16))
PLAIN, WRONG, BROKEN = "plain", "wrong", "broken"
PER_SHARD, DECOMPOSED = "per_shard", "decomposed"
ALL_REDUCE, REDUCE_SCATTER = "matmul_all_reduce", "matmul_reduce_scatter"
EXCHANGES = "all_to_all_matmul", "matmul_all_to_all"
# Library plans that move pieces, which every bench shows.
PIECE_BY_PIECE = {
    "all_gather_matmul": [PER_SHARD],
    REDUCE_SCATTER: [PER_SHARD, DECOMPOSED],
    ALL_REDUCE: [DECOMPOSED],
    "all_to_all_matmul": ["per_peer"],
    "matmul_all_to_all": ["per_peer", DECOMPOSED],
}
# What is chosen on a CPU: the overlapped plan, but where k does not divide by the ranks and kernels cannot address it.
CHOSEN = {
    "all_gather_matmul": "push",
    "matmul_reduce_scatter": SEQUENTIAL,
    "matmul_all_reduce": SEQUENTIAL,
    "all_to_all_matmul": "push",
    "matmul_all_to_all": "push",
}


def gather_then_matmul(x, w, group, m, plan):
    shards = [torch.empty(-(-m // group.size()), x.shape[1], dtype=x.dtype) for _ in range(group.size())]
    short = shards[0].shape[0] - x.shape[0]
    dist.all_gather(shards, torch.nn.functional.pad(x, (0, 0, 0, short)), group=group)
    if plan == BROKEN:
        raise InputError("plan broken", "no such plan", "Choose another")
    return torch.cat(shards)[:m] @ w + (1 if plan == WRONG else 0)


def matmul_then_reduce(x, w, group, m, plan):
    total = x @ w
    dist.all_reduce(total, group=group)
    return total


def matmul_then_scatter(x, w, group, m, plan):
    return torch.chunk(matmul_then_reduce(x, w, group, m, plan), group.size())[group.rank()]


def exchanged(rows, group):
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=group)
    return received


def exchange_then_matmul(x, w, group, m, plan):
    return exchanged(x, group) @ w


def matmul_then_exchange(x, w, group, m, plan):
    return exchanged(x @ w, group)


PLAINLY = {
    "all_gather_matmul": gather_then_matmul,
    "matmul_reduce_scatter": matmul_then_scatter,
    "matmul_all_reduce": matmul_then_reduce,
    "all_to_all_matmul": exchange_then_matmul,
    "matmul_all_to_all": matmul_then_exchange,
}


def plainly(problem: Problem):
    return lambda x, w, group, *, plan: PLAINLY[problem.operator](x, w, group, problem.m, plan)


def compared(operator: str, plans: tuple[str, ...]) -> object:
    request = BenchRequest(operator=operator, cases=CASES, device="cpu", dtype="fp32", plans=plans, effort=EFFORT)
    told: list[float] = []
    *_, result = runs(request, resolve(None), plainly, lambda case, part: told.append(part))
    assert told[-1] == 1.0
    return msgspec.to_builtins(result)


def compare_on(world_size: int, operator: str, plans: tuple[str, ...] = ()) -> BenchRun:
    return msgspec.convert(run_ranks(compared, world_size, operator, plans)[0], BenchRun)


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_method_that_a_cpu_can_run(operator):
    result = compare_on(3, operator)
    assert result.world_size == 3
    shards = PIECE_BY_PIECE[operator]
    fused = set() if operator in EXCHANGES else {TORCH_FUSED}  # torch has no fused operator that exchanges
    torchs = set(TORCH[1:]) if operator == "matmul_all_reduce" else fused
    for rows in result.cases:
        assert [row.name for row in rows.methods] == ["matmul", "communication", SEQUENTIAL, *shards, OURS]
        assert set(rows.left_out) == {"copies", "ceiling", *torchs}
        assert all(0 < row.median_us <= row.p90_us for row in rows.methods)
        assert [row.plan for row in rows.methods] == ["", "", "", *shards, CHOSEN[operator]]
        sequential = rows.methods[2]
        assert sequential.speedups[SEQUENTIAL].value == 1.0
        assert sequential.measures.overlap_efficiency in (0.0, None)


@pytest.mark.slow
def test_wrong_and_failing_methods_are_left_out_with_the_reason():
    rows = compare_on(2, "all_gather_matmul", (PLAIN, WRONG, BROKEN)).cases[0]
    assert [(row.name, row.plan) for row in rows.methods][-1] == (f"plan.{PLAIN}", PLAIN)
    assert "differs" in rows.left_out[f"plan.{WRONG}"]
    assert "no such plan" in rows.left_out[f"plan.{BROKEN}"]
    assert OURS not in rows.left_out


BESIDE = {
    "all_gather_matmul": ("per_shard", "push"),
    "matmul_all_reduce": ("two_shot",),
    "matmul_reduce_scatter": ("fused_ring", "scatter"),
}


def compared_beside(operator: str, cases: list[dict[str, object]]) -> object:
    request = BenchRequest(
        operator=operator, cases=msgspec.convert(cases, tuple[ShapeCase, ...]), device="cpu", dtype="fp32",
        plans=BESIDE[operator], effort=EFFORT,
    )  # fmt: skip
    (result,) = runs(request, resolve(None), operator_for)
    return msgspec.to_builtins(result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator", "changes", "plans"),
    [
        ("all_gather_matmul", {"n": 96, "columns": [64, 16, 16]}, ["plan.per_shard", "plan.push"]),
        ("all_gather_matmul", {"after": "gate+silu"}, ["plan.per_shard", "plan.push"]),
        ("all_gather_matmul", {"after": "bias+residual"}, ["plan.per_shard", "plan.push"]),
        ("matmul_all_reduce", {"after": "residual+rms_norm"}, ["plan.two_shot"]),
        ("matmul_all_reduce", {"after": "bias+silu"}, ["plan.two_shot"]),
        ("matmul_reduce_scatter", {"after": "bias+residual"}, ["plan.fused_ring", "plan.scatter"]),
    ],
)
def test_more_than_a_bare_product_is_held_against_the_library_doing_as_much(operator, changes, plans):
    """Every result is that of the sequential plan, of all weights and with all that happens to the product."""
    case = {"name": "c", "m": 64, "n": 48, "k": 32} | changes
    (rows,) = msgspec.convert(run_ranks(compared_beside, 2, operator, [case])[0], BenchRun).cases
    assert [row.name for row in rows.methods] == ["matmul", "communication", SEQUENTIAL, *plans]
    assert rows.methods[-1].speedups[SEQUENTIAL].value > 0
    assert rows.case.problem(operator, 2, "fp32") != ShapeCase("c", 64, 48, 32).problem(operator, 2, "fp32")


def compared_as_graphs() -> object:
    """With a stand-in for capturing, which nothing but CUDA can: it refuses the second plan."""
    asked: list[CheckedCall] = []

    def replayed(call: CheckedCall) -> CheckedCall:
        asked.append(call)
        if len(asked) == 5:
            raise InputError("capture", "no", "Run it eagerly")
        return lambda turn: call(turn)

    request = BenchRequest(
        operator="all_gather_matmul", cases=(ShapeCase("few", 48, 48, 32), ShapeCase("many", 64, 48, 32)), device="cpu",
        dtype="fp32", plans=(PLAIN, "again"), effort=EFFORT,
    )  # fmt: skip
    few = patch.object(bench, "is_replayed", lambda device, m: m <= 48)
    with few, patch.object(trial, "capture_graphs", replayed):
        *_, result = runs(request, resolve(None), plainly)
    return msgspec.to_builtins(result)


@pytest.mark.slow
def test_few_rows_run_as_captured_graphs_all_of_them():
    few, many = msgspec.convert(run_ranks(compared_as_graphs, 2)[0], BenchRun).cases
    assert (few.is_replayed, many.is_replayed) == (True, False)
    assert [row.name for row in few.methods] == ["matmul", "communication", SEQUENTIAL, f"plan.{PLAIN}"]
    assert few.left_out["plan.again"].startswith("as a captured graph: InputError: capture: no")
    assert [row.name for row in many.methods][-1] == "plan.again"


def test_results_are_compared_in_norm_and_not_a_number_never_agrees():
    expected = torch.ones(2, 2)
    assert agrees(expected * 1.01, expected)
    assert not agrees(expected * 1.05, expected)
    assert not agrees(torch.full((2, 2), float("nan")), expected)
    assert not agrees(torch.ones(2, 3), expected)
    assert agrees(torch.ones(0, 2), torch.ones(0, 2))


def test_named_plans_stand_in_for_our_choice():
    names = [method.name for method in methods_of("all_gather_matmul", ("push", "sequential", "push"))]
    assert names[-2:] == ["plan.push", "plan.sequential"]
    assert len(set(names)) == len(names)
    assert OURS not in names
    assert PER_SHARD not in names


def test_each_operator_has_its_own_rows_of_torch():
    for operator in OPERATORS:
        names = [method.name for method in methods_of(operator)]
        assert names[-1] == OURS
        own = [*TORCH[1:]] if operator == "matmul_all_reduce" else [TORCH_FUSED]
        own = [] if OPERATORS[operator].exchanges else own
        assert [name for name in names if name.startswith("torch")] == own


def test_an_unknown_operator_is_refused():
    with pytest.raises(InputError, match="all_gather_matmul"):
        methods_of("all_to_all")


def told_run(factor: float) -> BenchRun:
    """A run of one case in which ours takes `factor` times 100 us."""
    times = {"matmul": 80.0, "communication": 40.0, SEQUENTIAL: 120.0, OURS: 100.0 * factor}
    rows = []
    for name, time_us in times.items():
        is_method = name in (SEQUENTIAL, OURS)
        ratio = {"value": 120.0 / time_us, "low": 1.0, "high": 2.0}
        efficiency = {"exposed_us": time_us - 80, "overlap_efficiency": 1 - (time_us - 80) / 40,
                      "overlap_ratio": (120 - time_us) / 40, "ceiling_fraction": None}  # fmt: skip
        rows.append({"name": name, "label": name, "median_us": time_us, "p90_us": time_us, "host_us": None,
                     "speedups": {SEQUENTIAL: ratio} if is_method else {},
                     "measures": efficiency if is_method else None})  # fmt: skip
    case = {"case": {"name": "c", "m": 1, "n": 1, "k": 1}, "methods": rows, "left_out": {}}
    head = {"operator": "all_gather_matmul", "world_size": 4, "device": "cuda", "dtype": "bf16", "effort": {},
            "date": "", "versions": {}, "devices": ["a GPU"]}  # fmt: skip
    return msgspec.convert(head | {"cases": [case]}, BenchRun)


def test_the_summary_of_a_run():
    ours = summarize(told_run(1.0))[-1]
    assert (ours.name, ours.cases) == (OURS, 1)
    assert ours.time_us == pytest.approx(100.0)
    assert ours.speedups == {SEQUENTIAL: pytest.approx(1.2)}
    assert ours.slowest == pytest.approx(1.2)
    assert ours.efficiency == pytest.approx(0.5)


def test_the_summary_says_what_ran():
    plans = ("push pieces=2", "sequential", "push pieces=2")
    cases = [replace(told_run(1.0).cases[0], methods=(ours(plan),)) for plan in plans]
    assert summarize(replace(told_run(1.0), cases=tuple(cases)))[0].plans == {"push pieces=2": 2, "sequential": 1}
    assert summarize(told_run(1.0))[-1].plans == {}  # a file from before plans were written


def ours(plan: str) -> MethodRow:
    return replace(told_run(1.0).cases[0].methods[-1], plan=plan)


def test_the_middle_run_and_how_far_the_others_were():
    runs = (told_run(1.1), told_run(0.9), told_run(1.0))
    assert middle(runs, OURS) == 2
    moved = spread(runs, 2)[OURS]["time_us"]
    assert (moved.least, moved.middle, moved.largest) == tuple(map(pytest.approx, (90.0, 100.0, 110.0)))


def test_losses_are_named():
    assert regressions(told_run(1.0), OURS) == ()
    assert [rows.case.name for rows in regressions(told_run(1.3), OURS)] == ["c"]


@pytest.mark.parametrize(("ranks", "backend"), [(1, "cpu:gloo,cuda:nccl"), (4, "gloo")])
def test_ranks_beyond_the_gpus_share_them(ranks: int, backend: str, monkeypatch: pytest.MonkeyPatch):
    asked, devices = [], []
    monkeypatch.setattr(bench, "device_count", lambda: 1)
    monkeypatch.setattr(bench, "resolve", lambda group: None)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: asked.append(backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    for name, value in {"RANK": ranks - 1, "LOCAL_RANK": ranks - 1, "LOCAL_WORLD_SIZE": ranks}.items():
        monkeypatch.setenv(name, str(value))
    for name in bench.SHARED_GPU:
        monkeypatch.delenv(name, raising=False)
    if ranks > 1:
        with pytest.raises(MachineError, match=r"more ranks than GPUs.*TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1"):
            bench.join_world("cuda").__enter__()
        for name, value in bench.SHARED_GPU.items():
            monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with bench.join_world("cuda"):
        assert asked == [backend]
        assert devices == [torch.device("cuda", 0)]
        assert dict(os.environ) == before
