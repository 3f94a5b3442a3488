"""The golden text of what a call enqueues on a GPU, for every kind of plan (launch_log.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import overweave as ow
from campaigns.oracle.plans.library_queues import gathered_beside, gathered_in_pairs, reduced_beside
from overweave.ir.epilogue import Epilogue, Norm
from overweave.ir.plan import Plan
from overweave.ir.schedule import ECHOES
from overweave.runtime.gpu import authored as authored_gpu
from overweave.runtime.gpu import bound as binding
from overweave.runtime.gpu import handwritten as handwritten_gpu
from overweave.runtime.gpu.bound import PackedPlan
from overweave.runtime.gpu.call_frame import PlanRun
from tests.runtime.gpu import test_bind_compiled as compiled
from tests.runtime.gpu.launch_log import LaunchLog, logged
from tests.runtime.gpu.test_bind import ENDING, FP8, GATHER, REDUCE, SCATTER, Case, tensors_of

pytestmark = pytest.mark.slow

EXCHANGE, BACK = "all_to_all_matmul", "matmul_all_to_all"
Golden = Callable[[str, str], None]
NORM = {"norm": Norm(eps=1e-5, residual=True)}
BY_ROWS = FP8 | {"epilogue": Epilogue(scaling="rows", bias=True, residual=True)}
PAIRS = {"islands": ((0, 1), (2, 3))}
PLANS = {
    "gather, library calls": Case(GATHER, "per_shard", world_size=3),
    "gather, library calls of fp8": Case(GATHER, "per_shard", BY_ROWS, rank=1),
    "gather, copy engine": Case(
        GATHER, "push kernel=hopper", {"epilogue": ENDING, "b_is_transposed": True}, rank=1, world_size=3
    ),
    "gather, several weights": Case(GATHER, "push kernel=portable pieces=2", {"columns": (512, 128, 128)}, rank=1),
    "gather, gated": Case(GATHER, "push kernel=hopper", {"epilogue": Epilogue(activation="silu", gate=True)}),
    "gather, copy kernel": Case(GATHER, "push kernel=hopper mover=copy_kernel", BY_ROWS, rank=2, world_size=4),
    "gather, pulled": Case(GATHER, "pull kernel=hopper pieces=2", rank=1),
    "gather, two levels": Case(GATHER, "islands kernel=hopper pieces=1", PAIRS, rank=1, world_size=4),
    "gather, packed": Case(GATHER, "gather_packed matmul=library", {"m": 8}, rank=1),
    "gather, packed and skinny": Case(GATHER, "gather_packed matmul=skinny", {"m": 64}, rank=1),
    "gather, packed and early": Case(GATHER, "gather_packed matmul=early", {"m": 64}),
    "exchange, counted blocks": Case(EXCHANGE, "per_peer", {"m": 1536, "counted": True}, rank=1, world_size=3),
    "exchange behind, counted blocks": Case(BACK, "per_peer", {"m": 1536, "counted": True}, rank=1, world_size=3),
    "exchange behind, waves": Case(BACK, "waves block_m=64 block_n=64 groups=1+1 sms=56 library_sms=8", rank=1),
    "exchange behind, copy engine": Case(BACK, "push kernel=hopper pieces=2", rank=1),
    "exchange behind, two levels": Case(BACK, "islands kernel=hopper pieces=1", PAIRS, rank=1, world_size=4),
    "exchange, copy engine": Case(EXCHANGE, "push kernel=hopper pieces=2", rank=1),
    "gather, finer by rows": Case(GATHER, "uniform_fused_1d", {"columns": (512, 128, 128)}, rank=1, world_size=3),
    "gather, finer by columns": Case(GATHER, "uniform_fused_2d order=ring", rank=1, world_size=3),
    "gather, finer by collectives": Case(GATHER, "hetero_fused_2d carrier=library", rank=1, world_size=3),
    "scatter, library calls": Case(SCATTER, "per_shard", {"m": 510}, rank=1),
    "scatter, sums beside": Case(SCATTER, "scatter kernel=hopper pieces=2", {"epilogue": ENDING}, rank=1, world_size=3),
    "scatter, sums by tiles": Case(
        SCATTER, "scatter kernel=portable sums=epilogue", {"epilogue": ENDING}, world_size=4
    ),
    "scatter, copy kernel": Case(SCATTER, "scatter kernel=hopper mover=copy_kernel", {"m": 4096}, rank=1),
    "scatter, pulled": Case(SCATTER, "scatter_pull kernel=hopper", world_size=3),
    "scatter, ring": Case(SCATTER, "fused_ring kernel=hopper", {"epilogue": ENDING}, world_size=3),
    "scatter, remote adds": Case(SCATTER, "remote_add kernel=portable sms=1", {"epilogue": ENDING}),
    "scatter, stored by tiles": Case(SCATTER, "scatter_stored kernel=hopper", rank=2, world_size=4),
    "scatter, packed": Case(SCATTER, "scatter_packed matmul=skinny", {"m": 64, "epilogue": ENDING}, rank=1),
    "reduce, sums normed": Case(REDUCE, "two_shot kernel=hopper pieces=2", NORM, rank=1, world_size=3),
    "reduce, sums by tiles of fp8": Case(
        REDUCE, "two_shot kernel=portable sums=epilogue", FP8 | {"epilogue": Epilogue(scaling="tensor")}
    ),
    "reduce, ring stored by tiles": Case(REDUCE, "ring_stored kernel=hopper", rank=3, world_size=8),
    "reduce, two levels": Case(REDUCE, "islands kernel=hopper pieces=1", PAIRS, rank=1, world_size=4),
    "reduce, waves": Case(REDUCE, "waves kernel=hopper sms=20 library_sms=4", {"m": 1000}, rank=1),
    "scatter, waves": Case(
        SCATTER, "waves kernel=portable sms=20 library_sms=4", {"m": 1000, "epilogue": ENDING}, rank=1, world_size=3
    ),
    "reduce, packed in one shot": Case(REDUCE, "one_shot_packed matmul=early", {"m": 16} | NORM),
    "reduce, packed in two shots": Case(REDUCE, "two_shot_packed matmul=library", {"m": 5, "epilogue": ENDING}, rank=1),
}
WRITTEN: dict[str, tuple[Callable[[], Plan], int]] = {  # plans that no method writes, and of how many ranks
    "library call behind tiles": (lambda: reduced_beside(3), 3),
    "library calls beside tiles": (lambda: gathered_beside(4, 24), 4),
    "collectives of sub-groups": (lambda: gathered_in_pairs(4), 4),
}


@pytest.mark.parametrize("name", PLANS)
def test_plans(name: str, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    case = PLANS[name]
    golden(f"launches/{name}.txt", text_of_plan(case.build(), case.rank, case.world_size, monkeypatch))


@pytest.mark.parametrize("name", WRITTEN)
def test_plans_that_no_method_writes(name: str, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    build, world_size = WRITTEN[name]
    golden(f"launches/{name}.txt", text_of_plan(build(), 1, world_size, monkeypatch))


def text_of_plan(plan: Plan, rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> str:
    with logged(rank, world_size, monkeypatch) as log:
        monkeypatch.setattr(binding, "create_subgroups", lambda *given: None)
        monkeypatch.setattr(binding, "subgroup", lambda group, *given: group)
        tensors, moved = tensors_of(plan, rank), tensors_of(plan, rank)
        log.tensors({f"bound {name}": tensor for name, tensor in tensors.items()} | moved)
        if plan.schedule.reuse == ECHOES:
            run: Any = PlanRun(log.workspace, PackedPlan(plan, log.workspace, tensors), (), True)
        else:
            run = binding.bind_with_prologue(plan, log.workspace, tensors)
        run(moved)
    return text_of(log)


AUTHORED = {
    "author, tiles push": compiled.Case(
        "matmul", {"A": "all_gather.push mover=tiles", "C": "reduce_scatter.scatter mover=copy_kernel"}
    ),
    "author, tiles store at peers": compiled.Case(
        "matmul", {"A": "all_gather.push", "C": "reduce_scatter.scatter mover=tiles pieces=2"}
    ),
    "author, sums beside": compiled.Case("matmul", {"C": "reduce_scatter.scatter"}),
    "author, persistent": compiled.Case(
        "persistent", {"A": "all_gather.push mover=bulk_kernel", "C": "all_reduce.ring lanes=2"}
    ),
    "author, all to all": compiled.Case(
        "matmul", {"A": "all_to_all.receive mover=tiles", "C": "all_to_all.send mover=tiles"}
    ),
}


@pytest.mark.parametrize("name", AUTHORED)
def test_kernels_of_authors(name: str, golden: Golden, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = AUTHORED[name]
    given = compiled.GIVEN[case.file][1](case.exchanges)
    plan, kernel = compiled.fused(case, tmp_path, given, (1, 2))
    with logged(1, 2, monkeypatch) as log:
        monkeypatch.setattr(authored_gpu, "create_subgroups", lambda group, operations: None)
        log.tensors({name: getattr(one, "base", one) for name, one in given.items() if not isinstance(one, int)})
        run = authored_gpu.AuthoredRun(plan, log.workspace, kernel, given)
        run(given)
    golden(f"launches/{name}.txt", text_of(log))


@pytest.mark.parametrize("make", [compiled.ring, compiled.experts, compiled.attention])
def test_tile_programs(make: Callable[[], Any], golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    with logged(0, 2, monkeypatch) as log:
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        monkeypatch.setattr(handwritten_gpu, "Workspace", SimpleNamespace(of=lambda group, device: log.workspace))
        monkeypatch.setattr(ow, "TileProgram", compiled.DryProgram)
        make()()
    golden(f"launches/tile program, {make.__name__}.txt", text_of(log))


def text_of(log: LaunchLog) -> str:
    return "\n".join(log.text) + "\n"
