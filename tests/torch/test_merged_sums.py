"""Sums over ranks in compiled graphs, made fewer and smaller: what a backward graph reads of them is scattered."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce
from torch.nn.functional import linear

import overweave as ow
from overweave.block.graphs import backend
from tests.ranks import run_ranks
from tests.torch.compiled import collectives, woven

SHAPE, WIDTHS, DIM = (2, 6, 16), (24, 8, 40), 1
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


class Columns(torch.autograd.Function):
    """Layers of whole rows, as torch's styles split them: the input's gradient is summed over ranks layer by layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *ws: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*ws)
        whole = all_gather_tensor(x, DIM, dist.group.WORLD)
        return tuple(linear(whole, w) for w in ws)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = [
            all_reduce(linear(dy, w.t()), "sum", dist.group.WORLD) for dy, w in zip(dys, ctx.saved_tensors, strict=True)
        ]
        rows = parts[0] + parts[1] + parts[2]
        own = rows.split(SHAPE[DIM] // dist.get_world_size(), DIM)[dist.get_rank()]
        return (own, *(None for _ in dys))


def gradients(is_compiled: bool, graphs: list[torch.fx.GraphModule]) -> torch.Tensor:
    ranks, generator = dist.get_world_size(), torch.Generator().manual_seed(dist.get_rank())
    shape = (SHAPE[0], SHAPE[1] // ranks, SHAPE[2])
    x = torch.randint(-2, 3, shape, generator=generator).float().requires_grad_()
    ws = [torch.randint(-2, 3, (width, SHAPE[2]), generator=generator).float() for width in WIDTHS]

    def layers(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([y.square().sum() for y in Columns.apply(x, *ws)])

    made = torch.compile(layers, backend=backend(graphs), fullgraph=True, dynamic=False) if is_compiled else layers
    made(x).sum().backward()
    assert x.grad is not None
    return x.grad


def own_rows() -> list[str]:
    """For `run_ranks`: what is wrong with a gradient of which each rank keeps its own rows."""
    graphs: list[torch.fx.GraphModule] = []
    wanted = gradients(False, [])
    ow.install(graphs=True)
    try:
        torch._dynamo.reset()
        found = gradients(True, graphs)
    finally:
        ow.uninstall()
    told = [] if sorted(woven(graphs)) == [GATHER, SCATTER] else [f"{woven(graphs)}, left {collectives(graphs)}"]
    return told + ([] if torch.equal(found, wanted) else ["values"])


def rows_of_one_rank() -> list[str]:
    """For `run_ranks`: all ranks read the first rank's rows of a forward graph, and their graphs are alike."""
    graphs: list[torch.fx.GraphModule] = []
    x, w = torch.ones(SHAPE), torch.ones(8, SHAPE[2])
    ow.install(graphs=True)
    try:
        torch._dynamo.reset()
        half = SHAPE[DIM] // dist.get_world_size()
        compiled = torch.compile(
            lambda x: all_reduce(linear(x, w), "sum", dist.group.WORLD).split(half, DIM)[0], backend=backend(graphs)
        )
        y = compiled(x)
    finally:
        ow.uninstall()
    right = torch.equal(y, torch.full((SHAPE[0], half, 8), float(SHAPE[2] * dist.get_world_size())))
    return [*woven(graphs), *([] if right else ["values"])]


def test_own_rows_of_summed_gradients_are_scattered():
    for ranks in (2, 3):
        assert run_ranks(own_rows, ranks, timeout_s=120.0) == [[]] * ranks


def test_rows_that_all_ranks_read_are_not_scattered():
    assert run_ranks(rows_of_one_rank, 2, timeout_s=120.0) == [[REDUCE]] * 2
