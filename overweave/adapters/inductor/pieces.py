"""Tensors that are split into equal pieces and concatenated along another dimension.

A collective along the first dimension needs this for any other dimension. A program's `split` is one node; its
gradient, and that of `chunk`, are slices, which are rewritten into a split first.
"""

from __future__ import annotations

from operator import getitem
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from overweave.adapters.inductor.nodes import ATEN, COLLECTIVE, Writer, is_call, is_same, replace, size_node, value

SLICE, SPLIT, CAT = ATEN.slice.Tensor, ATEN.split.Tensor, ATEN.cat.default


def is_even(split: Any, count: int) -> bool:
    """Whether a split has `count` pieces of one size."""
    pieces = split.meta["val"]
    return len(pieces) == count and is_same(pieces[0].shape, pieces[-1].shape)


class JoinedPieces(NamedTuple):
    """`cat(split(x, size, cut), onto)`. order: the indices of the concatenated pieces."""

    x: Node
    cut: int
    onto: int
    order: tuple[int, ...]


def pieces_joined(cat: Any) -> JoinedPieces | None:
    """Match a cat of all pieces of one split, each taken once; None for any other node."""
    if not is_call(cat, CAT):
        return None
    parts, joined = cat.args[0], cat.args[1] if len(cat.args) > 1 else 0
    if not parts or not all(is_call(part, getitem) for part in parts):
        return None
    split, order = parts[0].args[0], tuple(part.args[1] for part in parts)
    if not is_call(split, SPLIT) or any(part.args[0] is not split for part in parts):
        return None
    if sorted(order) != [*range(len(parts))] or not is_even(split, len(parts)):
        return None
    x, cut = split.args[0], split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    dims = value(x).dim()
    return JoinedPieces(x, cut % dims, joined % dims, order)


def split_slices(graph: Graph) -> None:
    """Rewrite slices that are all pieces of one tensor, concatenated beside a collective, into a split."""
    for node in list(graph.nodes):
        order = _order_of_slices(node.args[0]) if is_call(node, CAT) and _is_beside_collective(node) else ()
        if order:
            parts: Any = tuple(node.args[0])
            x, dim = parts[0].args[:2]
            writer = Writer(graph, node)
            pieces = writer.call(SPLIT, x, size_node(graph, value(parts[0]).shape[dim]), dim)
            for at, part in zip(order, parts, strict=True):
                replace(part, writer.item(pieces, at))


def _is_beside_collective(cat: Node) -> bool:
    """Whether the slices are of a collective's result, or a reduce-scatter reads the cat."""
    parts: Any = cat.args[0]
    x = parts[0].args[0] if parts and is_call(parts[0], SLICE) else None
    return is_call(x, COLLECTIVE.wait_tensor.default) or any(
        is_call(user, COLLECTIVE.reduce_scatter_tensor.default) for user in cat.users
    )


def _order_of_slices(parts: Any) -> tuple[int, ...]:
    """Return the index of each slice, if they are equal and together all of one tensor; else ()."""
    if not parts or not all(is_call(part, SLICE) and len(part.args) == 4 and not part.kwargs for part in parts):
        return ()
    x, dim = parts[0].args[:2]
    size, begins = value(parts[0]).shape[dim], [_argument_value(part.args[2]) for part in parts]
    is_alike = all(part.args[:2] == (x, dim) and is_same(value(part).shape[dim], size) for part in parts)
    if not is_alike or not is_same(value(x).shape[dim], len(parts) * size) or size_node(x.graph, size) is None:
        return ()
    places = range(len(parts))
    order = tuple(next((at for at in places if is_same(begin, at * size)), -1) for begin in begins)
    return order if sorted(order) == [*places] else ()


def _argument_value(size: Any) -> Any:
    """Return the value of an argument: an int, or that of its node."""
    return value(size) if isinstance(size, Node) else size
