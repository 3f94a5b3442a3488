"""Operators in code that torch.compile reads: the same bits, and graphs on both sides of the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.testing import CompileCounter

import overweave as ow
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


def compiled(name: str) -> dict[str, Any]:
    operator = getattr(ow, name)
    rank, counter, told = dist.get_rank(), CompileCounter(), {}
    bias = torch.ones(16)

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return operator(x + 1, w, dist.group.WORLD, bias=bias, activation="silu") * 2

    graphs, apart = torch.compile(layer, backend=counter), torch.compile(operator, backend="eager")
    for turn in range(3):
        x, w = torch.full((4, 8), float(turn + rank)), torch.ones(8, 16)
        told[f"between {turn}"] = torch.equal(graphs(x, w), layer(x, w))
        told[f"alone {turn}"] = torch.equal(apart(x, w), operator(x, w))
    told["graphs"] = counter.frame_count
    torch._dynamo.reset()
    with pytest.raises(TorchDynamoException):
        torch.compile(layer, backend="eager", fullgraph=True)(x, w)
    return told


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_compiled_callers_get_the_same(name: str):
    for told in run_ranks(compiled, 2, name):
        assert told.pop("graphs") == 2
        assert all(told.values()), told
