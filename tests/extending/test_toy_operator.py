"""An operator in a file of its own is everything that the package's own ones are, once it is registered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner

import overweave as ow
from overweave.cli.main import app
from overweave.errors import InputError
from overweave.ir.operators.registry import register
from overweave.ir.problem import Problem
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.memory.group import resolve
from overweave.ops.operators import operator_for
from overweave.ops.trial import case_of, try_case
from overweave.schedules.catalog import catalog
from overweave.tuner.measure.bench import Request, Run, runs
from overweave.tuner.measure.timer import Effort
from overweave.tuner.space.shapes import Case
from overweave.tuner.space.space import Candidate, candidates
from tests.extending import toy_operator
from tests.extending.toy_operator import OPERATOR
from tests.ranks import run_ranks
from tests.registries import kept_registries

NAME = f"{OPERATOR.name}.sequential"


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with kept_registries():
        toy_operator.add()
        yield


def problem(world_size: int, m: int = 37) -> Problem:
    return Problem(operator=OPERATOR.name, m=m, n=24, k=16, world_size=world_size, dtype="float32")


def called(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("world_size", range(1, 9))
def test_it_is_proven(world_size: int):
    for m in (0, 3, 37, 64):
        verify_plan(catalog.build(NAME, problem(world_size, m), {}), MachineLimits()).raise_if_refused()


def test_the_command_line_shows_proves_and_simulates_it(tmp_path: Path):
    assert NAME in called("show")
    assert "all_gather" in called("show", NAME, "-w", "3")
    called("show", NAME, "-w", "8", "--json", str(tmp_path / "plan.json"))
    assert "proven" in called("verify", str(tmp_path / "plan.json"))
    assert "us" in called("simulate", NAME, "--shape", "4096,4096,4096", "-w", "4")


def test_the_tuner_offers_it_and_says_why():
    assert candidates(OPERATOR.name) == (Candidate("sequential"),)
    assert ow.explain(OPERATOR.name, m=4096, n=4096, k=4096, world_size=4).plan == NAME
    assert "sequential" in called("explain", OPERATOR.name, "--shape", "4096,4096,4096")


@pytest.mark.parametrize("changes", [{"after": "bias"}, {"after": "rms_norm"}, {"n": [16, 8]}])
def test_what_it_has_not_is_refused(changes: dict[str, object]):
    with pytest.raises(InputError, match=OPERATOR.name):
        ow.explain(OPERATOR.name, **{"m": 64, "n": 24, "k": 16, "world_size": 4} | changes)


def test_a_name_is_given_once():
    with pytest.raises(InputError, match="Give it a name of its own"):
        register(msgspec.structs.replace(OPERATOR, split="n"))


def tried(m: int) -> list[bool]:
    """Whether integers come out bit for bit, and floats as near as torch has them; and so by a call without a plan."""
    toy_operator.add()
    group = resolve(None)
    own = problem(group.world_size, m)
    trial = try_case(case_of(NAME, own, "cpu", {}), group)
    whole = torch.arange(m * 16, dtype=torch.float32).reshape(m, 16) % 7
    w = torch.arange(16 * 24, dtype=torch.float32).reshape(16, 24) % 5
    shards = [*torch.chunk(whole, group.world_size), *[whole[:0]] * group.world_size]
    y = toy_operator.matmul_all_gather(shards[group.rank], w, m=m)
    return [trial is None or trial.is_right, torch.equal(y, whole @ w)]


@pytest.mark.parametrize("m", [2, 37])
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_runs_on_emulated_ranks(world_size: int, m: int):
    assert run_ranks(tried, world_size, m) == [[True, True]] * world_size


def compared() -> object:
    toy_operator.add()
    effort = Effort(rounds=4, warmup=1)
    request = Request(operator=OPERATOR.name, cases=(Case("a", 37, 24, 16),), device="cpu", dtype="fp32", effort=effort)
    *_, result = runs(request, resolve(None), operator_for)
    return msgspec.to_builtins(result)


def test_it_is_compared_with_the_library():
    (rows,) = msgspec.convert(run_ranks(compared, 2)[0], Run).cases
    assert [row.name for row in rows.methods] == ["matmul", "communication", "sequential", "overweave"]
    assert set(rows.left_out) == {"copies", "ceiling"}
    assert rows.methods[-1].plan == "sequential"
