"""Packed plans bound as on a GPU, without one: their kernels compile with the very arguments of a launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overweave.ir.epilogue import Norm
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.shards import shard_rows
from overweave.memory.heap import HALVES
from overweave.memory.layout import lay_out_packed
from overweave.runtime.gpu.bound import PackedPlan
from overweave.runtime.gpu.call_frame import PlanRun
from overweave.schedules.catalog.catalog import build
from tests.runtime.without_gpu import Launched, launched, workspace

__all__ = ["launched"]  # a fixture

NAMES = (
    "matmul_all_reduce.one_shot_packed",
    "matmul_all_reduce.two_shot_packed",
    "matmul_reduce_scatter.scatter_packed",
    "all_gather_matmul.gather_packed",
)
K, N = 16, 72


def bound(
    name: str, m: int, rank: int, monkeypatch: pytest.MonkeyPatch, **form: Any
) -> tuple[Plan, Any, dict[str, torch.Tensor], PlanRun[PackedPlan]]:
    """A plan bound on a rank, with its workspace, and the tensors that it was bound with."""
    monkeypatch.setattr(torch.cuda, "Event", SimpleNamespace)
    operator = name.split(".")[0]
    options = {"matmul": form.pop("matmul", "library")}
    plan = build(name, Problem(operator=operator, m=m, n=N, k=K, world_size=2, dtype="bfloat16", **form), options)
    host = workspace(rank)
    host.space = host.packed_space(lay_out_packed(plan).half_bytes)
    host.packed_space = lambda half_bytes: host.space
    lo, hi = shard_rows(m, 2, rank)
    rows_x = hi - lo if operator == "all_gather_matmul" else m
    rows_y = hi - lo if operator == "matmul_reduce_scatter" else m
    shapes = {"x": (rows_x, K), "w": (K, N), "y": (rows_y, N)}
    shapes |= {"residual": (m, N), "norm_weight": (1, N), "z": (m, N)} if "norm" in form else {}
    shapes |= {"gathered_out": (m, K)} if "returns_gathered" in form else {}
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    return plan, host, tensors, PlanRun(host, PackedPlan(plan, host, tensors), (), True)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("m", [1, 64, 509])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_compile_with_the_arguments_of_a_launch(
    name: str, m: int, rank: int, launched: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ints that are one or divide by 16 are special to the compiler; so are ranks that own no rows."""
    plan, host, tensors, run = bound(name, m, rank, monkeypatch)
    space, gathers = host.space, name.startswith("all_gather")
    space.product((m, K), torch.bfloat16).fill_(2.0)  # what is gathered, as nobody does here
    run(tensors)
    assert launched == ["packed_kernel"]
    if gathers:  # the matmul stands behind the kernel
        assert torch.equal(tensors["y"], torch.full((m, N), 2.0 * K, dtype=torch.bfloat16))
    else:
        assert torch.equal(space.product((m, N), torch.bfloat16), torch.full((m, N), K, dtype=torch.bfloat16))
    assert space._heap.tensor.numel() == HALVES * lay_out_packed(plan).half_bytes
    assert space._product.numel() >= m * (K if gathers else N) * 2
    assert {tensors["x" if gathers else "y"].data_ptr(), space.product((1, 1), torch.bfloat16).data_ptr()} <= launched[
        0
    ].addresses


@pytest.mark.slow
@pytest.mark.parametrize("m", [1, 7])
@pytest.mark.parametrize(
    "name",
    ["matmul_all_reduce.one_shot_packed", "matmul_all_reduce.two_shot_packed", "matmul_reduce_scatter.scatter_packed"],
)
def test_normed_rows_lie_where_the_caller_says(
    name: str, m: int, launched: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, tensors, run = bound(name, m, 0, monkeypatch, norm=Norm(eps=1e-5, residual=True))
    moved = {name: tensor.clone() for name, tensor in tensors.items()}
    for given in (tensors, moved):
        run(given)
        places = {given[name].data_ptr() for name in ("y", "z", "residual", "norm_weight")}
        assert places <= launched[-1].addresses
    assert launched == ["packed_kernel"] * 2


@pytest.mark.slow
def test_what_is_returned_is_gathered_in_its_place(launched: list[Launched], monkeypatch: pytest.MonkeyPatch) -> None:
    _, host, tensors, run = bound("all_gather_matmul.gather_packed", 7, 1, monkeypatch, returns_gathered=True)
    run(tensors)
    assert {tensors["x"].data_ptr(), tensors["gathered_out"].data_ptr()} <= launched[0].addresses
    assert torch.equal(tensors["y"], torch.full((7, N), K, dtype=torch.bfloat16))
    assert host.space.product((1, 1), torch.bfloat16).data_ptr() not in launched[0].addresses


@pytest.mark.slow
@pytest.mark.parametrize(("m", "matmul_by"), [(1, "skinny"), (64, "early"), (509, "skinny")])
@pytest.mark.parametrize("name", NAMES)
def test_our_matmul_stands_in_the_librarys_place(
    name: str, m: int, matmul_by: str, launched: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, host, tensors, run = bound(name, m, 0, monkeypatch, matmul=matmul_by)
    local, gathers = host.space.product((1, 1), torch.bfloat16), name.startswith("all_gather")
    moved = {name: tensor.clone() for name, tensor in tensors.items()}
    for given in (tensors, moved):
        given["y"].fill_(7.0)
        run(given)
        matmul, exchange = launched[-2:][:: -1 if gathers else 1]
        assert [matmul, exchange] == ["skinny_matmul_kernel", "packed_kernel"]
        assert [one.is_early for one in launched[-2:]] == [False, matmul_by == "early"]
        outer, inner = ("y", "x") if gathers else ("x", "y")
        assert {given[outer].data_ptr(), given["w"].data_ptr(), local.data_ptr()} <= matmul.addresses
        assert {given[inner].data_ptr(), local.data_ptr()} <= exchange.addresses
        assert torch.equal(given["y"], torch.full_like(given["y"], 7.0))  # nothing but the kernels


@pytest.mark.slow
def test_nothing_starts_early_alone_or_on_older_gpus(launched: list[Launched], monkeypatch: pytest.MonkeyPatch) -> None:
    for m, major in ((0, 9), (7, 8)):
        properties = SimpleNamespace(multi_processor_count=132, major=major)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, properties=properties: properties)
        _, _, tensors, run = bound("all_gather_matmul.gather_packed", m, 0, monkeypatch, matmul="early")
        run(tensors)
    assert launched == ["packed_kernel", "skinny_matmul_kernel"]  # without rows nothing runs
    assert not any(one.is_early for one in launched)
