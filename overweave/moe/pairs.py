"""The two matmuls of experts on one rank: of every token with each of its experts, and back to tokens.

h, routed = experts_matmul(x, topk_ids, gate_up, glu=Glu())    # [t, k] -> [t * top, n], sorted by expert
y = experts_sum(h, routed, topk_weights, down)                   # -> [t, k]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from overweave.errors import InputError
from overweave.ir.operators.forms import GATE
from overweave.moe.checks import check_bias, check_routing, check_rows, check_scale, check_weights
from overweave.moe.fp8 import quantise_rows
from overweave.moe.glu import Glu, check_glu, gate_and_up, gated
from overweave.moe.grouped import grouped_matmul
from overweave.moe.routing import Routing, as_ids, route
from overweave.moe.slots import ordered_sum
from overweave.runtime.library.library import without_autocast


class RoutedTokens(NamedTuple):
    """Tokens and their experts. topk_ids: int32 `[t, top]`. tables: which row each pair has, sorted by expert."""

    topk_ids: torch.Tensor
    tables: Routing

    @property
    def offsets(self) -> torch.Tensor:
        """Where the rows of each expert begin, and the last one's end: int32 `[experts + 1]`, on the device."""
        return self.tables.offsets

    @property
    def has_expert(self) -> torch.Tensor:
        """`[t, top]`: whether a slot names an expert."""
        return (self.topk_ids >= 0) & (self.topk_ids < self.tables.counts.shape[0])


TokensExperts = torch.Tensor | RoutedTokens  # what callers pass: topk_ids, or what a call returned
FactorLike = Sequence[torch.Tensor | None]  # the fields of a `Factor`


class Factor(NamedTuple):
    """The weights of experts `[experts, n, k]`, their biases and, of fp8, their scales, `[experts, n]` both."""

    w: torch.Tensor
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None


def experts_matmul(
    x: torch.Tensor,
    topk_ids: TokensExperts,
    w: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
    glu: Glu | None = None,
    topk_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, RoutedTokens]:
    """h = each token times the weight of each of its experts, sorted by expert; and which row is whose.

    Plain torch:  pairs = topk_ids.flatten().argsort(stable=True)
                  h[row] = F.linear(x[pairs[row] // top], w[expert of row], bias[expert of row])

    x: `[t, k]`, bf16, fp16 or fp32. topk_ids: int32 or int64 `[t, top]`; -1 is no expert. Or what another call
    returned for these tokens. w: `[experts, n, k]`, as Transformers packs them, in either memory layout; in x's dtype,
    or in fp8 with scale_w `[experts, n]`, both as `quantise_rows(w)` returns them: then rows of x are quantised alike,
    `quantise_rows(x)`, and products are scaled by both. bias: `[experts, n]`. glu: of w that packs two weights: then h
    is `[t * top, n / 2]`, gated. topk_weights: `[t, top]`, by which a token is multiplied before its expert sees it;
    None, as most models have it: they weigh what comes out. Returns h `[t * top, n]`. Rows behind the last offset
    belong to pairs without an expert, and hold anything. Sizes follow from shapes alone: on a GPU the host looks at no
    id.

    Gradients: of x, w, bias and topk_weights. Raises InputError for arguments it cannot take. On a GPU an id that is no
    expert's is none, and `tables.reason` says so.
    """
    ids = topk_ids.topk_ids if isinstance(topk_ids, RoutedTokens) else topk_ids
    check_first("experts_matmul", x, ids, topk_weights, ((w, bias, scale_w), glu))
    routed = topk_ids if isinstance(topk_ids, RoutedTokens) else routed_tokens(topk_ids, w.shape[0])
    return multiplied(x, routed, topk_weights, (w, bias, scale_w), glu), routed


