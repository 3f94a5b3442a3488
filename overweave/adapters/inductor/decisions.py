"""What a pass has decided for a graph, by group, as text that is the same for all ranks that decided alike."""

from __future__ import annotations

from collections import defaultdict
from hashlib import blake2b
from typing import Any

from torch.fx import Graph, Node

from overweave.adapters.inductor.agreed import BESIDE, NAMESPACE
from overweave.adapters.inductor.agreement import REORDERED
from overweave.adapters.inductor.nodes import COLLECTIVE, Writer, value
from overweave.compat.torch_names import OpOverload

_STANDS_FOR = "overweave_stands_for"
Orders = dict[str, list[str]]


def stand_for(node: Node, *others: Node) -> None:
    """Notes that a node does what collectives did, in their order."""
    node.meta[_STANDS_FOR] = [name for other in others for name in _stood_for(other)]


def collectives(graph: Graph) -> Orders:
    """The collectives of each group, in the order of the graph; those of the program, where nodes stand for them."""
    found: Orders = defaultdict(list)
    for node in graph.nodes:
        group = _group_of(node)
        if group is not None:
            found[group] += _called(node)
    return found


def tell(graph: Graph, before: Orders) -> None:
    """Gives each node that the pass wrote the decisions for its group. before: `collectives` of the program."""
    after = collectives(graph)
    of_group: dict[str, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        group = _group_of(node)
        if group is not None:
            of_group[group].append(node)
    for group, nodes in of_group.items():
        text = "\n".join(map(_decision, nodes))
        told = blake2b(text.encode(), digest_size=8).hexdigest() + REORDERED * (before[group] != after[group])
        for node in nodes:
            if _is_ours(node):
                node.kwargs = {**node.kwargs, "decisions": told}
        _begin(graph, nodes[0], {"group_name": group, "decisions": told})


def _begin(graph: Graph, first: Any, where: dict[str, str]) -> None:
    """Where the first collective of a group is torch's, its ranks ask each other before it, as peers do elsewhere."""
    if first.target.namespace == COLLECTIVE.name and isinstance(first.args[0], Node):
        x = first.args[0]
        first.replace_input_with(x, Writer(graph, first).call(BESIDE, x, **where))


def _group_of(node: Node) -> str | None:
    """The group in which a node meets other ranks."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    names = [argument.name for argument in node.target._schema.arguments]
    if "group_name" not in names or node.target is BESIDE:
        return None
    at = names.index("group_name")
    group = node.kwargs.get("group_name", node.args[at] if at < len(node.args) else None)
    return group if isinstance(group, str) else None


def _stood_for(node: Node) -> list[str]:
    found: list[str] = node.meta.get(_STANDS_FOR, [node.name])
    return found


def _called(node: Node) -> list[str]:
    """The collectives of the program that a rank calls at a node where ranks differ: torch's is one, whatever it was
    made of."""
    stood = _stood_for(node)
    return stood if _is_ours(node) else ["+".join(stood)]


def _is_ours(node: Any) -> bool:
    return isinstance(node.target, OpOverload) and node.target.namespace == NAMESPACE


def _decision(node: Any) -> str:
    """What decides which call of its peers' a node meets: no rows, which ranks may have of their own."""
    if not _is_ours(node):
        return str(node.target)
    x, ws, beside = node.args
    xs = x if isinstance(x, list) else [x]
    told = [(tuple(value(w).shape), value(w).is_contiguous()) for w in ws]
    biased = len(beside) if isinstance(beside, list) else beside is not None
    options = [(name, each) for name, each in node.kwargs.items() if name not in ("group_name", "decisions")]
    return f"{node.target} {value(xs[0]).dtype} {len(xs)} {told} {biased} {options}"
