"""Random small programs of layers and collectives, as data, and how they run: in torch's own operations or in ours.

A program works on rows, this rank's part of them or all of them. Its steps are drawn so that what follows fits. Ranks
run the same steps; which part of the rows a step reads may be the rank's own, the first rank's, or all in another
order. Orders are the same on all ranks: Inductor joins pieces that follow each other, so that others leave ranks with
different nodes, of which nothing may be fused.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_reduce,
    reduce_scatter_tensor_autograd,
)
from torch.nn.functional import linear, rms_norm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from overweave import functional as woven
from overweave.memory.group import process_group_of

WIDTH, OWN_ROWS, BATCH = 16, 2, 2
WEIGHTS = 3
Tensor = torch.Tensor


class Given(NamedTuple):
    """What a program reads. xs are its inputs; dim: of the rows that ranks share. is_ours: whether overweave's own
    operators compute, where a step has them."""

    x: Tensor
    ws: list[Tensor]
    bias: Tensor
    dim: int
    is_ours: bool = False

    @property
    def factors(self) -> list[Tensor]:
        """All that is differentiated."""
        return [self.x, *self.ws, self.bias]


class _Sum(torch.autograd.Function):
    """A sum over ranks whose results differ between them: so its gradient is a sum, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        found: Tensor = all_reduce(x, "sum", process_group_of(None))
        return found

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return all_reduce(dys[0].contiguous(), "sum", process_group_of(None))


class _Columns(torch.autograd.Function):
    """Layers of gathered rows, whose gradients are summed layer by layer. part: of the sum, which a rank takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: tuple[int, int], *ws: Tensor) -> tuple[Tensor, ...]:
        ctx.place = place
        whole = _gathered(x, place[0])
        ctx.save_for_backward(whole, *ws)
        return tuple(linear(whole, w) for w in ws)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        whole, *ws = ctx.saved_tensors
        (dim, part), group = ctx.place, process_group_of(None)
        sums = [all_reduce(linear(dy, w.t()), "sum", group) for dy, w in zip(dys, ws, strict=True)]
        own = (sums[0] + sums[1]).chunk(dist.get_world_size(), dim)[part]
        return own, None, *(dy.flatten(0, -2).t() @ whole.flatten(0, -2) for dy in dys)


def _gathered(x: Tensor, dim: int) -> Tensor:
    found: Tensor = all_gather_tensor_autograd(x, dim, process_group_of(None))
    return found


def _scattered(x: Tensor, dim: int) -> Tensor:
    found: Tensor = reduce_scatter_tensor_autograd(x, "sum", dim, process_group_of(None))
    return found


def _summed(x: Tensor) -> Tensor:
    found: Tensor = _Sum.apply(x)  # type: ignore[no-untyped-call]
    return found


def _parts(x: Tensor, given: Given, first: int) -> list[Tensor]:
    """The ranks' parts of all rows, beginning with one."""
    parts = x.chunk(dist.get_world_size(), given.dim)
    return [*parts[first:], *parts[:first]]


def _columns(x: Tensor, given: Given, part: int) -> Tensor:
    first, second = _Columns.apply(x, (given.dim, part), *given.ws[:2])  # type: ignore[no-untyped-call]
    total: Tensor = first * torch.sigmoid(second)
    return total


def _fused_gather(x: Tensor, given: Given) -> Tensor:
    """By torch's fused operator, in a program that overweave's install answers."""
    if not given.is_ours:
        return linear(_gathered(x, given.dim), given.ws[0])
    group = process_group_of(None).group_name
    _, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [given.ws[0].t()], given.dim, group)
    return y  # type: ignore[no-any-return]


def _fused_scatter(x: Tensor, given: Given) -> Tensor:
    if not given.is_ours:
        return _scattered(linear(x, given.ws[1]), given.dim)
    found: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        x, given.ws[1].t(), "sum", given.dim, process_group_of(None).group_name
    )
    return found


def _kept(x: Tensor, given: Given) -> Tensor:
    whole = _gathered(x, given.dim)
    return linear(whole, given.ws[1], given.bias) + whole


def _our_gather(x: Tensor, given: Given) -> Tensor:
    if not given.is_ours:
        return linear(_gathered(x, given.dim), given.ws[2], given.bias)
    return woven.all_gather_linear(x, given.ws[2], given.bias, dim=given.dim)


def _our_scatter(x: Tensor, given: Given) -> Tensor:
    if not given.is_ours:
        return _scattered(linear(x, given.ws[0]), given.dim)
    return woven.linear_reduce_scatter(x, given.ws[0], dim=given.dim)


