"""What watches a model sees the operators: counters of operations, and profilers. Groups are equal by their ranks."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

import overweave as ow
from overweave.errors import GroupError
from overweave.functional import all_gather_linear, linear_all_reduce, linear_reduce_scatter
from tests.ranks import run_ranks

ROWS, K, N = 4, 8, 6


def counted() -> dict[str, list[float]]:
    """For `run_ranks`: operations that torch's counter finds, and those that there are, of a forward and a backward."""
    ranks, product = dist.get_world_size(), 2 * ROWS * K * N
    x, w, v = (torch.randn(rows, K, requires_grad=True) for rows in (ROWS, N, 2 * N))
    calls = {
        "gather": (lambda: all_gather_linear(x, w), ranks * product),
        "gather of two": (lambda: sum(y.sum() for y in all_gather_linear(x, [w, v])), 3 * ranks * product),
        "gather, columns kept": (lambda: all_gather_linear(x, w, save="columns"), ranks * product),
        "scatter": (lambda: linear_reduce_scatter(x, w), product),
        "sum": (lambda: linear_all_reduce(x, w), product),
        "sum of two": (lambda: linear_all_reduce([x, x], [w, w]), 2 * product),
    }
    found = {}
    for name, (call, forward) in calls.items():
        with FlopCounterMode(display=False) as counter:
            y = call()
        with FlopCounterMode(display=False) as behind:
            y.sum().backward()
        found[name] = [counter.get_total_flops() / forward, behind.get_total_flops() / forward]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        ow.all_gather_matmul(x, w.t(), gate=w.t(), activation="silu")
        ow.matmul_all_to_all(x, w.t())
    found["gate, exchange"] = [counter.get_total_flops() / (2 * ranks + 1) / product, 2.0]
    return found


@pytest.mark.slow
def test_a_counter_of_operations_counts_the_products():
    """A backward has two products for each of a forward."""
    for found in run_ranks(counted, 2):
        assert found == {name: [1.0, 2.0] for name in found}


def profiled() -> list[str]:
    """For `run_ranks`: what a profiler is told of two calls of one signature."""
    x, w = torch.ones(ROWS, K), torch.ones(K, K)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        ow.all_gather_matmul(x, w, plan="push")
        ow.all_gather_matmul(x, w, plan="push")
    with patch.object(profiler, "record_function", None):  # nobody looks: nobody is told
        ow.all_gather_matmul(x, w, plan="push")
    return [event.name for event in seen.events() if event.name.startswith("overweave.")]


def test_a_profiler_is_told_operator_sizes_and_plan():
    for names in run_ranks(profiled, 2):
        assert len(names) == 2
        for name in names:
            assert name.startswith(f"overweave.all_gather_matmul m={2 * ROWS} n={K} k={K} float32")
            assert "push" in name


def on_equal_meshes() -> list[float]:
    """For `run_ranks`: a layer in the group of one mesh, whose weight lies on another one of the same ranks."""
    ranks = dist.get_world_size()
    first, second = (init_device_mesh("cpu", (1, ranks), mesh_dim_names=names) for names in (("a", "tp"), ("b", "tp")))
    weight = distribute_tensor(torch.ones(ranks * N, K), second["tp"], [Shard(0)])
    alone = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("c", "alone"))["alone"]
    ys = [all_gather_linear(torch.ones(ROWS, K), weight, group=group) for group in (first["tp"], dist.group.WORLD)]
    with pytest.raises(GroupError, match="one group for a layer and its weights"):
        all_gather_linear(torch.ones(ROWS, K), weight, group=alone)
    return [float(y.sum()) for y in ys]


def test_groups_are_equal_if_their_ranks_are():
    assert run_ranks(on_equal_meshes, 2) == [[2.0 * ROWS * N * K] * 2] * 2
