"""Experts whose communication hides behind their matmuls: `plan="push"`.

Which rows an expert has, the device knows alone: sizes of buffers, copies and signals follow from shapes
(moe/programs.py), and an expert without rows multiplies nothing. One program, proven once, serves every routing.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from overweave.errors import InputError
from overweave.ir.operators.forms import GATE
from overweave.ir.shards import shard_rows
from overweave.memory.group import Group
from overweave.moe.glu import Glu, gated
from overweave.moe.grouped import grouped_outer
from overweave.moe.pairs import FactorLike, RoutedTokens, added, first_factors, multiplied, routed_tokens
from overweave.moe.programs import COLUMNS_STEP, LayerProgram, Sizes, write_gather, write_scatter, write_total
from overweave.moe.routing import route
from overweave.moe.slots import add_slots
from overweave.moe.travelling import dense
from overweave.ops.author.proven_program import Kernels, proven_program
from overweave.ops.author.tile_program import TileProgram
from overweave.ops.call.groups import group_of, refuse
from overweave.ops.dispatch.collectives import WHERE, agreed
from overweave.ops.dispatch.route import GroupRank
from overweave.ops.dispatch.torch_ops import TorchOp, define
from overweave.runtime.backends import load
from overweave.runtime.handwritten import OwnBuffer
from overweave.runtime.library import grouped as reference
from overweave.runtime.library.grouped import Grouped, aligned
from overweave.runtime.library.slots import SlotSums
from overweave.schedules.records.experts import PLANS, PUSH, SEQUENTIAL


class Overlapped(NamedTuple):
    """A call on one rank: its group, and its sizes."""

    group: Group
    sizes: Sizes

    def program(self, kind: str, device: torch.device, kernels: Kernels) -> TileProgram:
        """Prove and build the program at the first call of a signature, on all ranks. Raises RankMismatch."""
        return proven_program(self.group, LayerProgram(kind, self.sizes), device, kernels)


def obstacle(x: torch.Tensor, columns: int) -> str:
    """Return why rows of x, or results of so many columns, cannot be sent by `push`; empty if they can."""
    if columns % COLUMNS_STEP or x.shape[1] % COLUMNS_STEP:
        return f"rows of {x.shape[1]} and {columns} elements are no whole words of 16 bytes"
    return ""


class FirstMatmul:
    """The first matmul of a call: routes tokens, and multiplies them as they arrive.

    out: the products of all pairs, sorted by expert; gated, if the kernel can do that.
    """

    def __init__(self, of: Overlapped, x: torch.Tensor, factors: FactorLike, glu: Glu | None) -> None:
        self.of = of
        self._w, _, self._operands = first_factors(factors, glu)
        self.experts, self._glu = self._w.shape[0], None if GATE in self._operands else glu
        self.out = x.new_empty((of.sizes.m * of.sizes.top, self._w.shape[2]))

    def route(self, ids: torch.Tensor) -> None:
        """Say which row each pair has. ids: of all tokens."""
        self.routed = RoutedTokens(ids, route(ids, max(1, self.experts), self.of.sizes.ranks))

    def multiply(self, own: OwnBuffer, channel: Any = None) -> None:
        """Multiply all tokens, each tile of them once it is there. channel: says so, on a GPU."""
        tables, sizes = self.routed.tables, self.of.sizes
        if not self.out.numel() or not self.experts:
            return
        call = _call(own("tokens")[: sizes.m], self._w, tables.offsets, rows=tables.tokens, **self._operands)
        columns = self._w.shape[2] * (2 if GATE in self._operands else 1)
        place = self.of.group.rank, sizes.experts_ahead(self.experts, columns)
        multiply_arriving(self.out, call, tables.bounds, place, channel)

    @property
    def kernels(self) -> tuple[object, ...]:
        """Return what decides which kernels are launched."""
        each = {"w": self._w, **self._operands}
        words = ((one.shape, one.stride()) if isinstance(one, torch.Tensor) else one for one in each.values())
        return *zip(each, words, strict=True), self._glu

    @property
    def h(self) -> torch.Tensor:
        """Return the operand of the second matmul."""
        return self.out if self._glu is None else gated(self.out, self._glu)


class SecondMatmul:
    """The second matmul of a call: columns of all products, and their sums over the experts of a token.

    bias: of experts that a rank holds whole. is_total: ranks get the sums of all tokens. y: those that this rank gets.
    """

    def __init__(
        self,
        of: Overlapped,
        h: torch.Tensor,
        factors: tuple[torch.Tensor, torch.Tensor | None],
        is_total: bool = False,
    ) -> None:
        self.of, self._factors, self._is_total = of, factors, is_total
        self._products = dict[int, torch.Tensor]()
        self._own = slice(*of.sizes.rows(of.group.rank))
        rows = of.sizes.m if is_total else self._own.stop - self._own.start
        self.y = h.new_empty((rows, of.sizes.columns))

    @property
    def kernels(self) -> tuple[object, ...]:
        """Return what decides which kernels are launched."""
        w, bias = self._factors
        return w.shape, w.stride(), bias is None

    def begin(self, h: torch.Tensor, routed: RoutedTokens, weights: torch.Tensor | None) -> None:
        """Take what is to be multiplied. weights: fp32 `[m, top]`, columns side by side, or None."""
        self._h, self._routed, self._weights = h, routed, weights

    def compute(self, cut: int, own: OwnBuffer) -> None:
        """Compute columns of all products, and of the sums of peers' tokens."""
        (low, high), (w, bias), sizes = self.of.sizes.cuts[cut], self._factors, self.of.sizes
        z = self._h.new_empty((self._h.shape[0], high - low))
        if z.numel() and w.shape[0]:
            of_columns = None if bias is None else bias[:, low:high]
            of_cut = w[:, low:high].transpose(1, 2)
            _multiply_into(z, _call(self._h, of_cut, self._routed.tables.offsets, bias=of_columns))
        self._products[cut] = z
        for rows in (slice(0, self._own.start), slice(self._own.stop, sizes.m)):
            if rows.start < rows.stop:
                add_slots(self._sums(cut, rows), own(f"parts{cut}")[rows])

    def add(self, cut: int, own: OwnBuffer) -> None:
        """Add the parts of all ranks of columns of the own tokens: in fp32, in the order of ranks, rounded once."""
        (low, high), sizes, rows = self.of.sizes.cuts[cut], self.of.sizes, self._own
        landed = own(f"landed{cut}").view(sizes.ranks, sizes.shard, high - low)[:, : rows.stop - rows.start]
        sums = self._sums(cut, rows)._replace(landed=landed, rank=self.of.group.rank)
        add_slots(sums, own(f"sums{cut}")[rows] if self._is_total else self.y[:, low:high])

    def compute_all(self, own: OwnBuffer) -> None:
        """Do all of it, on buffers that hold anything."""
        for step in (self.compute, self.add):
            for cut in range(len(self.of.sizes.cuts)):
                step(cut, own)

    def _sums(self, cut: int, rows: slice) -> SlotSums:
        tables = self._routed.tables
        places = tables.places.view(self.of.sizes.m, self.of.sizes.top)[rows]
        weights = None if self._weights is None else self._weights[rows]
        return SlotSums(self._products[cut], places, tables.offsets[-1:], weights)


