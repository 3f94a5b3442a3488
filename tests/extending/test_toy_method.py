"""A schedule and a method in files of their own are what the package's own ones are, once they are registered."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import overweave as ow
from overweave.errors import InputError
from overweave.ir.problem import Problem
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.memory.group import resolve
from overweave.ops.trial import TrialCase, try_case
from overweave.schedules.catalog.catalog import build, names
from overweave.schedules.methods.by_moves import MoveTemplate, by_moves, method_of_moves
from overweave.schedules.methods.registry import METHODS, register
from overweave.schedules.moves import gather_templates
from overweave.schedules.moves.reduction_templates import across_mesh, round_ring
from overweave.schedules.records.record import Method
from overweave.schedules.weave.transports import wanted_of
from overweave.tuner.measure.compiled import families
from overweave.tuner.model.rank import rank_candidates
from overweave.tuner.space.space import candidate, candidates, is_member, reason_unsupported
from overweave.tuner.space.target import Target
from overweave.tuner.store.cache import shipped
from tests.cli.called import called
from tests.extending import toy_method, toy_schedule
from tests.ranks import run_ranks
from tests.registries import kept_registries
from tests.source_tree import ROOT

TOYS = {"schedule": toy_schedule.METHOD, "method": toy_method.METHOD}
GPU = Target("cuda")
KERNEL = f"{ROOT}/examples/kernels/matmul.py:matmul_kernel"
STRIDES = {"stride_am": 32, "stride_ak": 1, "stride_bk": 24, "stride_bn": 1, "stride_cm": 24, "stride_cn": 1}
BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 8}
NUMBERS = {"M": 144, "N": 24, "K": 32, **STRIDES, **BLOCKS}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with kept_registries():
        for method in TOYS.values():
            register(method)
        yield


@pytest.fixture(params=TOYS)
def toy(request: pytest.FixtureRequest) -> Method:
    return TOYS[request.param]


def problem(toy: Method, world_size: int, m: int = 37, dtype: str = "float32") -> Problem:
    return Problem(operator=toy.operator, m=m, n=24, k=16, world_size=world_size, dtype=dtype)


def test_they_are_short():
    assert len((ROOT / "tests/extending/toy_schedule.py").read_text().splitlines()) <= 40
    assert len((ROOT / "tests/extending/toy_method.py").read_text().splitlines()) <= 20


@pytest.mark.parametrize("world_size", range(1, 9))
def test_they_are_proven(toy: Method, world_size: int):
    for m in (0, 3, 37, 64):
        verify_plan(build(toy.full_name, problem(toy, world_size, m), {}), MachineLimits()).raise_if_refused()


@pytest.mark.slow
def test_the_command_line_shows_proves_and_simulates_them(toy: Method, tmp_path: Path):
    assert toy.full_name in called("show")
    assert toy.summary in called("show")
    called("show", toy.full_name, "-w", "8", "--json", str(tmp_path / "plan.json"))
    assert "proven" in called("verify", str(tmp_path / "plan.json"))
    assert "us" in called("simulate", toy.full_name, "--shape", "4096,4096,4096", "-w", "4")


@pytest.mark.slow
def test_the_tuner_offers_and_explains_them(toy: Method):
    assert toy.full_name in names(toy.operator)
    offered = [what for what in candidates(toy.operator) if what.plan == toy.name]
    assert len(offered) == (4 if toy is toy_method.METHOD else 1)
    assert all(is_member(toy.operator, what) for what in offered)
    large = problem(toy, 4, 4096, "bfloat16")
    assert all(each.predicted_us for each in rank_candidates(large, GPU) if each.candidate == offered[0])
    assert toy.name in called("explain", toy.operator, "--shape", "4096,4096,4096")
    assert toy.name in str(ow.explain(toy.operator, m=4096, n=4096, k=4096, world_size=4))


@pytest.mark.slow
def test_it_is_weighed_where_others_were_weighed_before(toy: Method):
    large = problem(toy, 4, 4096, "bfloat16")
    with kept_registries():
        del METHODS[toy.full_name]
        assert toy.name not in {each.candidate.plan for each in rank_candidates(large, GPU)}
    assert toy.name in {each.candidate.plan for each in rank_candidates(large, GPU)}


def test_its_need_and_its_margin_are_asked_for():
    toy = toy_method.METHOD
    assert "8 ranks at most" in reason_unsupported(problem(toy, 9, 4096, "bfloat16"), GPU, candidate(toy.name, {}))
    assert candidate(toy.name, {}).margin(problem(toy, 4)).us == 100.0


def test_shipped_tables_are_read_beside_them():
    assert shipped("NVIDIA H200", 4) is not None


def woven_name(toy: Method) -> str:
    return f"all_gather.{toy.name}"


@pytest.mark.parametrize("world_size", range(1, 9))
def test_the_compiler_of_authors_kernels_weaves_them(toy: Method, world_size: int):
    assert ow.compile(KERNEL, f"{woven_name(toy)} pieces=2").plan(NUMBERS, world_size).schedule.operations


def test_the_compiler_offers_them_and_takes_no_option_of_tiles(toy: Method):
    assert woven_name(toy) in {each.name for each in families("all_gather.auto")}
    assert f"\n{woven_name(toy)} " in called("show")
    with pytest.raises(InputError, match="block_m"):
        wanted_of(["A"], [], f"{woven_name(toy)} block_m=64")


@pytest.mark.parametrize("operator", ["matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("written", [across_mesh, round_ring])
def test_a_list_of_sums_is_a_method_of_an_operator_and_of_authors_kernels(written: MoveTemplate, operator: str):
    mine = method_of_moves(written, operator, write=by_moves(written, gather_templates.round_ring))
    register(mine)
    for m in (0, 3, 37):
        verify_plan(build(mine.full_name, problem(mine, 4, m, "bfloat16"), {}), MachineLimits()).raise_if_refused()
    plan = ow.compile(KERNEL, f"{operator.removeprefix('matmul_')}.{mine.name}").plan(NUMBERS, 4)
    assert {step.queue for step in plan.schedule.operations} >= {"tiles", "copies", "sums"}


def tried(name: str, m: int) -> bool:
    """Whether integers come out bit for bit, and floats as near as torch has them."""
    for method in TOYS.values():
        register(method)
    group = resolve(None)
    own = problem(METHODS[name], group.world_size, m, "bfloat16")
    trial = try_case(TrialCase(name, own, {"block_m": 16}, "cpu"), group)
    return trial is None or trial.is_right


@pytest.mark.slow
def test_kernels_run_over_them_on_emulated_ranks():
    command = [sys.executable, "-m", "tests.extending.woven_toys"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    assert said.split() == ["farthest_first", *["True"] * 3, "push_reversed", *["True"] * 3, "push", *["True"] * 3]


@pytest.mark.parametrize("world_size", [2, 3])
def test_they_run_on_emulated_ranks(toy: Method, world_size: int):
    assert run_ranks(tried, world_size, toy.full_name, 37) == [True] * world_size
