"""An operator in a file of its own is everything that the package's own ones are, once it is registered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

import overweave as ow
from overweave.errors import InputError
from overweave.ir.operators.record import CallMatrix, Forms
from overweave.ir.operators.registry import OPERATORS, register
from overweave.ir.problem import Problem
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.memory.group import resolve
from overweave.ops.operators import operator_for
from overweave.ops.trial import TrialCase, try_case
from overweave.schedules.catalog import catalog
from overweave.schedules.methods.registry import methods_for
from overweave.tuner.measure.bench import BenchRequest, BenchRun, runs
from overweave.tuner.measure.timer import Effort
from overweave.tuner.space import shapes
from overweave.tuner.space.space import candidates
from tests.cli.called import called
from tests.extending import toy_operator
from tests.extending.toy_operator import OPERATOR
from tests.ranks import run_ranks
from tests.registries import kept_registries
from tests.source_tree import ROOT

OWN = tuple(OPERATORS)
NAMES = [method.full_name for method in toy_operator.METHODS]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with kept_registries():
        toy_operator.add()
        yield


def problem(world_size: int, m: int = 37) -> Problem:
    return Problem(operator=OPERATOR.name, m=m, n=24, k=16, world_size=world_size, dtype="float32")


def test_it_is_short():
    assert len((ROOT / "tests/extending/toy_operator.py").read_text().splitlines()) <= 80


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("name", NAMES)
def test_it_is_proven(name: str, world_size: int):
    for m in (0, 3, 37, 64):
        verify_plan(catalog.build(name, problem(world_size, m), {}), MachineLimits()).raise_if_refused()


@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_shows_proves_and_simulates_it(name: str, tmp_path: Path):
    assert name in called("show")
    assert "all_gather_weight" in called("show", name, "-w", "3")
    called("show", name, "-w", "8", "--json", str(tmp_path / "plan.json"))
    assert "proven" in called("verify", str(tmp_path / "plan.json"))
    assert "us" in called("simulate", name, "--shape", "4096,4096,4096", "-w", "4")


def test_the_tuner_offers_it_and_says_why():
    assert {each.plan for each in candidates(OPERATOR.name)} == {"sequential", "push"}
    assert ow.explain(OPERATOR.name, m=4096, n=4096, k=4096, world_size=4).plan in NAMES
    assert "sequential" in called("explain", OPERATOR.name, "--shape", "4096,4096,4096")


@pytest.mark.parametrize("changes", [{"after": "bias"}, {"after": "rms_norm"}, {"n": [16, 8]}])
def test_what_it_has_not_is_refused(changes: dict[str, object]):
    with pytest.raises(InputError, match=OPERATOR.name):
        ow.explain(OPERATOR.name, **{"m": 64, "n": 24, "k": 16, "world_size": 4} | changes)


def test_a_name_is_given_once():
    with pytest.raises(InputError, match="Give it a name of its own"):
        register(msgspec.structs.replace(OPERATOR, split="n"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("x", CallMatrix("x", ("m", "k"), "gathered", "k")),
        ("w", CallMatrix("w", ("k", "n"), "gathered", "n")),
        ("y", CallMatrix("y", ("m", "n"), "summed", "m")),
        ("forms", Forms(scaling=False)),
        ("dual", "matmul_reduce_scatter"),
    ],
)
def test_a_record_that_nothing_serves_is_refused_with_its_field(field: str, value: object):
    record = msgspec.structs.replace(OPERATOR, **{field: value, "name": "other"})
    with pytest.raises(InputError, match=f"^register other: {field} is .*pass a builder"):
        catalog.register(record, ())
    assert "other" not in OPERATORS


def test_a_method_without_moves_or_of_another_operator_is_refused():
    record = msgspec.structs.replace(OPERATOR, name="other")
    for changes, found in (({"write": None}, "no moves"), ({}, "another operator's")):
        with pytest.raises(InputError, match=found):
            catalog.register(record, [msgspec.structs.replace(toy_operator.METHODS[0], **changes)])
    assert "other" not in OPERATORS


@pytest.mark.parametrize("name", OWN)
def test_records_of_the_package_are_served(name: str):
    record = msgspec.structs.replace(OPERATORS[name], name="other")
    methods = [msgspec.structs.replace(each, operator="other") for each in methods_for(name)]
    catalog.register(record, methods)


def tried(name: str, m: int) -> list[bool]:
    """Whether integers come out bit for bit, and floats as near as torch has them; and so by a call without a plan."""
    toy_operator.add()
    group, k = resolve(None), 16
    own = msgspec.structs.replace(problem(group.world_size, m), dtype="bfloat16")
    trial = try_case(TrialCase(name, own, {}, "cpu"), group)
    whole = torch.arange(m * k, dtype=torch.float32).reshape(m, k) % 7
    w = torch.arange(k * 24, dtype=torch.float32).reshape(k, 24) % 5
    shards, parts = ([*torch.chunk(each, group.world_size), *[each[:0]] * group.world_size] for each in (whole, w))
    x_shard, w_shard = shards[group.rank], parts[group.rank]
    results = [toy_operator.all_gather_both_matmul(x_shard, w_shard, m=m, plan=plan) for plan in (None, name)]
    return [trial is None or trial.is_right, *(torch.equal(y, whole @ w) for y in results)]


@pytest.mark.parametrize("m", [2, 37])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_on_emulated_ranks(name: str, world_size: int, m: int):
    assert run_ranks(tried, world_size, name, m) == [[True] * 3] * world_size


def refused() -> str:
    toy_operator.add()
    try:
        toy_operator.all_gather_both_matmul(torch.ones(8, 16), torch.ones(16, 24))
    except InputError as error:
        return str(error)
    return ""


def test_a_whole_weight_in_place_of_a_shard_is_refused():
    for said in run_ranks(refused, 2):
        assert "w, [8, n] of k=16" in said
        assert "torch.chunk" in said


def compared() -> object:
    toy_operator.add()
    effort = Effort(rounds=4, warmup=1)
    request = BenchRequest(
        operator=OPERATOR.name, cases=(shapes.ShapeCase("a", 37, 24, 16),), device="cpu", dtype="fp32", effort=effort
    )
    *_, result = runs(request, resolve(None), operator_for)
    return msgspec.to_builtins(result)


def test_it_is_compared_with_the_library():
    (rows,) = msgspec.convert(run_ranks(compared, 2)[0], BenchRun).cases
    assert [row.name for row in rows.methods] == ["matmul", "communication", "sequential", "overweave"]
    assert set(rows.left_out) == {"copies", "ceiling"}
    assert rows.methods[-1].plan in {"sequential", "push"}
