"""Programs that differ between ranks, compiled with the pass: where ranks were to fuse otherwise, they call torch's
collectives, as the programs say, and where they agree, they fuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_reduce,
    reduce_scatter_tensor_autograd,
)
from torch.nn.functional import linear

import overweave as ow
from overweave.adapters.inductor import agreed
from overweave.adapters.report import SITES
from overweave.block.predicted import backend
from overweave.errors import RankMismatch
from tests.ranks import run_ranks

K = 16
Program = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def is_first() -> bool:
    return dist.get_rank() == 0


def gathered(x: torch.Tensor) -> torch.Tensor:
    return all_gather_tensor_autograd(x, 1, dist.group.WORLD)


def scattered(y: torch.Tensor) -> torch.Tensor:
    return reduce_scatter_tensor_autograd(y, "sum", 1, dist.group.WORLD)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x, "sum", dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy


def of_two_sums(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sums that the first rank reads one by one, and the others added, so that they become one there."""
    one, other = _Summed.apply(linear(x, w, b)), _Summed.apply(linear(x * 2.0, w, b * 3.0))
    return torch.sin(one) + other if is_first() else one + other


def two_layers(y: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return linear(y, w) + linear(y, w + 1) if is_first() else linear(y, w) * b + y.sum()


def kept(y: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return linear(y, w) + (y if is_first() else b)


# By name; whether ranks fuse.
PROGRAMS: dict[str, tuple[Program, bool]] = {
    "alike": (lambda x, w, b: scattered(linear(gathered(x), w, b)), True),
    "alike, in other orders of rows": (lambda x, w, b: linear(gathered(x).roll(dist.get_rank(), 0), w) * b, True),
    "a linear layer of some": (
        lambda x, w, b: linear(gathered(x), w) if is_first() else linear(torch.sin(gathered(x)), w),
        False,
    ),
    "a bias of one": (lambda x, w, b: scattered(linear(gathered(x), w, b if is_first() else None)), False),
    "a factor of some": (
        lambda x, w, b: scattered(linear(gathered(x), w) if is_first() else linear(gathered(x), w) * 2.0),
        False,
    ),
    "two layers of one": (
        lambda x, w, b: two_layers(gathered(x), w, b),
        False,
    ),
    "kept by one": (lambda x, w, b: kept(gathered(x), w, b), False),
    "other layouts": (lambda x, w, b: gathered(x) @ (w if is_first() else w.t()), False),
    "sums that only some add": (of_two_sums, False),
    "two graphs of one": (
        lambda x, w, b: scattered(torch.relu(broken(linear(gathered(x), w))) * b),
        False,
    ),
}


def broken(x: torch.Tensor) -> torch.Tensor:
    if is_first():
        torch._dynamo.graph_break()
    return x


def values(program: Program, given: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [each.clone().requires_grad_() for each in given]
    y = program(*leaves)
    torch.sin(y).sum().backward()
    return [y.detach(), *(torch.zeros(()) if each.grad is None else each.grad for each in leaves)]


def operands() -> list[torch.Tensor]:
    own, common = torch.Generator().manual_seed(dist.get_rank()), torch.Generator().manual_seed(9)
    return [torch.randn(2, 2 * dist.get_world_size(), K, generator=own)] + [
        torch.randn(shape, generator=common) for shape in ((K, K), (K,))
    ]


def tried(name: str, how: str) -> list[str]:
    """For `run_ranks`: what is wrong with a program that is run three times, and with whether it was fused. how: the
    first rank compiles it, too, or runs it as it is."""
    program, is_fused = PROGRAMS[name]
    wanted = values(program, operands())
    SITES.pop(agreed.SITE, None)
    torch._dynamo.reset()
    ow.install(graphs=True)
    try:
        compiled = torch.compile(program, backend=backend([]), dynamic=False)
        used = program if how == "eager" and is_first() else compiled
        results = [values(used, operands()) for _ in range(3)]
        left = ow.report().operators.get(agreed.SITE)
    finally:
        ow.uninstall()
    same = [torch.allclose(*pair, rtol=1e-4, atol=1e-4) for each in results for pair in zip(each, wanted, strict=True)]
    found = [] if all(same) else [f"{name}: {same}"]
    is_fused = is_fused and how == "compiled"
    return found if used is program or (left is None) == is_fused else [*found, f"{name}: {left}"]


def refused() -> list[str]:
    """For `run_ranks`: two gathers, of which some ranks multiply the first one behind the second one."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        one, other = gathered(x), gathered(x * 2)
        return linear(one * 2 if is_first() else one, w) + other

    torch._dynamo.reset()
    ow.install(graphs=True)
    try:
        torch.compile(function, backend=backend([]), dynamic=False)(*operands()[:2])
    except RankMismatch as error:
        return [str(error)]
    finally:
        ow.uninstall()
    return []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_programs_that_differ_compute_what_they_say(ranks: int):
    """Ranks that waited for half of the group's timeout would be ended."""
    for name in PROGRAMS:
        assert run_ranks(tried, ranks, name, "compiled", timeout_s=120.0, group_timeout_s=400.0) == [[]] * ranks, name


@pytest.mark.slow
def test_a_rank_that_compiles_nothing_is_not_waited_for_long():
    for name in ("alike", "a bias of one"):
        assert run_ranks(tried, 2, name, "eager", timeout_s=60.0, group_timeout_s=6.0) == [[], []], name


@pytest.mark.slow
def test_ranks_that_cannot_keep_the_order_of_a_program_refuse_together():
    first, second = run_ranks(refused, 2, timeout_s=60.0, group_timeout_s=20.0)
    assert "run graphs that are alike" in first[0]
    assert first == second