def experts_sum(
    h: torch.Tensor,
    topk_ids: TokensExperts,
    topk_weights: torch.Tensor | None,
    w: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale_w: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = each token's `top` products, weighed and added in the order in which topk_ids names their experts.

    Plain torch:  z[pairs[row]] = F.linear(h[row], w[expert of row], bias[expert of row]) for each row
                  y = (z.view(t, top, n) * topk_weights[..., None]).sum(1)

    h: `[t * top, k]`, rows sorted by expert, as `experts_matmul` returns them. topk_ids: what it returned with h, or
    `[t, top]`. topk_weights: `[t, top]`; None: products are added as they are. w: `[experts, n, k]`, in either layout.
    bias: `[experts, n]`. scale_w: of w in fp8, as of `experts_matmul`: rows of h are quantised. Returns `[t, n]`:
    products are rounded; those of a token are weighed and added in fp32, and rounded once. A slot without an expert
    adds nothing, and its product is not read.

    Gradients: of h, w, bias and topk_weights. Raises InputError for arguments it cannot take.
    """
    ids = topk_ids.topk_ids if isinstance(topk_ids, RoutedTokens) else topk_ids
    check_second("experts_sum", h, ids, topk_weights, (w, bias, scale_w))
    routed = topk_ids if isinstance(topk_ids, RoutedTokens) else routed_tokens(topk_ids, w.shape[0])
    return added(h, routed, topk_weights, (w, bias, scale_w))


def check_first(
    name: str,
    x: object,
    ids: object,
    topk_weights: object,
    factors: tuple[tuple[object, object, object], object],
    least: int = 1,
) -> None:
    """The operands of the first matmul. factors: of a `Factor`, and the glu. least: experts. Raises InputError."""
    (w, bias, scale), glu = factors
    check_rows(name, x)
    assert isinstance(x, torch.Tensor)
    check_routing(name, x.shape[0], ids, topk_weights)
    check_weights(name, x, w, bias, scale, least)
    assert isinstance(w, torch.Tensor)
    check_glu(name, glu, w.shape[1])


def check_second(
    name: str,
    h: object,
    ids: object,
    topk_weights: object,
    factors: tuple[object, object, object],
    tokens: int | None = None,
) -> None:
    """The operands of the second matmul. tokens: of all ranks, where ids are those of one. Raises InputError."""
    check_rows(name, h, "h")
    assert isinstance(h, torch.Tensor)
    check_routing(name, ids.shape[0] if isinstance(ids, torch.Tensor) and ids.dim() == 2 else 0, ids, topk_weights)
    assert isinstance(ids, torch.Tensor)
    tokens = ids.shape[0] if tokens is None else tokens
    if h.shape[0] != tokens * ids.shape[1]:
        found, cure = f"h has {h.shape[0]} rows", "Pass h as the first matmul returned it"
        raise InputError(f"{name}: {tokens} tokens of {ids.shape[1]} experts each", found, cure)
    check_weights(name, h, *factors)


def check_down(name: str, weights: tuple[object, ...], scale: object) -> None:
    """Check the second weights of a layer, whose first ones are checked already. weights: up, down, their biases and
    the glu. scale: of down in fp8. Raises InputError."""
    up, down, _, bias, glu = weights
    assert isinstance(up, torch.Tensor)
    experts, n, k = up.shape
    wanted = [experts, k, n if glu is None else n // 2]
    if not isinstance(down, torch.Tensor) or list(down.shape) != wanted or down.dtype != up.dtype:
        found = (
            f"got {down.dtype} {list(down.shape)}" if isinstance(down, torch.Tensor) else f"got {type(down).__name__}"
        )
        raise InputError(f"{name}: down {wanted} in {up.dtype}", found, "Pass the second weights of the same experts")
    check_scale(f"{name}: down_scale", down, scale)
    check_bias(f"{name}: down_bias", bias, wanted[:2], "Pass a row of floats for each expert, alike on all ranks")


def routed_tokens(topk_ids: torch.Tensor, experts: int) -> RoutedTokens:
    """Tokens with their tables. Raises InputError on a CPU for ids that are no expert's."""
    ids = as_ids(topk_ids)
    return RoutedTokens(ids, route(ids, experts))


def multiplied(
    x: torch.Tensor, routed: RoutedTokens, weights: torch.Tensor | None, factors: FactorLike, glu: Glu | None
) -> torch.Tensor:
    """The first matmul. weights: on its input. factors: as of a `Factor`."""
    tables, (w, scale, given) = routed.tables, first_factors(factors, glu)
    is_gated = GATE in given
    if weights is not None:
        weighed = x.index_select(0, tables.tokens) * _of_rows(weights, routed).unsqueeze(1)
        x = torch.where(_is_row(routed).unsqueeze(1), weighed, 0.0).to(x.dtype)
    else:
        given["rows"] = tables.tokens
    x, w = _quantised(x, w, scale, given)
    h = grouped_matmul(x, w, tables.offsets[1:], **given)
    return h if glu is None or is_gated else gated(h, glu)


def first_factors(factors: FactorLike, glu: Glu | None) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]:
    """The first weight as `grouped_matmul` takes it, its scale, and what goes with it: a glu as its gate, unless
    columns of either weight would have to be copied together."""
    w, bias, scale = Factor(*factors)  # type: ignore[arg-type]
    if glu is None or (w.stride(2) != 1 and glu.interleaved):
        return w.transpose(1, 2), scale, {"bias": bias}
    gate, up = gate_and_up(w.transpose(1, 2), glu)
    with without_autocast():  # which has no rule for a stack of fp16 on a CPU
        bias, scale = (None if each is None else torch.stack(gate_and_up(each, glu)[::-1], 1) for each in (bias, scale))
    return up, scale, {GATE: gate, "activation": glu.activation, "gating": glu.gating, "bias": bias}


