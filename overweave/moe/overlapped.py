"""Tensor-parallel experts whose communication hides behind their matmuls: `plan="per_shard"`.

Which rows a shard's experts have, the device knows alone: sizes of buffers, copies and signals follow from shapes
(moe/programs.py), and an expert without rows of a shard multiplies nothing. One program, proven once, serves every
routing.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from overweave.errors import InputError
from overweave.ir.shards import shard_rows
from overweave.ir.verify.plan import verify_schedule
from overweave.memory.group import LIVE_GROUPS, Group
from overweave.moe.collectives import WHERE, agreed
from overweave.moe.glu import Glu
from overweave.moe.grouped import grouped_outer
from overweave.moe.pairs import RoutedTokens, added, multiplied, routed_tokens, with_bias
from overweave.moe.programs import BUFFERS, Sizes, schedule_of, write_chain, write_gather, write_scatter
from overweave.moe.slots import ordered_sum
from overweave.moe.torch_ops import TorchOp, define
from overweave.ops.author.tile_program import TileProgram
from overweave.ops.call.groups import group_of, refuse
from overweave.runtime.backends import load
from overweave.runtime.handwritten import OwnBuffer
from overweave.runtime.library import grouped as reference
from overweave.runtime.library.grouped import Grouped, aligned

MOST_PROGRAMS = 64  # of one group; each leases symmetric memory
COLUMNS_STEP = 8  # elements: rows of whole words of 16 bytes


class _Built(NamedTuple):
    """A program, and which kernels of its calls are loaded."""

    program: TileProgram
    loaded: set[object]


_PROGRAMS: dict[dist.ProcessGroup, dict[tuple[str, Sizes, torch.device], _Built]] = {}
atexit.register(_PROGRAMS.clear)  # a process group must not outlive the interpreter


class Overlapped(NamedTuple):
    """A call on one rank: its group, and its sizes."""

    group: Group
    sizes: Sizes

    def program(
        self, kind: str, where: tuple[torch.device, object], load_kernels: Callable[[OwnBuffer], object]
    ) -> TileProgram:
        """Proven and built when a signature is first called, by all ranks. Raises RankMismatch where they differ.

        where: the device, and what decides which kernels a call has. load_kernels: computes on any symmetric buffers:
        on a GPU, loading may wait for kernels that wait for peers, so that it is done before the first call.
        """
        for gone in [each for each in _PROGRAMS if each not in LIVE_GROUPS]:
            del _PROGRAMS[gone]
        known, (device, kernels) = _PROGRAMS.setdefault(self.group.process_group, {}), where
        key = (kind, self.sizes, device)
        if key not in known:
            if len(known) >= MOST_PROGRAMS:
                known.pop(next(iter(known)))
            if self.sizes.m:
                verify_schedule(schedule_of(kind, self.sizes, COLUMNS_STEP)).raise_if_refused()
            buffers, channels = BUFFERS[kind](self.sizes)
            program = TileProgram(buffers, channels, self.group.process_group, device, has_kernels=False)
            known[key] = _Built(program, set())
        built = known[key]
        if device.type == "cuda" and kernels not in built.loaded and not torch.cuda.is_current_stream_capturing():
            scratch = BUFFERS[kind](self.sizes)[0]
            own = {
                name: torch.zeros(each.rows, each.cols, dtype=each.dtype, device=device)
                for name, each in scratch.items()
            }
            load_kernels(own.__getitem__)
            torch.cuda.synchronize(device)
            built.loaded.add(kernels)
        return built.program


def obstacle(x: torch.Tensor, columns: int) -> str:
    """Why rows of x, and results of so many columns, cannot travel this way; empty if they can."""
    if columns % COLUMNS_STEP or x.shape[1] % COLUMNS_STEP:
        return f"rows of {x.shape[1]} and {columns} elements are no whole words of 16 bytes"
    return ""


def gathered_products(
    of: Overlapped, x: torch.Tensor, ids: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor | None], keeps: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """h, sorted by expert, the experts of all tokens, and all tokens if somebody keeps them, else none."""
    (w, bias), sizes = factors, of.sizes
    experts, n, _ = w.shape
    h = x.new_empty((sizes.m * sizes.top, n))
    every = ids.new_empty((sizes.m, sizes.top))
    kept = x.new_empty((sizes.m if keeps else 0, x.shape[1]))
    routed: list[RoutedTokens] = []

    def route(own: OwnBuffer) -> None:
        every.copy_(own("experts")[: sizes.m])
        routed.append(routed_tokens(every, experts))

    def multiply(source: int, own: OwnBuffer) -> None:
        low, high = sizes.rows(source)
        if low == high:
            return
        tokens = own("tokens")[low:high]
        if keeps:
            kept[low:high] = tokens
        part = routed_tokens(every[low:high], experts).tables
        pairs = routed[-1].tables.places[low * sizes.top : high * sizes.top]
        places = pairs.index_select(0, part.order)
        _multiply_into(h, _call(tokens, w, part.offsets, bias=bias, rows=part.tokens, into=places))

    def load_kernels(own: OwnBuffer) -> None:
        route(own)
        for source in range(sizes.ranks):
            multiply(source, own)

    program = of.program("gather", (x.device, ("gather", experts, n, bias is None)), load_kernels)
    with program.call() as call:
        write_gather(call, sizes, (x, ids), route, multiply)
        call.rank_void(h)
    return h, every, kept


def scattered_sums(
    of: Overlapped, h: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, w: torch.Tensor
) -> torch.Tensor:
    """This rank's tokens of the sum over ranks, whose parts are added in fp32 in the order of ranks."""
    (group, sizes), (experts, n, k) = of, w.shape
    places = routed_tokens(ids, experts).tables.places
    low, high = sizes.rows(group.rank)
    y = h.new_empty((high - low, n))

    def compute(owner: int, target: torch.Tensor) -> None:
        low, high = sizes.rows(owner)
        if low == high:
            return
        part = routed_tokens(ids[low:high], experts)
        rows = places[low * sizes.top : high * sizes.top].index_select(0, part.tables.order)
        of_rows = None
        if weights is not None:
            own = torch.where(part.has_expert, weights[low:high], 0.0)
            of_rows = own.flatten().index_select(0, part.tables.order)
        products = h.new_empty(((high - low) * sizes.top, n))
        call = _call(h, w, part.tables.offsets, rows=rows, into=part.tables.order, row_weights=of_rows)
        _multiply_into(products, call)
        target.copy_(ordered_sum(products.view(high - low, sizes.top, n), part.has_expert))

    add = partial(_add_landed, sizes, y)

    def load_kernels(own: OwnBuffer) -> None:
        for owner in range(sizes.ranks):
            compute(owner, own("parts")[slice(*sizes.rows(owner))])
        add(own)

    program = of.program("scatter", (h.device, ("scatter", experts, k, weights is None)), load_kernels)
    with program.call() as call:
        write_scatter(call, sizes, compute, add)
        call.rank_void(y)
    return y


def _add_landed(sizes: Sizes, y: torch.Tensor, own: OwnBuffer) -> None:
    """The parts of all ranks, in fp32, in the order of ranks, rounded once."""
    landed = own("landed").view(sizes.ranks, sizes.shard, y.shape[1])[:, : y.shape[0]]
    y.copy_(ordered_sum(landed.transpose(0, 1)))


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
        """The experts of tokens as this rank numbers its own; -1 for others."""
        if self.first is None:
            return ids
        own = ids - self.first
        return torch.where((own >= 0) & (own < self.up.shape[0]), own, -1)

    def sums(self, x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """What this rank adds to each token of x, but for biases that its owner adds."""
        if not self.up.shape[0]:  # a rank without experts: nothing, of which its peers' gradients still hear
            heard = x[:, :0].sum(1, keepdim=True) + topk_weights[:, :0].sum(1, keepdim=True).to(x.dtype)
            return x.new_zeros(x.shape) + heard
        ids = self.own_ids(ids)
        routed = routed_tokens(ids, self.up.shape[0])
        h = multiplied(x, routed, None, (self.up, self.up_bias, self.up_scale), self.glu)
        part = added(h, routed, topk_weights, self.down, self.down_scale)
        if self.first is None or self.down_bias is None:
            return part
        return with_bias(part, (ids, topk_weights), self.down_bias)


def chained(
    of: Overlapped, x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor, weights: ExpertWeights
) -> torch.Tensor:
    """A whole layer but for the second biases: this rank's tokens of the sum over ranks."""
    sizes = of.sizes
    y = x.new_empty((x.shape[0], sizes.columns))
    slots = torch.cat([ids, topk_weights.float().contiguous().view(torch.int32)], 1)

    def compute(owner: int, own: OwnBuffer, target: torch.Tensor) -> None:
        low, high = sizes.rows(owner)
        if low == high:
            return
        of_shard = own("slots")[low:high]
        ids, of_tokens = (each.contiguous() for each in of_shard.split(sizes.top, 1))
        target.copy_(weights.sums(own("tokens")[low:high], ids, of_tokens.view(torch.float32)))

    add = partial(_add_landed, sizes, y)

    def load_kernels(own: OwnBuffer) -> None:
        for owner in range(sizes.ranks):
            compute(owner, own, own("parts")[slice(*sizes.rows(owner))])
        add(own)

    kernels = ("chain", *(None if each is None else each.shape for each in weights[:4]), weights.glu)
    program = of.program("chain", (x.device, kernels), load_kernels)
    with program.call() as call:
        write_chain(call, sizes, (x, slots), compute, add)
        call.rank_void(y)
    return y


def overlapped_in(group_name: str, m: int, top: int, columns: int, dtype: torch.dtype) -> Overlapped:
    """A call in a group. columns: of what travels."""
    group = group_of(group_name)
    return Overlapped(group, Sizes(m, columns, top, dtype, group.world_size))


def _call(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, **beside: Any) -> Grouped:
    names = ("bias", "rows", "into", "row_weights")
    given = {**dict.fromkeys(names), **beside}
    nothing = {"gate": None, "activation": "", "scale_x": None, "scale_w": None, "out_dtype": x.dtype}
    return Grouped(x=x, w=w.transpose(1, 2), offs=offsets[1:], **nothing, **given)  # type: ignore[arg-type]


def _multiply_into(out: torch.Tensor, call: Grouped) -> None:
    """Stores rows of a product where `into` says, and leaves the others."""
    if out.is_cuda:
        load("gpu grouped into")(out, aligned(call))
        return
    assert call.into is not None
    count = int(call.offs[-1])
    products = reference.multiply(call._replace(into=None))
    out[call.into[:count].long()] = products[:count]


def _check_ids(group_name: str, ids: torch.Tensor, experts: int) -> None:
    """On a CPU, where peers are told of ids that are no expert's before anything travels. Raises InputError."""
    if ids.is_cuda or not bool(((ids < -1) | (ids >= experts)).any()):
        return
    found, cure = f"they are {int(ids.min())} to {int(ids.max())}", "Pass experts, or -1 for none"
    raise refuse(group_of(group_name), InputError(f"topk_ids below {experts}", found, cure))


def _gathered(
    x: torch.Tensor,
    ids: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    m: int,
    keeps: bool,
    group_name: str,
    told: str,
    place: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_ids(group_name, ids, w.shape[0])
    agreed(group_name, f"{told} by {PER_SHARD}", lambda group: None)
    of = overlapped_in(group_name, m, ids.shape[1], x.shape[1], x.dtype)
    return gathered_products(of, x.contiguous(), ids.contiguous(), (w, bias), keeps)


def _gathered_fake(
    x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m, top = options["m"], ids.shape[1]
    kept = x.new_empty((m if options["keeps"] else 0, x.shape[1]))
    return x.new_empty((m * top, w.shape[1])), ids.new_empty((m, top)), kept


def _scattered(
    h: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    w: torch.Tensor,
    *,
    group_name: str,
    told: str,
    place: list[int],
) -> torch.Tensor:
    agreed(group_name, f"{told} by {PER_SHARD}", lambda group: None)
    of = overlapped_in(group_name, ids.shape[0], ids.shape[1], w.shape[1], h.dtype)
    return scattered_sums(of, h.contiguous(), ids.contiguous(), weights, w)


def _scattered_fake(
    h: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, w: torch.Tensor, **options: Any
) -> torch.Tensor:
    rank, ranks = options["place"]
    m = ids.shape[0]
    low, high = (0, m // ranks) if m % ranks == 0 else shard_rows(m, ranks, rank)
    return h.new_empty((high - low, w.shape[1]))


def _keep_gathered(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    _, _, w, bias = inputs
    _, ids, x = output
    ctx.save_for_backward(ids, x, w)
    ctx.mark_non_differentiable(ids, x)
    ctx.has_bias, ctx.options = bias is not None, dict(keyword_only_inputs)


def _gathered_gradient(ctx: Any, dh: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    """That of x by the other operator, those of weights by groups."""
    ids, x, w = ctx.saved_tensors
    needs_x, _, needs_w, needs_bias = ctx.needs_input_grad
    dx = dw = dbias = None
    dh = dh.contiguous()
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


def _keep_scattered(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    h, ids, weights, w = inputs
    ctx.save_for_backward(h, ids, w, *([] if weights is None else [weights]))
    ctx.options = dict(keyword_only_inputs)


def _scattered_gradient(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    """That of h by the other operator: each row's before it is weighed; the others follow from it, and by groups."""
    h, ids, w, *weights = ctx.saved_tensors
    needs_h, _, needs_weights, needs_w = ctx.needs_input_grad
    rank, ranks = ctx.options["place"]
    m = ids.shape[0]
    low, high = shard_rows(m, ranks, rank)
    options = _of_gradients(ctx.options) | {"m": m, "keeps": needs_w}
    own, dy = ids[low:high].contiguous(), dy.contiguous()
    raw, _, g = torch.ops.overweave.gathered_experts(dy, own, w.transpose(1, 2), None, **options)
    routed = routed_tokens(ids, w.shape[0])
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
        _check_ids(group_name, ids, up.shape[0])
    agreed(group_name, f"{told} by {PER_SHARD}", lambda group: None)
    of = overlapped_in(group_name, m, ids.shape[1], down.shape[1], x.dtype)
    weights = ExpertWeights(up, down, up_bias, down_bias, _glu_of(glu), first)
    return chained(of, x.contiguous(), ids.contiguous(), topk_weights, weights)


def _chained_fake(
    x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor, *_: Any, **options: Any
) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def glu_word(glu: Glu | None) -> str:
    """A glu in the text of an op's call; a compiler reads this, too."""
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
    f"(Tensor x, Tensor ids, Tensor w, Tensor? bias, *, SymInt m, bool keeps, {WHERE}) -> (Tensor, Tensor, Tensor)"
)
_SCATTERED = f"(Tensor h, Tensor ids, Tensor? weights, Tensor w, *, {WHERE}) -> Tensor"
for _op in (
    TorchOp("chained_experts", _CHAINED, _chained, _chained_fake),
    TorchOp("gathered_experts", _GATHERED, _gathered, _gathered_fake, _gathered_gradient, _keep_gathered),
    TorchOp("scattered_experts", _SCATTERED, _scattered, _scattered_fake, _scattered_gradient, _keep_scattered),
):
    define(_op)


def choose(name: str, plan: str | None, reason: str) -> str:
    """The plan of a call: what is asked, or what no measurement speaks against. reason: why it cannot be per_shard.
    Raises InputError for a plan that cannot run."""
    if plan is None:
        return SEQUENTIAL
    if plan not in PLANS:
        raise InputError(f"{name} with plan {plan[:40]!r}", "there is no such plan", f"Use one of {', '.join(PLANS)}")
    if plan == PER_SHARD and reason:
        raise InputError(f"{name} with plan {plan!r}", reason, "Leave the choice to overweave")
    return plan


SEQUENTIAL, PER_SHARD = "sequential", "per_shard"
PLANS = (SEQUENTIAL, PER_SHARD)