def gathered_products(
    of: Overlapped, given: tuple[torch.Tensor, torch.Tensor], first: FirstMatmul, keeps: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Products, gated and sorted by expert; the experts of all tokens; and all tokens, if somebody keeps them. given:
    the own tokens and their experts."""
    (x, ids), sizes = given, of.sizes
    every = ids.new_empty((sizes.m, sizes.top))
    kept = x.new_empty((sizes.m if keeps else 0, x.shape[1]))

    def route_all(own: OwnBuffer) -> None:
        first.route(every.copy_(own("slots")[: sizes.m]))

    def multiply(own: OwnBuffer, channel: Any = None) -> None:
        first.multiply(own, channel)
        if keeps:
            kept.copy_(own("tokens")[: sizes.m])

    def load_kernels(own: OwnBuffer) -> None:
        route_all(own)
        multiply(own)

    program = of.program("gather", x.device, Kernels(first.kernels, load_kernels))
    with program.call() as call:
        write_gather(call, sizes, given, route_all, multiply)
        call.rank_void(first.out)
    return first.h, every, kept


def summed_over_ranks(
    of: Overlapped, kind: str, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], w: torch.Tensor
) -> torch.Tensor:
    """The sum over ranks, whose parts are added in fp32 in the order of ranks: of this rank's tokens (kind `scatter`),
    or of all (`total`). given: h, the experts of all tokens, and their weights."""
    h, ids, weights = given
    second = SecondMatmul(of, h, (w, None), kind == "total")
    second.begin(h, routed_tokens(ids, w.shape[0]), weights)
    program = of.program(kind, h.device, Kernels((*second.kernels, weights is None), second.compute_all))
    with program.call() as call:
        if kind == "total":
            write_total(call, of.sizes, (second.compute, second.add), second.y)
        else:
            write_scatter(call, of.sizes, second.compute, second.add)
        call.rank_void(second.y)
    return second.y


class ExpertWeights(NamedTuple):
    """This rank's part of the experts of a layer. up: `[experts, n, k]`, down: `[experts, k, n]`, or where up packs the
    two weights of a glu `[experts, k, n / 2]`. up_bias `[experts, n]`; down_bias `[experts, k]`, alike on every rank.
    first: where each rank holds experts whole, the number of its first one among those of all ranks; down_bias is of
    these then. None: each has a part of every expert. up_scale `[experts, n]`, down_scale `[experts, k]`: of weights in
    fp8, as `quantise_rows` returns both.
    """

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    glu: Glu | None = None
    first: int | None = None
    up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None

    def own_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the experts of tokens as this rank numbers its own; -1 for others."""
        if self.first is None:
            return ids
        own = ids - self.first
        return torch.where((own >= 0) & (own < self.up.shape[0]), own, -1)

    def sums(self, x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor | None) -> torch.Tensor:
        """Return this rank's part of the sum of each token of x, without biases that its owner adds."""
        down_bias = None if self.first is None else self.down_bias
        if not self.up.shape[0]:  # a rank without experts: nothing, of which its peers' gradients still hear
            heard = [each[:, :0].sum(1, keepdim=True).to(x.dtype) for each in (x, topk_weights) if each is not None]
            own = (self.up, self.down, self.up_bias, down_bias)  # of no experts: no elements
            heard += [each.to(x.dtype).sum() for each in own if each is not None]
            return x.new_zeros(x.shape) + sum(heard)
        ids = self.own_ids(ids)
        routed = routed_tokens(ids, self.up.shape[0])
        h = multiplied(x, routed, None, (self.up, self.up_bias, self.up_scale), self.glu)
        return added(h, routed, topk_weights, (self.down, down_bias, self.down_scale))


def check_layer(name: str, weights: object) -> None:
    """Raise InputError for what are no weights of a layer, and for a first expert that no rank can have."""
    asked = f"{name}: weights, an ExpertWeights"
    if not isinstance(weights, ExpertWeights):
        raise InputError(asked, f"got {type(weights).__name__}", "Pass overweave.moe.ExpertWeights(up, down, ...)")
    first: object = weights.first
    if first is not None and (type(first) is not int or first < 0):
        cure = "Pass the number of this rank's first expert among those of all ranks, from 0 on, or None"
        raise InputError(asked, f"got first={str(first)[:40]}", cure)


def chained(
    of: Overlapped, x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor, weights: ExpertWeights
) -> torch.Tensor:
    """Return this rank's tokens of the sum over ranks of a whole layer, without biases that owners of tokens add."""
    sizes, top = of.sizes, of.sizes.top
    slots = torch.cat([ids, dense(topk_weights.float()).view(torch.int32)], 1)
    first = FirstMatmul(of, x, (weights.up, weights.up_bias), weights.glu)
    second = SecondMatmul(of, x, (weights.down, None if weights.first is None else weights.down_bias))

    def route_all(own: OwnBuffer) -> None:
        first.route(weights.own_ids(own("slots")[: sizes.m, :top]))

    def multiply(own: OwnBuffer, channel: Any = None) -> None:
        first.multiply(own, channel)
        second.begin(first.h, first.routed, own("slots").view(torch.float32)[: sizes.m, top:])

    def load_kernels(own: OwnBuffer) -> None:
        route_all(own)
        multiply(own)
        second.compute_all(own)

    program = of.program("chain", x.device, Kernels((*first.kernels, *second.kernels), load_kernels))
    with program.call() as call:
        write_gather(call, sizes, (x, slots), route_all, multiply)
        write_scatter(call, sizes, second.compute, second.add)
        call.rank_void(second.y)
    return second.y


def overlapped_in(
    group_name: str, tokens: tuple[int, int], rows: tuple[int, torch.dtype], words: int = 1
) -> Overlapped:
    """A call in a group. tokens: of all ranks, and the experts of each. rows: what travels: columns and dtype. words:
    `Sizes.words`."""
    group = group_of(group_name)
    return Overlapped(group, Sizes(tokens[0], rows[0], tokens[1], rows[1], group.world_size, words))


def _call(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, **fields: Any) -> Grouped:
    nothing = dict.fromkeys(Grouped._fields) | {"activation": "", "gating": (), "out_dtype": x.dtype}
    return Grouped(**nothing | {"x": x, "w": w, "offs": offsets[1:]} | fields)  # type: ignore[arg-type]


def multiply_arriving(
    out: torch.Tensor, call: Grouped, bounds: torch.Tensor, place: tuple[int, int], channel: Any
) -> None:
    """Compute `out` as rows arrive; on a CPU once all are there. The rest: runtime/gpu/experts.multiply_arriving."""
    if out.is_cuda:
        load("gpu grouped arriving")(out, aligned(call), bounds, place, channel)
    else:
        out.copy_(reference.multiply(call))


def _multiply_into(out: torch.Tensor, call: Grouped) -> None:
    if out.is_cuda:
        load("gpu grouped into")(out, aligned(call))
    else:
        out.copy_(reference.multiply(call))


def check_ids(group_name: str, ids: torch.Tensor, experts: int) -> None:
    """On a CPU, where peers are told of ids that are no expert's before anything travels. Raises InputError."""
    if ids.is_cuda or not bool(((ids < -1) | (ids >= experts)).any()):
        return
    found, cure = f"they are {int(ids.min())} to {int(ids.max())}", "Pass experts, or -1 for none"
    raise refuse(group_of(group_name), InputError(f"topk_ids below {experts}", found, cure))


def _agree(group_name: str, told: str, tokens: int) -> None:
    """Compare a call on all ranks: in words, so that those whose sizes differ are told which."""
    agreed(group_name, f"{told} by {PUSH}, of {tokens} tokens of all ranks", lambda group: None)


def _gathered(
    x: torch.Tensor,
    ids: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    m: int,
    keeps: bool,
    glu: str,
    group_name: str,
    told: str,
    place: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_ids(group_name, ids, w.shape[0])
    _agree(group_name, told, m)
    of = overlapped_in(group_name, (m, ids.shape[1]), (x.shape[1], x.dtype), ids.shape[1])
    first = FirstMatmul(of, x, (w, bias), _glu_of(glu))
    return gathered_products(of, (dense(x), dense(ids)), first, keeps)


def _gathered_fake(
    x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m, top = options["m"], ids.shape[1]
    kept = x.new_empty((m if options["keeps"] else 0, x.shape[1]))
    return x.new_empty((m * top, w.shape[1] // (2 if options["glu"] else 1))), ids.new_empty((m, top)), kept


def _summed(
    kind: str,
    h: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    w: torch.Tensor,
    *,
    group_name: str,
    told: str,
    place: list[int],
) -> torch.Tensor:
    _agree(group_name, told, ids.shape[0])
    of = overlapped_in(group_name, (ids.shape[0], ids.shape[1]), (w.shape[1], h.dtype))
    own = None if weights is None else dense(weights.float())
    return summed_over_ranks(of, kind, (dense(h), dense(ids), own), w)


def _scattered_fake(
    h: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, w: torch.Tensor, **options: Any
) -> torch.Tensor:
    rank, ranks = options["place"]
    m = ids.shape[0]
    low, high = (0, m // ranks) if m % ranks == 0 else shard_rows(m, ranks, rank)
    return h.new_empty((high - low, w.shape[1]))


def _total_fake(
    h: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, w: torch.Tensor, **options: Any
) -> torch.Tensor:
    return h.new_empty((ids.shape[0], w.shape[1]))


def _keep_gathered(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    _, _, w, bias = inputs
    _, ids, x = output
    ctx.save_for_backward(ids, x, w)
    ctx.mark_non_differentiable(ids, x)
    ctx.has_bias, ctx.options = bias is not None, dict(keyword_only_inputs)


def _gathered_gradient(ctx: Any, dh: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    """Compute the gradient of x by `experts_reduce_scatter`'s program, and those of weights by grouped matmuls."""
    ids, x, w = ctx.saved_tensors
    needs_x, _, needs_w, needs_bias = ctx.needs_input_grad
    dx = dw = dbias = None
    dh = dense(dh)
    if needs_x:
        dx = torch.ops.overweave.scattered_experts(dh, ids, None, w.transpose(1, 2), **_of_gradients(ctx.options))
    if needs_w or (ctx.has_bias and needs_bias):
        tables = routed_tokens(ids, w.shape[0]).tables
        if needs_w:
            dw = grouped_outer(dh, x.index_select(0, tables.tokens), tables.offsets[1:])
        if ctx.has_bias and needs_bias:
            ones = torch.ones(dh.shape[0], COLUMNS_STEP, dtype=dh.dtype, device=dh.device)
            dbias = grouped_outer(ones, dh, tables.offsets[1:])[:, 0]
    return dx, None, dw, dbias


def _keep_summed(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    h, ids, weights, w = inputs
    ctx.save_for_backward(h, ids, w, *([] if weights is None else [weights]))
    ctx.options = dict(keyword_only_inputs)


def _scattered_gradient(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    """Compute the gradient of h by `all_gather_experts`' program, each row's before it is weighed; then the others."""
    saved = ctx.saved_tensors  # once: a checkpoint unpacks them no second time
    _, ids, w, *_ = saved
    rank, ranks = ctx.options["place"]
    m = ids.shape[0]
    low, high = shard_rows(m, ranks, rank)
    options = _of_gradients(ctx.options) | {"m": m, "keeps": ctx.needs_input_grad[3], "glu": ""}
    own, dy = dense(ids[low:high]), dense(dy)
    raw, _, g = torch.ops.overweave.gathered_experts(dy, own, w.transpose(1, 2), None, **options)
    return _second_gradients(ctx, saved, routed_tokens(ids, w.shape[0]), (raw, g))


def _total_gradient(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    """Compute gradients on each rank alone: all have that of y."""
    saved = ctx.saved_tensors
    _, ids, w, *_ = saved
    routed = routed_tokens(ids, w.shape[0])
    raw = multiplied(dense(dy), routed, None, (w.transpose(1, 2),), None)
    return _second_gradients(ctx, saved, routed, (raw, dy))


def _second_gradients(
    ctx: Any, saved: tuple[torch.Tensor, ...], routed: RoutedTokens, of: tuple[torch.Tensor, torch.Tensor]
) -> tuple[Any, ...]:
    """saved: of `_keep_summed`. of: the gradient of each row of h before it is weighed, and of all tokens' sums."""
    (h, ids, _, *weights), (raw, g) = saved, of
    needs_h, _, needs_weights, needs_w = ctx.needs_input_grad
    tables, dh, dweights, dw = routed.tables, raw, None, None
    of_rows = None
    if weights:
        of_rows = torch.where(routed.has_expert, weights[0].float(), 0.0).flatten().index_select(0, tables.order)
        dh = (raw.float() * of_rows.unsqueeze(1)).to(raw.dtype)
        of_pairs = (raw.float() * h.float()).sum(1).index_select(0, tables.places).view(ids.shape)
        dweights = torch.where(routed.has_expert, of_pairs, 0.0).to(weights[0].dtype) if needs_weights else None
    if needs_w:
        rows = g.index_select(0, tables.tokens)
        if of_rows is not None:
            rows = (rows.float() * of_rows.unsqueeze(1)).to(g.dtype)
        dw = grouped_outer(rows, h, tables.offsets[1:])
    return dh if needs_h else None, None, dweights, dw


def _of_gradients(options: dict[str, Any]) -> dict[str, Any]:
    told = str(options["told"]).removeprefix("gradients of ")
    return {name: options[name] for name in ("group_name", "place")} | {"told": f"gradients of {told}"}


def _chained(
    x: torch.Tensor,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    *,
    m: int,
    glu: str,
    first: int | None,
    group_name: str,
    told: str,
    place: list[int],
) -> torch.Tensor:
    if first is None:
        check_ids(group_name, ids, up.shape[0])
    _agree(group_name, told, m)
    of = overlapped_in(group_name, (m, ids.shape[1]), (x.shape[1], x.dtype), 2 * ids.shape[1])
    weights = ExpertWeights(up, down, up_bias, down_bias, _glu_of(glu), first)
    return chained(of, dense(x), dense(ids), topk_weights, weights)


def _chained_fake(
    x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor, *_: Any, **options: Any
) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def glu_word(glu: Glu | None) -> str:
    """Return a glu as text for the description of an op's call; a compiler traces this, too."""
    return "" if glu is None else f"{glu.activation} {glu.interleaved} {glu.limit} {glu.slope} {glu.shift}"


def _glu_of(word: str) -> Glu | None:
    if not word:
        return None
    activation, interleaved, limit, slope, shift = word.split()
    bound = None if limit == "None" else float(limit)
    return Glu(activation, interleaved == "True", bound, float(slope), float(shift))


_CHAINED = (
    "(Tensor x, Tensor ids, Tensor topk_weights, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias, *, "
    f"SymInt m, str glu, int? first, {WHERE}) -> Tensor"
)
_GATHERED = (
    "(Tensor x, Tensor ids, Tensor w, Tensor? bias, *, SymInt m, bool keeps, str glu, "
    f"{WHERE}) -> (Tensor, Tensor, Tensor)"
)
_SUMMED = f"(Tensor h, Tensor ids, Tensor? weights, Tensor w, *, {WHERE}) -> Tensor"
for _op in (
    TorchOp("chained_experts", _CHAINED, _chained, _chained_fake),
    TorchOp("gathered_experts", _GATHERED, _gathered, _gathered_fake, _gathered_gradient, _keep_gathered),
    TorchOp(
        "scattered_experts", _SUMMED, partial(_summed, "scatter"), _scattered_fake, _scattered_gradient, _keep_summed
    ),
    TorchOp("total_experts", _SUMMED, partial(_summed, "total"), _total_fake, _total_gradient, _keep_summed),
):
    define(_op)


def choose(name: str, plan: str | None, reason: str, is_quicker: bool) -> str:
    """The plan of a call: what is asked, or what measurements say. reason: why it cannot be `push`. Raises InputError
    for a plan that cannot run."""
    if plan is None:
        return PUSH if is_quicker and not reason else SEQUENTIAL
    if not isinstance(plan, str) or plan not in PLANS:
        raise InputError(
            f"{name} with plan {str(plan)[:40]!r}", "there is no such plan", f"Use one of {', '.join(PLANS)}"
        )
    if plan == PUSH and reason:
        raise InputError(f"{name} with plan {plan!r}", reason, "Leave the choice to overweave")
    return plan


def pushing_is_quicker(place: GroupRank, device: torch.device, shard_bytes: int) -> bool:
    """Whether `push` is, of a call that nobody differentiates. shard_bytes: of a rank's tokens; alike on all ranks."""
    slower = reason_not_quicker(place.world_size, device.type, shard_bytes)
    return not slower and _reaches_peers(place.name, device.index)


def reason_not_quicker(ranks: int, device: str, shard_bytes: int) -> str:
    """Why `push` is not taken to be quicker on GPUs that reach each other; empty if it is."""
    if device != "cuda":
        return "there are no GPUs"
    if ranks < 2:
        return "one rank has no peers"
    if shard_bytes < LEAST_BYTES:
        return f"tokens of a rank are {shard_bytes} bytes, and push was quicker from {LEAST_BYTES} on (2 x H200)"
    return ""


def _reaches_peers(group_name: str, index: int) -> bool:
    group = group_of(group_name)
    with group.lock:
        reaches: bool = load("gpu reach")(group, torch.device("cuda", index))
    return reaches


_reaches_peers._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as ops/dispatch/route.group_rank_of

# MEASURED: of 2 x H200 (benchmarks/results/experts.h200x2.2026-11-29.txt).
LEAST_BYTES = 4 << 20
