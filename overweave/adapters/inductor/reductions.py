"""Fuses a sum over ranks and the matmuls before it into one `matmul_reduce_scatter` or `matmul_all_reduce`.

Sums over ranks are merged first: with torch's styles, the gradient of an input that several column-parallel layers read
is one all-reduce for each layer.

    all_reduce(a) + all_reduce(b)  ->  all_reduce(a + b)
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from overweave.adapters.inductor.agreed import REDUCED, SCATTERED, record_replaced
from overweave.adapters.inductor.nodes import (
    ATEN,
    COLLECTIVE,
    RESHAPES,
    VARIES,
    Writer,
    fake_value,
    has_dtype,
    has_sizes,
    is_call,
    is_same,
    pieces_joined,
    replace,
)
from overweave.memory.group import process_group_of

PARTS = "overweave_parts"
SCATTER, REDUCE = COLLECTIVE.reduce_scatter_tensor.default, COLLECTIVE.all_reduce.default
LAST_DIMENSION = "the last dimension, which holds columns, is scattered"


class SummedProducts(NamedTuple):
    """A sum of matmuls and biases `[n]`. products: (x, w) of each. Biases may differ between ranks, as matmuls do: each
    rank adds its own before the sum over ranks."""

    products: list[tuple[Node, Node]]
    biases: list[Node]


class SumPart(NamedTuple):
    """How many matmuls and biases of a sum belong to one collective of the program."""

    products: int
    biases: int


def reductions(graph: Graph) -> list[Node]:
    """Return the nodes that wait for a reduce-scatter or an all-reduce."""
    found = [node for node in graph.nodes if is_call(node, COLLECTIVE.wait_tensor.default)]
    return [node for node in found if is_call(node.args[0], SCATTER, REDUCE)]


def fuse_reduction(graph: Graph, wait: Node) -> str:
    """Replace a sum over ranks and the matmuls before it by one node. Return why it is not fused; empty if it is."""
    reduction: Any = wait.args[0]
    scatters = reduction.target is SCATTER
    summand, kind, group = reduction.args[0], reduction.args[1], reduction.args[-1]
    ranks = process_group_of(group).size()
    if kind != "sum":
        return f"the reduction {kind!r}"
    if not has_dtype(summand) or fake_value(summand).dim() < 2:
        return f"operands in {fake_value(summand).dtype}, or of one dimension"
    whole: Any = summand
    lead: Any = 1
    order: tuple[int, ...] = ()
    joined = pieces_joined(summand) if scatters else None
    if joined is not None:
        whole, cut, onto, order = joined
        if onto != 0 or len(summand.args[0]) != ranks or not _is_read_once(summand):
            return "pieces that are no ranks' parts"
        if cut == fake_value(whole).dim() - 1:
            return LAST_DIMENSION
        lead = prod(fake_value(whole).shape[:cut])
    if not has_sizes(summand, lead) or len(reduction.users) > 1:  # a second user reads a symbolic size of it
        return VARIES
    found = match_sum(whole)
    if found is None:
        return "no matmul stands before it, or others read the product"
    writer = Writer(graph, wait)
    is_laid = is_same(lead, 1) and [*order] == sorted(order)
    xs = [writer.rows(x, () if is_laid else (lead, ranks), ((), order)) for x, _ in found.products]
    ws = [_dense_weight(writer, w) for _, w in found.products]
    parts = parts_of(reduction, found)
    y = writer.call(
        SCATTERED if scatters else REDUCED,
        xs,
        ws,
        found.biases,
        products=[part.products for part in parts],
        bias_parts=[part.biases for part in parts],
        group_name=group,
        decisions="",
    )
    record_replaced(y, reduction)
    wait.replace_all_uses_with(writer.shaped(y, wait))
    graph.erase_node(wait)
    graph.erase_node(reduction)
    return ""


def parts_of(reduction: Node, found: SummedProducts) -> list[SumPart]:
    """Return, for each collective that was merged into this one, in order, its numbers of matmuls and biases."""
    one = [SumPart(len(found.products), len(found.biases))]
    parts: list[SumPart] = reduction.meta.get(PARTS, one)
    return parts


def match_sum(node: Any) -> SummedProducts | None:
    """Match a node that is a sum of matmuls and biases, none of which another node reads; None for any other."""
    if not isinstance(node, Node) or len(node.users) != 1:
        return None
    if is_call(node, *RESHAPES):
        reshaped: Any = node.args[0]
        return match_sum(reshaped) if is_same(fake_value(reshaped).shape[-1], fake_value(node).shape[-1]) else None
    if is_call(node, ATEN.add.Tensor) and not node.kwargs:
        parts = [match_sum(each) for each in node.args]
        if any(part is None for part in parts) or not is_same(
            fake_value(node.args[0]).shape, fake_value(node.args[1]).shape
        ):
            return None
        both = [part for part in parts if part is not None]
        return SummedProducts(
            [each for part in both for each in part.products], [b for part in both for b in part.biases]
        )
    if is_call(node, ATEN.mm.default):
        return SummedProducts([node.args], [])  # type: ignore[list-item]
    if is_call(node, ATEN.addmm.default) and not node.kwargs:
        added: Any = node.args[0]
        product: Any = node.args[1:]
        if is_same(fake_value(added).shape, fake_value(node).shape):  # Inductor rewrites `sum + mm` so
            others = match_sum(added)
            return None if others is None else SummedProducts([*others.products, product], others.biases)
        if is_same(fake_value(added).shape, fake_value(node).shape[1:]):
            return SummedProducts([product], [added])
    return None


def _is_read_once(cat: Any) -> bool:
    """Whether nothing but this cat reads the pieces."""
    parts = cat.args[0]
    return (
        len(cat.users) == 1 and all(len(part.users) == 1 for part in parts) and set(parts[0].args[0].users) == {*parts}
    )


def _dense_weight(writer: Writer, w: Node) -> Node:
    if fake_value(w).is_contiguous() or fake_value(w).t().is_contiguous():
        return w
    return writer.call(ATEN.clone.default, w, memory_format=torch.contiguous_format)


WAIT = COLLECTIVE.wait_tensor.default


def merge_sums(graph: Graph) -> None:
    """Rewrite `all_reduce(a) + all_reduce(b)` of sums of matmuls that no other node reads, as `all_reduce(a + b)`."""
    for node in list(graph.nodes):
        if is_call(node, ATEN.add.Tensor) and not node.kwargs and all(map(_is_mergeable, node.args)):
            _merge_all_reduces(graph, node)


def _is_mergeable(wait: Any) -> bool:
    """Whether a node waits for an all-reduce of matmuls, and a single node reads it."""
    if not is_call(wait, WAIT) or not is_call(wait.args[0], REDUCE) or len(wait.users) != 1:
        return False
    if len(wait.args[0].users) != 1:  # a second user reads its symbolic size
        return False
    summand, kind, _ = wait.args[0].args
    return kind == "sum" and match_sum(summand) is not None


def _group_and_shape(wait: Any) -> tuple[str, torch.Size]:
    """Return (group, shape) of an all-reduce."""
    return wait.args[0].args[2], fake_value(wait).shape


def _merge_all_reduces(graph: Graph, node: Any) -> None:
    """Replace `all_reduce(a) + all_reduce(b)` of one group and shape by `all_reduce(a + b)`."""
    left, right = node.args
    (group, shape), (other, other_shape) = _group_and_shape(left), _group_and_shape(right)
    if left is right or group != other or not is_same(shape, other_shape):
        return
    writer = Writer(graph, node)
    reductions = left.args[0], right.args[0]
    parts = [part for each in reductions for part in _parts(each)]
    merged = writer.call(REDUCE, writer.call(ATEN.add.Tensor, *(each.args[0] for each in reductions)), "sum", group)
    merged.meta[PARTS] = parts
    record_replaced(merged, *reductions)
    replace(node, writer.call(WAIT, merged))
    for wait in (left, right):
        _erase(graph, wait)


def _parts(reduction: Any) -> list[SumPart]:
    found = match_sum(reduction.args[0])
    return [] if found is None else parts_of(reduction, found)


def _erase(graph: Graph, wait: Any) -> None:
    """Erase an unread all-reduce and its wait, which torch's dead-code elimination keeps."""
    reduction = wait.args[0]
    graph.erase_node(wait)
    graph.erase_node(reduction)