Step = Callable[[Tensor, Given], Tensor]
# What keeps the rows that it is given.
ANYWHERE: dict[str, Step] = {
    "linear": lambda x, given: linear(x, given.ws[0], given.bias),
    "norm": lambda x, given: rms_norm(x, x.shape[-1:]),
    "sine": lambda x, given: torch.sin(x),
    "columns turned": lambda x, given: torch.cat([x[..., WIDTH // 2 :], x[..., : WIDTH // 2]], -1),
    "two products": lambda x, given: linear(x, given.ws[1]) + linear(torch.cos(x), given.ws[2]),
    "each rank's number": lambda x, given: x * (0.5 + 0.25 * dist.get_rank()),
}
# From a rank's rows to all.
WIDER: dict[str, Step] = {
    "gather": lambda x, given: linear(_gathered(x, given.dim), given.ws[0]),
    "gather, bias, kept": _kept,
    "gather, turned": lambda x, given: linear(
        torch.cat(_parts(_gathered(x, given.dim), given, 1), given.dim), given.ws[2]
    ),
    "columns, own rows": lambda x, given: _columns(x, given, dist.get_rank()),
    "columns, first rows": lambda x, given: _columns(x, given, 0),
    "torch's fused gather": _fused_gather,
    "our gather": _our_gather,
}  # fmt: skip
# From all rows to a rank's.
NARROWER: dict[str, Step] = {
    "scatter": lambda x, given: _scattered(linear(x, given.ws[1]), given.dim),
    "scatter, bias of each rank": lambda x, given: _scattered(
        linear(x, given.ws[0], given.bias * (1 + dist.get_rank())), given.dim
    ),
    "scatter, turned": lambda x, given: _scattered(
        torch.cat(_parts(linear(x, given.ws[2]), given, 1), given.dim), given.dim
    ),
    "sum, own rows": lambda x, given: _parts(_summed(linear(x, given.ws[0])), given, dist.get_rank())[0],
    "sum, first rows": lambda x, given: _parts(_summed(linear(x, given.ws[1])), given, 0)[0],
    "sum of sums, last rows": lambda x, given: _parts(
        _summed(linear(x, given.ws[1])) + _summed(linear(x, given.ws[2])), given, dist.get_world_size() - 1
    )[0],
    "torch's fused scatter": _fused_scatter,
    "our scatter": _our_scatter,
}
# On all rows.
SUMS: dict[str, Step] = {
    "sum": lambda x, given: _summed(linear(x, given.ws[2])),
    "sum of sums": lambda x, given: _summed(linear(x, given.ws[0])) + _summed(linear(x, given.ws[1])),
    "sum of products": lambda x, given: _summed(linear(x, given.ws[0]) + linear(torch.sin(x), given.ws[2], given.bias)),
}
STEPS = ANYWHERE | WIDER | NARROWER | SUMS
CHECKPOINTS = ("", "", "reentrant", "not reentrant", "selective")


class Program(NamedTuple):
    """Blocks of steps, each with a kind of checkpoint around it, and whether its input is added to its result."""

    seed: int
    dim: int
    blocks: tuple[tuple[str, bool, tuple[str, ...]], ...]

    def __str__(self) -> str:
        words = [f"{kind or 'plain'}{' +' if adds else ''}: {', '.join(steps)}" for kind, adds, steps in self.blocks]
        return f"{self.seed} along {self.dim}: {'; '.join(words)}"


def program(seed: int) -> Program:
    """The one of a number."""
    chance, is_whole = random.Random(seed), False
    blocks = []
    for _ in range(chance.randint(1, 3)):
        before, steps = is_whole, []
        for _ in range(chance.randint(1, 3)):
            rooms = [ANYWHERE, *([NARROWER, NARROWER, SUMS] if is_whole else [WIDER, WIDER])]
            room = chance.choice(rooms)
            steps.append(chance.choice([*room]))
            is_whole = is_whole if room in (ANYWHERE, SUMS) else not is_whole
        blocks.append((chance.choice(CHECKPOINTS), is_whole == before and chance.random() < 0.5, tuple(steps)))
    return Program(seed, chance.randrange(2), tuple(blocks))


def given_to(one: Program) -> Given:
    """What this rank gives a program, leaves of a graph: rows and one weight of its own, and what all ranks have."""
    own, common = (torch.Generator().manual_seed(one.seed * 100 + each) for each in (dist.get_rank() + 1, 0))
    shape = [BATCH, BATCH, WIDTH]
    shape[one.dim] = OWN_ROWS
    x = torch.randn(shape, generator=own)
    ws = [torch.randn(WIDTH, WIDTH, generator=each) / WIDTH**0.5 for each in (own, common, common)]
    given = Given(x, ws, torch.randn(WIDTH, generator=common), one.dim)
    for each in given.factors:
        each.requires_grad_()
    return given


def result(one: Program, given: Given) -> Tensor:
    """A number that each of a program's factors has a part in."""
    x = given.x
    for kind, adds, steps in one.blocks:
        y = _checkpointed(kind, steps, x, given)
        x = x + y if adds else y
    return (torch.sin(x) * (1 + dist.get_rank())).sum()


def _checkpointed(kind: str, steps: tuple[str, ...], x: Tensor, given: Given) -> Tensor:
    def body(x: Tensor, *ws: Tensor) -> Tensor:
        for step in steps:
            x = STEPS[step](x, given._replace(ws=[*ws[:WEIGHTS]], bias=ws[-1]))
        return x

    factors = (x, *given.ws, given.bias)
    if not kind:
        return body(*factors)
    options: dict[str, Any] = {"use_reentrant": kind == "reentrant"}
    if kind == "selective":
        options["context_fn"] = _saves_products
    found: Tensor = checkpoint(body, *factors, **options)
    return found


def _saves_products() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, op: Any, *given: Any, **options: Any) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE
