"""Sums over ranks in compiled graphs, made fewer: which part a rank reads of them changes nothing of its graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import overweave as ow
from overweave.adapters.inductor import fusion
from overweave.adapters.inductor.fusion import FuseCollectives
from overweave.block.predicted import backend
from tests.ranks import run_ranks
from tests.torch.compiled import collectives, woven

SHAPE, WIDTHS, DIM = (2, 6, 16), (24, 8, 40), 1
GATHER, REDUCE = "all_gather_matmul", "matmul_all_reduce"


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
    told = [] if sorted(woven(graphs)) == [GATHER, REDUCE] else [f"{woven(graphs)}, left {collectives(graphs)}"]
    return told + ([] if torch.equal(found, wanted) else ["values"])


class FirstRows(torch.autograd.Function):
    """All rows, of whose gradients' sum every rank takes the first part: a backward as anyone may write it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(w)
        return linear(all_gather_tensor(x, 0, dist.group.WORLD), w)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = all_reduce(linear(dy, ctx.saved_tensors[0].t()), "sum", dist.group.WORLD)
        return total.chunk(dist.get_world_size())[0], None


def first_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    total = all_reduce(linear(x, w), "sum", dist.group.WORLD)
    return torch.sin(total.chunk(dist.get_world_size())[0]).cos()


FUNCTIONS = {
    "forward": first_rows,
    "checkpointed": lambda x, w: checkpoint(first_rows, x, w, use_reentrant=False),
    "backward": FirstRows.apply,
}


def alike(name: str) -> list[str]:
    """For `run_ranks`: of a program whose ranks all read the first rank's rows what is ours in its graphs, what is
    wrong with it, and the graphs."""
    graphs: list[torch.fx.GraphModule] = []
    given = torch.randn(4, 16, generator=torch.Generator().manual_seed(dist.get_rank())), torch.ones(16, 16)
    ow.install(graphs=True)
    try:
        torch._dynamo.reset()
        compiled = torch.compile(FUNCTIONS[name], backend=backend(graphs))
        pairs = []
        for function in (compiled, FUNCTIONS[name]):
            own = given[0].clone().requires_grad_()
            function(own, given[1]).square().sum().backward()
            pairs.append(own.grad)
    finally:
        ow.uninstall()
    right = torch.allclose(*pairs, rtol=1e-4, atol=1e-4)
    return [*woven(graphs), *([] if right else ["gradients"]), *(str(graph.graph) for graph in graphs)]


def test_sums_of_gradients_are_merged_whichever_rows_are_read():
    for ranks in (2, 3):
        assert run_ranks(own_rows, ranks, timeout_s=120.0) == [[]] * ranks


@pytest.mark.slow
def test_graphs_whose_ranks_read_the_same_rows_are_alike():
    wanted = {"forward": [REDUCE], "checkpointed": [REDUCE, REDUCE], "backward": [GATHER, REDUCE]}
    for name, sites in wanted.items():
        first, second = run_ranks(alike, 2, name, timeout_s=120.0)
        assert first == second, name
        assert first[:-2] == sites, name


def name_of_pass(ranks: int) -> list[object]:
    """For `run_ranks`: by what graphs of the pass are kept, beside their text; behind a group more, too."""
    before = str(FuseCollectives().uuid())
    group = dist.new_group([0])
    wider = str(FuseCollectives().uuid())
    if group != dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(group)
    return [before, wider]


def test_the_name_of_the_pass_tells_who_is_in_a_group():
    """A graph holds names of groups alone; W decides what is fused, and shapes."""
    (of_two, wider), _ = run_ranks(name_of_pass, 2, 2)
    (of_three, _), *_ = run_ranks(name_of_pass, 3, 3)
    assert len({of_two, wider, of_three}) == 3
    assert ow.__file__ in fusion.FILES  # where the version stands
    assert fusion.__file__ in fusion.FILES
