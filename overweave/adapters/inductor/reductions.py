"""Fuses a sum over ranks and the matmuls before it into one `matmul_reduce_scatter` or `matmul_all_reduce`.

Sums over ranks are made fewer first: as torch's styles leave them, the gradient of what several column-parallel layers
read is one all-reduce for each layer.

    all_reduce(a) + all_reduce(b)  ->  all_reduce(a + b)
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from overweave.adapters.inductor.agreed import REDUCED, SCATTERED, replace_collectives
from overweave.adapters.inductor.nodes import (
    ATEN,
    COLLECTIVE,
    RESHAPES,
    VARIES,
    Writer,
    has_dtype,
    has_sizes,
    is_call,
    is_same,
    pieces_joined,
    replace,
    value,
)
from overweave.memory.group import process_group_of

PARTS = "overweave_parts"
SCATTER, REDUCE = COLLECTIVE.reduce_scatter_tensor.default, COLLECTIVE.all_reduce.default
LAST_DIMENSION = "the last dimension, which holds columns, is scattered"


class SummedProducts(NamedTuple):
    """A sum of matmuls, and of biases `[n]`, which need not be the same on all ranks: a W-th of one that all have, say,
    which no rank's graph can tell."""

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
    """Replaces a sum over ranks and the matmuls before it. Returns why it stays, or nothing."""
    reduction: Any = wait.args[0]
    scatters = reduction.target is SCATTER
    given, kind, group = reduction.args[0], reduction.args[1], reduction.args[-1]
    ranks = process_group_of(group).size()
    if kind != "sum":
        return f"the reduction {kind!r}"
    if not has_dtype(given) or value(given).dim() < 2:
        return f"operands in {value(given).dtype}, or of one dimension"
    whole: Any = given
    lead: Any = 1
    order: tuple[int, ...] = ()
    joined = pieces_joined(given) if scatters else None
    if joined is not None:
        whole, cut, onto, order = joined
        if onto != 0 or len(given.args[0]) != ranks or not _is_read_once(given):
            return "pieces that are no ranks' parts"
        if cut == value(whole).dim() - 1:
            return LAST_DIMENSION
        lead = prod(value(whole).shape[:cut])
    if not has_sizes(given, lead) or len(reduction.users) > 1:  # sizes are read of it
        return VARIES
    found = summed(whole)
    if found is None:
        return "no matmul stands before it, or others read the product"
    writer = Writer(graph, wait)
    is_laid = is_same(lead, 1) and [*order] == sorted(order)
    xs = [writer.rows(x, () if is_laid else (lead, ranks), ((), order)) for x, _ in found.products]
    ws = [_dense(writer, w) for _, w in found.products]
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
    replace_collectives(y, reduction)
    wait.replace_all_uses_with(writer.shaped(y, wait))
    graph.erase_node(wait)
    graph.erase_node(reduction)
    return ""


def parts_of(reduction: Node, found: SummedProducts) -> list[SumPart]:
    """Of the collectives that a sum over ranks was made of, in order."""
    one = [SumPart(len(found.products), len(found.biases))]
    parts: list[SumPart] = reduction.meta.get(PARTS, one)
    return parts


def summed(node: Any) -> SummedProducts | None:
    """The matmuls whose sum a node is, each of which nothing else reads."""
    if not isinstance(node, Node) or len(node.users) != 1:
        return None
    if is_call(node, *RESHAPES):
        before: Any = node.args[0]
        return summed(before) if is_same(value(before).shape[-1], value(node).shape[-1]) else None
    if is_call(node, ATEN.add.Tensor) and not node.kwargs:
        parts = [summed(each) for each in node.args]
        if any(part is None for part in parts) or not is_same(value(node.args[0]).shape, value(node.args[1]).shape):
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
        if is_same(value(added).shape, value(node).shape):  # Inductor makes this of a sum
            others = summed(added)
            return None if others is None else SummedProducts([*others.products, product], others.biases)
        if is_same(value(added).shape, value(node).shape[1:]):
            return SummedProducts([product], [added])
    return None


def _is_read_once(cat: Any) -> bool:
    """Whether nothing but this cat reads the pieces."""
    parts = cat.args[0]
    return (
        len(cat.users) == 1 and all(len(part.users) == 1 for part in parts) and set(parts[0].args[0].users) == {*parts}
    )


def _dense(writer: Writer, w: Node) -> Node:
    if value(w).is_contiguous() or value(w).t().is_contiguous():
        return w
    return writer.call(ATEN.clone.default, w, memory_format=torch.contiguous_format)


WAIT = COLLECTIVE.wait_tensor.default


def merge_sums(graph: Graph) -> None:
    """Rewrite `all_reduce(a) + all_reduce(b)` of matmuls that nothing else reads."""
    for node in list(graph.nodes):
        if is_call(node, ATEN.add.Tensor) and not node.kwargs and all(map(_is_sum, node.args)):
            _add_before(graph, node)


def _is_sum(wait: Any) -> bool:
    """Whether a node waits for an all-reduce of matmuls, and a single node reads it."""
    if not is_call(wait, WAIT) or not is_call(wait.args[0], REDUCE) or len(wait.users) != 1:
        return False
    if len(wait.args[0].users) != 1:  # sizes are read of it, where they vary
        return False
    given, kind, _ = wait.args[0].args
    return kind == "sum" and summed(given) is not None


def _kind(wait: Any) -> tuple[str, torch.Size]:
    """Return the group and the shape of an all-reduce."""
    return wait.args[0].args[2], value(wait).shape


def _add_before(graph: Graph, node: Any) -> None:
    """Replace `all_reduce(a) + all_reduce(b)` of one group and shape by `all_reduce(a + b)`."""
    left, right = node.args
    (group, shape), (other, other_shape) = _kind(left), _kind(right)
    if left is right or group != other or not is_same(shape, other_shape):
        return
    writer = Writer(graph, node)
    reductions = left.args[0], right.args[0]
    parts = [part for each in reductions for part in _parts(each)]
    merged = writer.call(REDUCE, writer.call(ATEN.add.Tensor, *(each.args[0] for each in reductions)), "sum", group)
    merged.meta[PARTS] = parts
    replace_collectives(merged, *reductions)
    replace(node, writer.call(WAIT, merged))
    for wait in (left, right):
        _erase(graph, wait)


def _parts(reduction: Any) -> list[SumPart]:
    found = summed(reduction.args[0])
    return [] if found is None else parts_of(reduction, found)


def _erase(graph: Graph, wait: Any) -> None:
    """Erase an all-reduce that nothing reads, which torch's dead-code elimination keeps."""
    reduction = wait.args[0]
    graph.erase_node(wait)
    graph.erase_node(reduction)
