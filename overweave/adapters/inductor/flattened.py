"""Rewrites the products of `einsum` into those of `linear`: a matmul of two matrices between reshapes.

    unsqueeze, permute of dimensions of size 1 -> reshape        reshape of a reshape -> one reshape
    bmm of a batch of one                      -> mm

The other passes match only this form.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph

from overweave.adapters.inductor.nodes import ATEN, VIEWS, Writer, has_sizes, is_call, is_same, replace, value

SINGLE = frozenset((ATEN.unsqueeze.default, ATEN.squeeze.dim, ATEN.squeeze.dims))


def flatten_products(graph: Graph) -> None:
    """Rewrite matmuls of a batch of one, and the reshapes of their operands and results."""
    products = [node for node in graph.nodes if is_call(node, ATEN.bmm.default) and _is_single(node)]
    for node in products:
        _bmm_to_mm(graph, node)
    for node in list(graph.nodes) if products else ():
        if _is_reshape(node) and _is_reshape(node.args[0]) and has_sizes(node, 1):
            root = node.args[0]
            while _is_reshape(root):
                root = root.args[0]
            replace(node, Writer(graph, node).shaped(root, node))
    if products:
        graph.eliminate_dead_code()  # dead reshapes would count as readers


def _is_single(bmm: Any) -> bool:
    """Whether the batch is one, and the sizes of both factors can be arguments of a reshape."""
    return is_same(value(bmm).shape[0], 1) and all(has_sizes(factor, 1) for factor in bmm.args)


def _bmm_to_mm(graph: Graph, bmm: Any) -> None:
    """Replace `bmm(a, b)` by `unsqueeze(mm(squeeze(a, 0), squeeze(b, 0)), 0)`."""
    writer = Writer(graph, bmm)
    factors = [writer.call(ATEN.squeeze.dim, factor, 0) for factor in bmm.args]
    replace(bmm, writer.call(ATEN.unsqueeze.default, writer.call(ATEN.mm.default, *factors), 0))


def _is_reshape(node: Any) -> bool:
    """Whether a node is a view that keeps the order of its input's elements."""
    if is_call(node, ATEN.permute.default):
        shape = value(node.args[0]).shape
        moved = [at % len(shape) for at in node.args[1] if not is_same(shape[at], 1)]
        return moved == sorted(moved)
    return is_call(node, *VIEWS, *SINGLE)
