"""Attention over a sequence that ranks share, as an op of torch with gradients: every plan that moves keys and values.

All plans compute the same pieces in the same order: results have the same bits. Gradients of keys and values differ in
who adds them: the library, in its order, or the owner, in the order of ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from overweave.attention.pieces import Merged, Result, attend, gradients, wide
from overweave.attention.plain import Seen
from overweave.attention.programs import LANDED, TRAVEL, Travel, Work, moved, write
from overweave.attention.sequence import Piece, Sequence, offsets_within
from overweave.errors import InputError
from overweave.ops.author.proven_program import Kernels, proven_program
from overweave.ops.call.groups import group_of, refuse
from overweave.ops.dispatch.collectives import WHERE, agreed
from overweave.ops.dispatch.torch_ops import TorchOp, define
from overweave.runtime.handwritten import OwnBuffer

SEQUENTIAL, PER_SHARD, RING = "sequential", "per_shard", "ring"


class Call(NamedTuple):
    """A call on one rank: q `[b, h, s, d]`, k and v `[b, g, s, d]`. offsets: of documents in the whole sequence.
    where: as the ops of collectives take it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    offsets: torch.Tensor | None
    sequence: Sequence
    plan: str
    scale: float
    where: dict[str, Any]

    @property
    def rank(self) -> int:
        """Of the group."""
        rank: int = self.where["place"][0]
        return rank

    def travel(self, is_backward: bool) -> Travel | None:
        """The program that moves keys and values; None where none does."""
        if self.sequence.ranks == 1 or self.plan == SEQUENTIAL:
            return None
        b, g, _, d = self.k.shape
        return Travel(self.sequence, b * g * d, self.k.dtype, self.plan == RING, is_backward)

    def piece(self, source: int) -> tuple[Piece, Seen] | None:
        """What this rank sees of a shard."""
        piece = self.sequence.piece(self.rank, source)
        if piece is None:
            return None
        offsets = None
        if self.offsets is not None:
            of_queries = offsets_within(self.offsets, self.sequence.places(self.rank, piece.queries))
            offsets = of_queries, offsets_within(self.offsets, self.sequence.places(source, piece.keys))
        return piece, Seen(self.scale, piece.is_causal, piece.left, offsets)

    def shard(self, source: int, keys: slice, own: OwnBuffer) -> tuple[torch.Tensor, ...]:
        """Keys and values of a piece."""
        if source == self.rank:
            return self.k[:, :, keys], self.v[:, :, keys]
        rows = moved(keys, self.sequence.stored(source)[0])
        return tuple(as_heads(own(name)[rows], self.k) for name in TRAVEL)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """`[b, h, s, d]` -> `[s, b * h * d]`; of one sequence whose heads lie side by side a view."""
    b, h, s, d = x.shape
    return x.permute(2, 0, 1, 3).reshape(s, b * h * d)


