"""The decisions of the pass about a graph, as one digest for each process group.

Ranks whose digests are equal call the same collectives, fused or not, in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from hashlib import blake2b
from typing import Any

from torch.fx import Graph, Node

from overweave.adapters.inductor.agreed import BESIDE, NAMESPACE, REORDERED
from overweave.adapters.inductor.nodes import COLLECTIVE, Writer, value
from overweave.compat.torch_names import OpOverload

_REPLACED = "overweave_replaced_collectives"
Orders = dict[str, list[str]]


def replace_collectives(node: Node, *others: Node) -> None:
    """Record that a node replaces collectives of the program, in their order."""
    node.meta[_REPLACED] = [name for other in others for name in _replaced_by(other)]


def collectives_by_group(graph: Graph) -> Orders:
    """Return group -> its collectives in the order of the graph; a fused node counts as those that it replaces."""
    orders: Orders = defaultdict(list)
    for node in graph.nodes:
        group = _group_of(node)
        if group is not None:
            orders[group] += _called(node)
    return orders


def record_decisions(graph: Graph, before: Orders) -> None:
    """Give each node that the pass wrote the digest of its group. before: `collectives_by_group` of the program."""
    after = collectives_by_group(graph)
    of_group: dict[str, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        group = _group_of(node)
        if group is not None:
            of_group[group].append(node)
    for group, nodes in of_group.items():
        text = "\n".join(map(_decision, nodes))
        digest = blake2b(text.encode(), digest_size=8).hexdigest() + REORDERED * (before[group] != after[group])
        for node in nodes:
            if _is_ours(node):
                node.kwargs = {**node.kwargs, "decisions": digest}
        _compare_first(graph, nodes[0], {"group_name": group, "decisions": digest})


def _compare_first(graph: Graph, first: Any, where: dict[str, str]) -> None:
    """Let ranks compare digests before a group's first collective if torch runs it. Ops of ours compare themselves."""
    if first.target.namespace == COLLECTIVE.name and isinstance(first.args[0], Node):
        x = first.args[0]
        first.replace_input_with(x, Writer(graph, first).call(BESIDE, x, **where))


def _group_of(node: Node) -> str | None:
    """Return the name of the group of a collective, fused or not; None for any other node."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    names = [argument.name for argument in node.target._schema.arguments]
    if "group_name" not in names or node.target is BESIDE:
        return None
    at = names.index("group_name")
    group = node.kwargs.get("group_name", node.args[at] if at < len(node.args) else None)
    return group if isinstance(group, str) else None


def _replaced_by(node: Node) -> list[str]:
    replaced: list[str] = node.meta.get(_REPLACED, [node.name])
    return replaced


def _called(node: Node) -> list[str]:
    """Return the collectives that a rank calls at a node if ranks do not fuse. A node of torch's is one call, whatever
    it replaced."""
    replaced = _replaced_by(node)
    return replaced if _is_ours(node) else ["+".join(replaced)]


def _is_ours(node: Any) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == NAMESPACE


def _decision(node: Any) -> str:
    """Return what must be equal on all ranks at a node. Rows are left out: ranks may have different numbers of them."""
    if not _is_ours(node):
        return str(node.target)
    x, ws, beside = node.args
    xs = x if isinstance(x, list) else [x]
    weights = [(tuple(value(w).shape), value(w).is_contiguous()) for w in ws]
    biased = len(beside) if isinstance(beside, list) else beside is not None
    options = [(name, each) for name, each in node.kwargs.items() if name not in ("group_name", "decisions")]
    return f"{node.target} {value(xs[0]).dtype} {len(xs)} {weights} {biased} {options}"
