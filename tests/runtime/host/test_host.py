"""Calls that cannot be run: one typed error on every rank, nothing launched, and the next call is fine."""

from __future__ import annotations

import pytest
import torch

from overweave.errors import InputError, OverweaveError, RankMismatch
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.memory.group import resolve
from overweave.runtime.host.host import as_matrices, run_on_host
from overweave.schedules.catalog import catalog
from tests.ranks import run_ranks

NAME = "all_gather_matmul.push"


def plan_of(m: int, pieces: int = 1, world_size: int = 2) -> Plan:
    problem = Problem(operator="all_gather_matmul", m=m, n=8, k=8, world_size=world_size, dtype="float32")
    return catalog.build(NAME, problem, {"pieces": pieces})


def tensors(m: int = 8) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return {"x": torch.ones(m // 2, 8), "w": torch.ones(8, 8)}, {"y": torch.full((m, 8), torch.nan)}


def spoil(kind: str, inputs: dict[str, torch.Tensor], outputs: dict[str, torch.Tensor]) -> None:
    changes = {
        "shape": lambda: inputs.update(x=torch.ones(3, 8)),
        "dtype": lambda: inputs.update(w=torch.ones(8, 8).half()),
        "device": lambda: inputs.update(w=torch.ones(8, 8, device="meta")),
        "missing": lambda: inputs.pop("w"),
        "surplus": lambda: outputs.update(z=torch.ones(1, 1)),
        "strided": lambda: outputs.update(y=torch.zeros(8, 8).t()),
    }
    changes[kind]()


def call_wrongly(kinds: list[str]) -> list[list[str]]:
    group, told = resolve(None), []
    for kind in kinds:
        inputs, outputs = tensors()
        if group.rank == 1:
            spoil(kind, inputs, outputs)
        with pytest.raises(InputError) as caught:
            run_on_host(plan_of(8), group, inputs, outputs, timeout_s=5)
        told.append([type(caught.value).__name__, str(caught.value)])
    inputs, outputs = tensors()
    run_on_host(plan_of(8), group, inputs, outputs, timeout_s=5)
    assert outputs["y"].eq(8).all()
    return told


def test_wrong_tensors_on_one_rank_raise_on_all():
    kinds = ["shape", "dtype", "device", "missing", "surplus", "strided"]
    peer, culprit = run_ranks(call_wrongly, 2, kinds)
    for kind, (error, text), (own_error, own_text) in zip(kinds, peer, culprit, strict=True):
        assert error == RankMismatch.__name__, kind
        assert "rank 1 raised an error before its call: " in text
        assert "Mend the call of the rank" in text
        assert own_error == InputError.__name__, kind
        assert f"run {NAME} on rank 1" in own_text


def call_different_plans() -> list[str]:
    group, told = resolve(None), []
    pairs = ((plan_of(8), plan_of(16)), (plan_of(600, pieces=1), plan_of(600, pieces=2)))
    for pair in pairs:
        inputs, outputs = tensors(600)
        with pytest.raises(OverweaveError) as caught:
            run_on_host(pair[group.rank], group, inputs, outputs, timeout_s=5)
        told.append(f"{type(caught.value).__name__} {caught.value}")
    return told


def test_different_plans_are_refused_before_anything_runs():
    for shapes, options in run_ranks(call_different_plans, 2):
        assert shapes.startswith("RankMismatch")
        assert "m=8" in shapes
        assert "m=16" in shapes
        assert options.startswith("RankMismatch")  # alike in name and shape: the digest tells them apart


def call_with_the_wrong_group() -> str:
    with pytest.raises(InputError) as caught:
        run_on_host(plan_of(8, world_size=3), resolve(None), *tensors())
    return str(caught.value)


def test_a_plan_for_another_group_size():
    assert all("for 3 ranks, the group has 2" in text for text in run_ranks(call_with_the_wrong_group, 2))


def test_an_unknown_depth():
    assert all("Use one of library, interpreter" in text for text in run_ranks(call_at_unknown_depth, 1))


def call_at_unknown_depth() -> str:
    with pytest.raises(InputError) as caught:
        run_on_host(plan_of(8, world_size=1), resolve(None), *tensors(), depth="deep")
    return str(caught.value)


def test_vectors_and_numbers_are_rows_to_plans() -> None:
    tensors = {"bias": torch.zeros(5), "scale_x": torch.zeros(()), "scale_w": torch.zeros(1), "x": torch.zeros(3, 5)}
    shapes = [tuple(each.shape) for each in as_matrices(tensors).values()]
    assert shapes == [(1, 5), (1, 1), (1, 1), (3, 5)]
