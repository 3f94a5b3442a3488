"""A schedule and a method in files of their own are what the package's own ones are, once they are registered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import overweave as ow
from overweave.cli.main import app
from overweave.ir.problem import Problem
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.memory.group import resolve
from overweave.ops.trial import Case, try_case
from overweave.schedules.catalog.catalog import build, names
from overweave.schedules.methods.registry import METHODS
from overweave.schedules.records.record import Method
from overweave.tuner.model.rank import weigh
from overweave.tuner.space.space import candidate, candidates, is_member, obstacle
from overweave.tuner.space.target import Target
from overweave.tuner.store.cache import shipped
from tests.extending import toy_method, toy_schedule
from tests.ranks import run_ranks
from tests.registries import kept_registries
from tests.source_tree import ROOT

TOYS = {"schedule": toy_schedule.METHOD, "method": toy_method.METHOD}
GPU = Target("cuda")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with kept_registries():
        toy_schedule.add()
        toy_method.add()
        yield


@pytest.fixture(params=TOYS)
def toy(request: pytest.FixtureRequest) -> Method:
    return TOYS[request.param]


def problem(toy: Method, world_size: int, m: int = 37, dtype: str = "float32") -> Problem:
    return Problem(operator=toy.operator, m=m, n=24, k=16, world_size=world_size, dtype=dtype)


def called(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_they_are_short():
    assert len((ROOT / "tests/extending/toy_schedule.py").read_text().splitlines()) <= 40
    assert len((ROOT / "tests/extending/toy_method.py").read_text().splitlines()) <= 60


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
    assert all(each.predicted_us for each in weigh(large, GPU) if each.candidate == offered[0])
    assert toy.name in called("explain", toy.operator, "--shape", "4096,4096,4096")
    assert toy.name in str(ow.explain(toy.operator, m=4096, n=4096, k=4096, world_size=4))


@pytest.mark.slow
def test_it_is_weighed_where_others_were_weighed_before(toy: Method):
    large = problem(toy, 4, 4096, "bfloat16")
    with kept_registries():
        del METHODS[toy.full_name]
        assert toy.name not in {each.candidate.plan for each in weigh(large, GPU)}
    assert toy.name in {each.candidate.plan for each in weigh(large, GPU)}


def test_its_need_and_its_margin_are_asked_for():
    toy = toy_method.METHOD
    assert "too far" in obstacle(problem(toy, 9, 4096, "bfloat16"), GPU, candidate(toy.name, {}))
    assert candidate(toy.name, {}).margin(problem(toy, 4)).us == 100.0


def test_shipped_tables_are_read_beside_them():
    assert shipped("NVIDIA H200", 4) is not None


def tried(name: str, m: int) -> bool:
    """Whether integers come out bit for bit, and floats as near as torch has them."""
    toy_schedule.add()
    toy_method.add()
    group = resolve(None)
    own = problem(METHODS[name], group.world_size, m, "bfloat16")
    trial = try_case(Case(name, own, {"block_m": 16}, "cpu"), group)
    return trial is None or trial.is_right


@pytest.mark.parametrize("world_size", [2, 3])
def test_they_run_on_emulated_ranks(toy: Method, world_size: int):
    assert run_ranks(tried, world_size, toy.full_name, 37) == [True] * world_size
