"""Collectives of rows by torch.distributed, as ops of torch with gradients; ranks agree on each call before it runs.

all_gather_rows       [m/W, k] -> [m, k]        gradient: reduce-scatter
reduce_scatter_rows   [m, n]   -> [m/W, n]      gradient: all-gather
all_reduce_rows       [m, n]   -> [m, n]        gradient: identity
replicated            x -> x, the same on every rank; gradient: all-reduce
own_rows              [m, n]   -> [m/W, n]      of rows that are the same on every rank; gradient: all-gather

All may be differentiated any number of times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from overweave.compat.torch_names import all_gather_single
from overweave.ir.shards import shard_rows
from overweave.memory.board.board import Board
from overweave.memory.group import Group, GroupLike, OfGroup
from overweave.ops.call.collective import run_collective, run_reduce_scatter
from overweave.ops.call.groups import group_of
from overweave.ops.dispatch.route import GroupRank, group_rank_of
from overweave.ops.dispatch.torch_ops import TorchOp, define
from overweave.runtime.library.library import as_movable

MovedRows = TypeVar("MovedRows")
MOST_AGREED = 4096  # signatures of one group
_AGREED: OfGroup[set[bytes]] = OfGroup()


class Exchange(NamedTuple):
    """A group's rank, and a description of the public call that all ranks compare (`told`)."""

    place: GroupRank
    told: str

    @property
    def options(self) -> dict[str, Any]:
        """Return the keyword arguments by which the ops take it."""
        return {"group_name": self.place.name, "told": self.told, "place": [self.place.rank, self.place.world_size]}


def exchange_in(group: GroupLike, told: str) -> Exchange:
    """Return the Exchange of a call in a group. Raises GroupError."""
    return Exchange(group_rank_of(group), told)


def agreed(group_name: str, signature: str, move: Callable[[Group], MovedRows]) -> MovedRows:
    """Run a collective after all ranks are known to make the same call.

    The first call of a signature waits for all ranks; later ones post it without waiting. Raises RankMismatch on every
    rank if calls differ, and PeerError for a peer that died or stalled.
    """
    group = group_of(group_name)
    board, told = Board.of(group), signature.encode()
    with group.lock:
        signatures = _AGREED.setdefault(group.process_group, set())
        board.user_calls += 1
        if told in signatures:
            board.post(told)
        else:
            board.agree(told)
            signatures.clear() if len(signatures) >= MOST_AGREED else None
            signatures.add(told)
        try:
            result = move(group)
        except BaseException as error:
            board.report_failure(error, signature)
            raise
        if not board.is_watched:
            board.finish()
    return result


def described(name: str, x: torch.Tensor, m: int | str = "") -> str:
    """Return a description of a collective, of what all ranks must have alike. m: rows of all ranks, or empty."""
    return f"{name} of [{m}, {', '.join(map(str, x.shape[1:]))}] {x.dtype}".replace("torch.", "")


def all_gather_rows(exchange: Exchange, x: torch.Tensor, m: int) -> torch.Tensor:
    """Gather the rows of all ranks, `[m, ...]`, from shards as torch.chunk divides them."""
    if exchange.place.world_size == 1:
        return x
    gathered: torch.Tensor = torch.ops.overweave.all_gather_rows(x, m=m, **exchange.options)
    return gathered