def added(h: torch.Tensor, routed: RoutedTokens, weights: torch.Tensor | None, factors: FactorLike) -> torch.Tensor:
    """The second matmul, and the sum over the experts of a token. factors: as of a `Factor`."""
    w, bias, scale = Factor(*factors)  # type: ignore[arg-type]
    given: dict[str, Any] = {"bias": bias}
    tables, (h, w) = routed.tables, _quantised(h, w.transpose(1, 2), scale, given)
    products = grouped_matmul(h, w, tables.offsets[1:], **given)
    return ordered_sum(products, tables.places, tables.offsets, weights, routed.topk_ids.shape[1])


def _quantised(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor | None, given: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and w as they are multiplied: where w is fp8, rows of x are quantised, and `given` gets both scales."""
    if scale is None:
        return x, w
    values, scale_x = quantise_rows(x)
    given |= {"scale_x": scale_x, "scale_w": scale, "out_dtype": x.dtype}
    return values, w


def _of_rows(weights: torch.Tensor, routed: RoutedTokens) -> torch.Tensor:
    """The weight of each row: 0 of rows without an expert, whatever stands there, and so is its gradient."""
    return torch.where(routed.has_expert, weights.float(), 0.0).flatten().index_select(0, routed.tables.order)


def _is_row(routed: RoutedTokens) -> torch.Tensor:
    """Whether a row has an expert."""
    order = routed.tables.order
    return torch.arange(order.shape[0], device=order.device) < routed.offsets[-1]


def with_bias(y: torch.Tensor, experts: tuple[torch.Tensor, torch.Tensor | None], bias: torch.Tensor) -> torch.Tensor:
    """y and the weighed biases of each token's experts: in fp32, rounded once. experts: ids and weights, `[t, top]`."""
    ids, weights = experts
    is_there = (ids >= 0) & (ids < bias.shape[0])
    of_slots = bias.float()[torch.where(is_there, ids, 0)]
    if weights is not None:
        of_slots = of_slots * weights.float().unsqueeze(2)
    total = y.float()
    for slot in range(ids.shape[1]):
        total = total + torch.where(is_there[:, slot, None], of_slots[:, slot], 0.0)
    return total.to(y.dtype)