def as_heads(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The opposite, a view, with heads as `like` has them."""
    b, h, _, d = like.shape
    return rows.view(rows.shape[0], b, h, d).permute(1, 2, 0, 3)


class AttendWork:
    """The pieces of a call, and their merge into its results."""

    def __init__(self, call: Call, results: Result) -> None:
        pieces = [call.sequence.piece(call.rank, source) for source in range(call.sequence.ranks)]
        self._call, self._merged = call, Merged(len(pieces) - pieces.count(None), results)

    def piece(self, source: int, own: OwnBuffer) -> None:
        if (found := self._call.piece(source)) is not None:
            piece, seen = found
            keys, values = self._call.shard(source, piece.keys, own)
            self._merged.add(piece.queries, *attend(self._call.q[:, :, piece.queries], keys, values, seen))

    def finish(self, own: OwnBuffer) -> None:
        """The last piece was merged into the results."""


class GradientWork:
    """The parts of the gradients of a call, piece by piece. of: the gradient of its result, the result, and its
    log-sum-exp. travel: the program that adds those of keys and values; None: the library does."""

    def __init__(
        self, call: Call, of: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...], travel: Travel | None
    ) -> None:
        self._call, self._of, self._results, self._travel = call, of, results, travel
        self._dq = torch.zeros_like(call.q, dtype=wide(call.q.dtype))
        shape = (0 if travel else call.sequence.rows, as_rows(call.k).shape[1])
        self._parts = tuple(call.k.new_zeros(shape, dtype=wide(call.k.dtype)) for _ in TRAVEL)

    def piece(self, source: int, own: OwnBuffer) -> None:
        if (found := self._call.piece(source)) is None:
            return
        (piece, seen), call = found, self._call
        dout, out, lse = (each[:, :, piece.queries] for each in self._of)
        keys, values = call.shard(source, piece.keys, own)
        dq, *parts = gradients((dout, out, lse), call.q[:, :, piece.queries], keys, values, seen)
        self._dq[:, :, piece.queries] += dq
        for room, part in zip(self._room(source, piece.keys, own), parts, strict=True):
            room.copy_(as_rows(part))

    def finish(self, own: OwnBuffer) -> None:
        dq, *of_shard = self._results
        dq.copy_(self._dq)
        for landed, parts, result in zip(LANDED, self._parts, of_shard, strict=True):
            total = self._added(own(landed)) if self._travel else self._scattered(parts)
            result.copy_(as_heads(total, result))

    def _room(self, source: int, keys: slice, own: OwnBuffer) -> list[torch.Tensor]:
        """For parts of a shard's gradients."""
        if self._travel is not None:
            return [own(name)[rows] for name, rows in self._travel.parts(self._call.rank, source, keys)]
        return [parts[moved(keys, self._call.sequence.stored(source)[0])] for parts in self._parts]

    def _added(self, landed: torch.Tensor) -> torch.Tensor:
        """In the order of ranks."""
        assert self._travel is not None
        sequence, rank = self._call.sequence, self._call.rank
        total = landed.new_zeros((sequence.own(rank), landed.shape[1]))
        for giver in range(sequence.ranks):
            if (piece := sequence.piece(giver, rank)) is not None:
                total[piece.keys] += landed[self._travel.landing(giver, piece.keys)]
        return total

    def _scattered(self, parts: torch.Tensor) -> torch.Tensor:
        if self._call.sequence.ranks == 1:
            return parts
        total: torch.Tensor = torch.ops.overweave.reduce_scatter_rows(parts, **self._call.where)
        return total


def _run(call: Call, travel: Travel | None, work: Any, results: tuple[torch.Tensor, ...]) -> None:
    """work: makes what computes, anew at each call of it."""
    if travel is None:
        own, todo = _gathered(call).__getitem__, work()
        for step in range(call.sequence.ranks):
            todo.piece((call.rank - step) % call.sequence.ranks, own)
        todo.finish(own)
        return
    agreed(call.where["group_name"], f"{call.where['told']} by {call.plan}", lambda group: None)

    def load(own: OwnBuffer) -> None:
        todo = work()
        for source in range(call.sequence.ranks):
            todo.piece(source, own)
        todo.finish(own)

    shapes = call.q.shape, call.k.shape, call.offsets is None, call.scale
    group = group_of(call.where["group_name"])
    program, todo = proven_program(group, travel, call.q.device, Kernels(shapes, load)), work()
    with program.call() as written:
        write(written, travel, (as_rows(call.k), as_rows(call.v)), Work(todo.piece, todo.finish))
        for result in results:
            written.rank_void(result)


def _gathered(call: Call) -> dict[str, torch.Tensor]:
    """All keys and values, by the library."""
    if call.sequence.ranks == 1:
        return {}
    gather, rows = torch.ops.overweave.all_gather_rows, call.sequence.rows
    shards = zip(TRAVEL, (call.k, call.v), strict=True)
    return {name: gather(as_rows(each), m=rows, **call.where) for name, each in shards}


def _call_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor | None, given: Any) -> Call:
    where = {name: given[name] for name in ("group_name", "told", "place")}
    mask = (given["is_causal"], given["is_zigzag"], given["window"])
    return Call(
        q, k, v, offsets, Sequence(given["rows"], where["place"][1], *mask), given["plan"], given["scale"], where
    )


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor | None, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_offsets(offsets, given)
    call, results = _call_of(q, k, v, offsets, given), _attend_fake(q)
    _run(call, call.travel(is_backward=False), lambda: AttendWork(call, results), results)
    return results


def _attend_fake(q: torch.Tensor, *_: Any, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=wide(q.dtype))


def _gradients(
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call, results = _call_of(q, k, v, offsets, given), _gradients_fake(dout, out, lse, q, k, v)
    dout = dout.contiguous()
    travel = call.travel(is_backward=True)
    _run(call, travel, lambda: GradientWork(call, (dout, out, lse), results, travel), results)
    return results


def _gradients_fake(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *given: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = given[:3]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _check_offsets(offsets: torch.Tensor | None, given: dict[str, Any]) -> None:
    """On a CPU, where peers are told of offsets that are none before anything travels. Raises InputError."""
    if offsets is None or offsets.is_cuda:
        return
    rows = given["rows"]
    if bool((offsets.diff() < 0).any()) or int(offsets[0]) < 0 or int(offsets[-1]) > rows:
        cure = "Pass where documents begin, ascending, and where the last ends"
        error = InputError(f"cu_seqlens within {rows} tokens", f"they are {offsets.tolist()}"[:80], cure)
        raise refuse(group_of(given["group_name"]), error) if given["group_name"] else error


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    ctx.save_for_backward(*output, *(each for each in inputs if each is not None))
    ctx.mark_non_differentiable(output[1])
    told = f"gradients of {keyword_only_inputs['told']}"
    ctx.options = dict(keyword_only_inputs) | {"told": told}


def _backward(ctx: Any, dout: torch.Tensor, _: Any) -> tuple[Any, ...]:
    out, lse, q, k, v, *offsets = ctx.saved_tensors
    op = torch.ops.overweave.split_attention_gradients
    dq, dk, dv = op(dout, out, lse, q, k, v, *(offsets or (None,)), **ctx.options)
    return dq, dk, dv, None


_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor? offsets"
_OPTIONS = f"SymInt rows, bool is_causal, bool is_zigzag, int? window, float scale, str plan, {WHERE}"
_ATTEND = f"({_OPERANDS}, *, {_OPTIONS}) -> (Tensor, Tensor)"
_GRADIENTS = f"(Tensor dout, Tensor out, Tensor lse, {_OPERANDS}, *, {_OPTIONS}) -> (Tensor, Tensor, Tensor)"
for _op in (
    TorchOp("split_attention", _ATTEND, _attend, _attend_fake, _backward, _keep),
    TorchOp("split_attention_gradients", _GRADIENTS, _gradients, _gradients_fake),
):
    define(_op)
