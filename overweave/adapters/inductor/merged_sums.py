"""Sums over ranks made fewer before they are fused with their matmuls: as torch's styles leave them, the gradient of
what several column-parallel layers read is one all-reduce for each layer.

    all_reduce(a) + all_reduce(b)  ->  all_reduce(a + b)

A part of a sum stays a part of a sum. Whether every rank reads its own, so that a reduce-scatter would do, no rank's
graph tells: that of rank 0, which reads the first part, is the same where all ranks read the first part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph

from overweave.adapters.inductor.decisions import replace_collectives
from overweave.adapters.inductor.nodes import ATEN, COLLECTIVE, Writer, is_call, is_same, replace, value
from overweave.adapters.inductor.reductions import PARTS, REDUCE, SumPart, parts_of, summed

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