def reduce_scatter_rows(exchange: Exchange, x: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of the sum of all ranks' x."""
    if exchange.place.world_size == 1:
        return x
    scattered: torch.Tensor = torch.ops.overweave.reduce_scatter_rows(x, **exchange.options)
    return scattered


def all_reduce_rows(exchange: Exchange, x: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' x."""
    if exchange.place.world_size == 1:
        return x
    summed: torch.Tensor = torch.ops.overweave.all_reduce_rows(x, **exchange.options)
    return summed


def replicated(exchange: Exchange, x: torch.Tensor) -> torch.Tensor:
    """Return x, the same on every rank; its gradient is the sum of all ranks' gradients."""
    if exchange.place.world_size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    differentiated: Any = _Replicated
    same: torch.Tensor = differentiated.apply(x, exchange)
    return same


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        exchange: Exchange = ctx.exchange
        return all_reduce_rows(Exchange(exchange.place, f"gradients of {exchange.told}"), gradient.contiguous()), None


def own_rows(exchange: Exchange, x: torch.Tensor) -> torch.Tensor:
    """This rank's rows of x, which all ranks have alike, dealt as torch.chunk deals them."""
    place = exchange.place
    lo, hi = shard_rows(x.shape[0], place.world_size, place.rank)
    if place.world_size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x[lo:hi]
    differentiated: Any = _OwnRows
    own: torch.Tensor = differentiated.apply(x, (lo, hi), exchange)
    return own


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: tuple[int, int], exchange: Exchange) -> torch.Tensor:
        ctx.exchange, ctx.m = exchange, x.shape[0]
        return x[rows[0] : rows[1]].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        exchange: Exchange = ctx.exchange
        whole = all_gather_rows(Exchange(exchange.place, f"gradients of {exchange.told}"), gradient, ctx.m)
        return whole, None, None


def _count_own_rows(m: int, place: list[int]) -> int:
    """Return how many of m rows this rank has. place: (rank, world size). Guards a symbolic m as little as it can."""
    rank, ranks = place
    if m % ranks == 0:
        return m // ranks
    low, high = shard_rows(m, ranks, rank)
    return high - low


def _gather(x: torch.Tensor, *, m: int, group_name: str, told: str, place: list[int]) -> torch.Tensor:
    """Kernel of `all_gather_rows`: pads shards to equal rows, gathers, drops the padding."""

    def move(group: Group) -> torch.Tensor:
        ranks, size = group.world_size, -(-m // group.world_size)
        sent = x.contiguous()
        if x.shape[0] < size:
            sent = x.new_empty((size, *x.shape[1:]))
            sent[: x.shape[0]] = x
        gathered = x.new_empty((size * ranks, *x.shape[1:]))
        if gathered.numel():
            run_collective(group, all_gather_single, as_movable(gathered), as_movable(sent))
        return gathered if m == size * ranks else gathered[:m].clone()

    return agreed(group_name, f"{told}: {described('all_gather', x, m)}", move)


def _scatter(x: torch.Tensor, *, group_name: str, told: str, place: list[int]) -> torch.Tensor:
    """Kernel of `reduce_scatter_rows`: pads rows to equal shards, sums and scatters, drops the padding."""

    def move(group: Group) -> torch.Tensor:
        ranks, m = group.world_size, x.shape[0]
        size, own = -(-m // ranks), _count_own_rows(m, place)
        sent = x.contiguous()
        if m < size * ranks:
            sent = x.new_zeros((size * ranks, *x.shape[1:]))
            sent[:m] = x
        total = x.new_empty((size, *x.shape[1:]))
        if total.numel():
            run_reduce_scatter(group, total, sent)
        return total if own == size else total[:own].clone()

    return agreed(group_name, f"{told}: {described('reduce_scatter', x, x.shape[0])}", move)


def _reduce(x: torch.Tensor, *, group_name: str, told: str, place: list[int]) -> torch.Tensor:
    def move(group: Group) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        if total.numel():
            run_collective(group, dist.all_reduce, total)
        return total

    return agreed(group_name, f"{told}: {described('all_reduce', x, x.shape[0])}", move)


def _gather_fake(x: torch.Tensor, *, m: int, group_name: str, told: str, place: list[int]) -> torch.Tensor:
    return x.new_empty((m, *x.shape[1:]))


def _scatter_fake(x: torch.Tensor, *, group_name: str, told: str, place: list[int]) -> torch.Tensor:
    return x.new_empty((_count_own_rows(x.shape[0], place), *x.shape[1:]))


def _reduce_fake(x: torch.Tensor, *, group_name: str, told: str, place: list[int]) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.options, ctx.m = dict(keyword_only_inputs), inputs[0].shape[0]


def _gradient_options(options: dict[str, Any]) -> dict[str, Any]:
    told = str(options["told"]).removeprefix("gradients of ")
    return {name: each for name, each in options.items() if name != "m"} | {"told": f"gradients of {told}"}


def _gather_backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    scattered: torch.Tensor = torch.ops.overweave.reduce_scatter_rows(gradient, **_gradient_options(ctx.options))
    return scattered


def _scatter_backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    gathered: torch.Tensor = torch.ops.overweave.all_gather_rows(gradient, m=ctx.m, **_gradient_options(ctx.options))
    return gathered


def _reduce_backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient


WHERE = "str group_name, str told, int[] place"
for _name, _arguments, _move, _fake, _backward in (
    ("all_gather_rows", "SymInt m, ", _gather, _gather_fake, _gather_backward),
    ("reduce_scatter_rows", "", _scatter, _scatter_fake, _scatter_backward),
    ("all_reduce_rows", "", _reduce, _reduce_fake, _reduce_backward),
):
    _schema = f"(Tensor x, *, {_arguments}{WHERE}) -> Tensor"
    define(TorchOp(_name, _schema, _move, _fake, _backward, _setup_context, is_twice_differentiable=True))
