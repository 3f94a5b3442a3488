"""Sums over ranks made fewer and smaller before they are fused with their matmuls: as torch's styles leave them, the
gradient of what several column-parallel layers read is one all-reduce for each layer.

    all_reduce(a) + all_reduce(b)  ->  all_reduce(a + b)
    all_reduce(a).split(..)[rank]  ->  reduce_scatter(a)      in backward graphs alone

In a forward graph a program may read the same rows on all ranks, which are one rank's own by chance: the graphs of
ranks would then differ.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch.fx import Graph

from overweave.adapters.inductor.nodes import ATEN, COLLECTIVE, Writer, is_call, is_same, replace, value
from overweave.adapters.inductor.pieces import is_even
from overweave.adapters.inductor.reductions import REDUCE, SCATTER, summed
from overweave.memory.group import process_group_of

WAIT = COLLECTIVE.wait_tensor.default
GRADIENTS = "tangents"  # how torch names what a backward graph is given


def merge_sums(graph: Graph) -> None:
    """Rewrites sums over ranks of matmuls, which nothing else reads."""
    for node in list(graph.nodes):
        if is_call(node, ATEN.add.Tensor) and not node.kwargs and all(map(_is_sum, node.args)):
            _add_before(graph, node)
    if any(node.op == "placeholder" and node.name.startswith(GRADIENTS) for node in graph.nodes):
        for node in list(graph.nodes):
            if is_call(node, ATEN.split.Tensor) and len(node.users) == 1 and _is_sum(node.args[0]):
                _scatter(graph, node)


def _is_sum(wait: Any) -> bool:
    """Whether a node waits for a sum over ranks of matmuls, which one node reads."""
    if not is_call(wait, WAIT) or not is_call(wait.args[0], REDUCE) or len(wait.users) != 1:
        return False
    if len(wait.args[0].users) != 1:  # sizes are read of it, where they vary
        return False
    given, kind, group = wait.args[0].args
    return kind == "sum" and summed(given, process_group_of(group).size()) is not None


def _kind(wait: Any) -> tuple[str, torch.Size]:
    """The group of a sum, and its shape."""
    return wait.args[0].args[2], value(wait).shape


def _add_before(graph: Graph, node: Any) -> None:
    left, right = node.args
    (group, shape), (other, other_shape) = _kind(left), _kind(right)
    if left is right or group != other or not is_same(shape, other_shape):
        return
    writer = Writer(graph, node)
    total = writer.call(ATEN.add.Tensor, left.args[0].args[0], right.args[0].args[0])
    replace(node, writer.call(WAIT, writer.call(REDUCE, total, "sum", group)))
    for wait in (left, right):
        _erase(graph, wait)


def _scatter(graph: Graph, split: Any) -> None:
    wait, size, part = split.args[0], split.args[1], next(iter(split.users))
    name, shape = _kind(wait)
    dim, group = (split.args[2] if len(split.args) > 2 else 0) % len(shape), process_group_of(name)
    is_own = part.target is getitem and part.args[1] == group.rank() and is_even(split, group.size())
    if not is_own or dim == len(shape) - 1:
        return
    writer, total = Writer(graph, part), wait.args[0].args[0]
    if dim:
        pieces = writer.call(ATEN.split.Tensor, total, size, dim)
        total = writer.call(ATEN.cat.default, [writer.item(pieces, index) for index in range(group.size())])
    replace(part, writer.call(WAIT, writer.call(SCATTER, total, "sum", group.size(), name)))
    graph.erase_node(split)
    _erase(graph, wait)


def _erase(graph: Graph, wait: Any) -> None:
    """A sum that nothing reads: to torch a node that waits is never dead."""
    reduction = wait.args[0]
    graph.erase_node(wait)
    graph.erase_node(reduction)
