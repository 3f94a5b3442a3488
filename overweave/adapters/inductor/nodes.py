"""Matches and writes nodes of a graph after Inductor's decompositions. Each node has a FakeTensor as `meta["val"]`.

A collective along any dimension but the first splits a tensor into equal pieces and concatenates them along another
dimension. A program's `split` is one node; its gradient, and that of `chunk`, are slices, which are first rewritten
into a split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from overweave.compat.torch_names import FakeTensorMode, c10d_functional, pytree
from overweave.ops.call.operands import DTYPES

ATEN, COLLECTIVE = torch.ops.aten, c10d_functional
VARIES = "columns vary from call to call, or a size does that no node of the graph has"
VIEWS = frozenset((ATEN.view.default, ATEN.reshape.default, ATEN._unsafe_view.default))
RESHAPES = VIEWS | {ATEN.clone.default}


def fake_value(node: Any) -> torch.Tensor:
    """Return the FakeTensor of a node."""
    found: torch.Tensor = node.meta["val"]
    return found


def is_call(node: Any, *targets: Any) -> bool:
    """Whether a node calls one of these operators."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def has_dtype(node: Any) -> bool:
    """Whether a node has a dtype that overweave multiplies without scales."""
    return isinstance(fake_value(node), torch.Tensor) and fake_value(node).dtype in DTYPES


def is_same(one: Any, other: Any) -> bool:
    """Whether two sizes, or shapes, are statically known to be equal."""
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return statically_known_true(one == other)


def size_node(graph: Graph, size: Any) -> Any:
    """Return a size as an argument of a call: an int, or the node of a symbolic size; None if the graph has none.

    The node depends on other sizes only, so it can be moved before any tensor.
    """
    if not isinstance(size, torch.SymInt):
        return size
    size_nodes = [node for node in graph.nodes if isinstance(node.meta.get("val"), torch.SymInt)]
    same = (node for node in size_nodes if node.meta["val"].node.expr == size.node.expr)
    return next((node for node in same if set(ancestors([node])) <= {*size_nodes}), None)


def has_sizes(node: Any, lead: Any) -> bool:
    """Whether a reshape can be given `lead` and the sizes of a tensor: columns as an int, others as nodes or ints.

    The first symbolic size needs no node, since a reshape infers one size.
    """
    shape: Any = fake_value(node).shape
    *rows, columns = shape
    sizes = [lead, *[size for size in rows if isinstance(size, torch.SymInt)][1:]]
    return not isinstance(columns, torch.SymInt) and all(size_node(node.graph, size) is not None for size in sizes)


def keeps_rows(node: Any, x: Any) -> bool:
    """Whether a node is a reshape of `x` that keeps the last dimension, and so its rows in their order."""
    if not is_call(node, *RESHAPES) or node.args[0] is not x:
        return False
    return fake_value(node).dim() >= 1 and is_same(fake_value(node).shape[-1], fake_value(x).shape[-1])


class Writer:
    """Inserts nodes before one node of a graph, each with its FakeTensor."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self._graph, self._before = graph, before

    def call(self, target: Any, *arguments: Any, **options: Any) -> Node:
        """Insert a call. Raises what the operator's fake kernel raises for these arguments."""
        plain, named = torch.fx.map_arg((arguments, options), fake_value)
        with _mode_of(plain, named):
            result = target(*plain, **named)
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, arguments, options)
        node.meta["val"] = result
        return node

    def rows(self, x: Node, parts: tuple[Any, ...] = (), permutations: Sequence[Sequence[int]] = ()) -> Node:
        """Return x as a contiguous matrix. parts `(a, b)`: its rows `[a, b, rest]` are permuted to `[b, a, rest]`.

        permutations: of the indices of a, and of b, applied before that; empty: none.
        """
        columns = fake_value(x).shape[-1]
        if parts:
            first, second = (size_node(self._graph, part) for part in parts)
            x = self.call(ATEN.reshape.default, x, [first, second, -1, columns])
            for dim, order in enumerate(permutations):
                x = self._reordered(x, dim, order)
            x = self.call(ATEN.permute.default, x, [1, 0, 2, 3])
            x = self.call(ATEN.clone.default, x, memory_format=torch.contiguous_format)
        x = x if fake_value(x).dim() == 2 else self.call(ATEN.reshape.default, x, [-1, columns])
        if fake_value(x).is_contiguous():
            return x
        return self.call(ATEN.clone.default, x, memory_format=torch.contiguous_format)

    def _reordered(self, x: Node, dim: int, order: Sequence[int]) -> Node:
        """Permute the indices of one dimension, by slices and a cat."""
        if [*order] == sorted(order):
            return x
        return self.call(ATEN.cat.default, [self.call(ATEN.slice.Tensor, x, dim, at, at + 1) for at in order], dim)

    def shaped(self, x: Node, like: Node) -> Node:
        """Reshape x to the shape of another node."""
        shape: Any = fake_value(like).shape
        if is_same(fake_value(x).shape, shape):
            return x
        first = next((at for at, size in enumerate(shape) if isinstance(size, torch.SymInt)), None)
        sizes = [-1 if at == first else size_node(self._graph, size) for at, size in enumerate(shape)]
        return self.call(ATEN.reshape.default, x, sizes)

    def item(self, results: Node, index: int) -> Node:
        """Return one of several results."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(getitem, (results, index))
        node.meta["val"] = results.meta["val"][index]
        return node


def replace(node: Node, by: Node) -> None:
    """Replace a node by another, and erase it."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def ancestors(nodes: list[Node]) -> Iterator[Node]:
    """Yield all nodes that these depend on, themselves included."""
    seen: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += node.all_input_nodes


def _mode_of(*values: Any) -> Any:
    """Return the FakeTensorMode of the first fake tensor, else no_grad."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(getattr(leaf, "fake_mode", None), FakeTensorMode):
            return leaf.fake_mode
    return torch.no_grad()


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
    dims = fake_value(x).dim()
    return JoinedPieces(x, cut % dims, joined % dims, order)


def split_slices(graph: Graph) -> None:
    """Rewrite slices into a split, if they are all equal pieces of a tensor and their cat is next to a collective."""
    for node in list(graph.nodes):
        order = _order_of_slices(node.args[0]) if is_call(node, CAT) and _is_next_to_collective(node) else ()
        if order:
            parts: Any = tuple(node.args[0])
            x, dim = parts[0].args[:2]
            writer = Writer(graph, node)
            pieces = writer.call(SPLIT, x, size_node(graph, fake_value(parts[0]).shape[dim]), dim)
            for at, part in zip(order, parts, strict=True):
                replace(part, writer.item(pieces, at))


def _is_next_to_collective(cat: Node) -> bool:
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
    size, starts = fake_value(parts[0]).shape[dim], [_argument_value(part.args[2]) for part in parts]
    is_alike = all(part.args[:2] == (x, dim) and is_same(fake_value(part).shape[dim], size) for part in parts)
    if not is_alike or not is_same(fake_value(x).shape[dim], len(parts) * size) or size_node(x.graph, size) is None:
        return ()
    indices = range(len(parts))
    order = tuple(next((at for at in indices if is_same(begin, at * size)), -1) for begin in starts)
    return order if sorted(order) == [*indices] else ()


def _argument_value(size: Any) -> Any:
    """Return the value of an argument: an int, or that of its node."""
    return fake_value(size) if isinstance(size, Node) else size
