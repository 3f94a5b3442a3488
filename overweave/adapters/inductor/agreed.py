"""The ops that the pass writes, `torch.ops.overweave_graphs.*`: an operator of overweave's where all ranks' graphs have
been decided on alike, and where they have not, torch's collectives that it stands for, in the order of the program.

    all_gather_matmul(x, w[], bias)                       y[], and the gathered rows
    matmul_reduce_scatter(x[], w[], biases[])             the sum over ranks of x[i] @ w[i] and of all biases
    matmul_all_reduce(x[], w[], biases[])                 the same, on every rank
    beside(x)                                             x, at the first collective of a group that the pass has left
"""

from __future__ import annotations

import atexit
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.distributed import ProcessGroup, Store
from torch.fx import Graph, Node

from overweave.adapters.inductor.nodes import COLLECTIVE, Writer, value
from overweave.adapters.report import site
from overweave.compat.torch_names import OpOverload, get_process_group_store
from overweave.errors import RankMismatch
from overweave.ir.operators import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from overweave.ir.operators.record import Operator
from overweave.memory.group import LIVE_GROUPS, Group, collective_failure, process_group_of
from overweave.ops.call.groups import group_of
from overweave.ops.dispatch.call import call
from overweave.ops.dispatch.fake import results_for
from overweave.ops.dispatch.schema import OperatorArguments, in_order

SITE = "compiled graphs"
REORDERED = "!"  # behind decisions: collectives come in another order than in the program
_ALIKE, _APART, _VOID = "alike", "apart", "void"
_SHARE_OF_TIMEOUT = 0.5  # a peer that waits in a collective of torch's for this rank must not run into its timeout
_PAUSES_S = 0.001, 0.05


# A graph knows its own rank's program alone. A rank that runs a graph for the first time writes its digest into the
# group's store, and waits for those of its peers there. Where one rank decided otherwise, or has not come after half of
# the group's timeout (it may run no compiled graph at all), none of them fuses that graph or a new one of this group
# any more. The first rank to decide sets one key of the store (compare_set), which is the verdict for all ranks.


@dataclass
class _Agreed:
    """The verdicts of a group. words: digest -> verdict. count: comparisons so far. is_over: ranks differed, so
    no graph is compared any more."""

    words: dict[str, str] = field(default_factory=dict)
    count: int = 0
    is_over: bool = False


_AGREED: dict[ProcessGroup, _Agreed] = {}  # every call of a graph asks: no weak keys
atexit.register(_AGREED.clear)  # a process group must not outlive the interpreter


def is_agreed(group_name: str, decisions: str) -> bool:
    """Return whether all ranks of a group run graphs with this digest, so that fused nodes may run fused.

    The first call for a graph waits for all ranks, half of the group's timeout at most. Raises RankMismatch on every
    rank where they differ and one of them cannot call torch's collectives in the program's order any more.
    """
    group = group_of(group_name)
    agreed = _AGREED.get(group.process_group)
    word = agreed.words.get(decisions) if agreed is not None else None
    if word is None:
        with group.lock:
            word = _verdict(group, _of(group.process_group), decisions)
    if word == _VOID:
        found = "they have other collectives, or other matmuls beside these, and collectives were moved past each other"
        asked = f"run graphs that are alike on all ranks of group {group_name}"
        raise RankMismatch(asked, found, "Leave graphs=True out of install()")
    return word == _ALIKE


def _of(process_group: ProcessGroup) -> _Agreed:
    for known in [known for known in _AGREED if known not in LIVE_GROUPS]:
        del _AGREED[known]
    return _AGREED.setdefault(process_group, _Agreed())


def _verdict(group: Group, agreed: _Agreed, decisions: str) -> str:
    word = agreed.words.get(decisions)
    if word is None and group.world_size == 1:
        word = _ALIKE
    elif word is None and agreed.is_over:
        word = _VOID if decisions.endswith(REORDERED) else _APART
    elif word is None:
        agreed.count += 1
        word = _compared(group, f"overweave/graphs/{agreed.count}", decisions)
        agreed.is_over = word != _ALIKE
    agreed.words[decisions] = word
    if word != _ALIKE:
        site(SITE).by_torch["ranks have other graphs"] += 1
    return word


def _compared(group: Group, place: str, decisions: str) -> str:
    """Return the verdict of one comparison: that of the rank that decided first."""
    store: Store = get_process_group_store(group.process_group)
    try:
        store.set(f"{place}/{group.rank}", decisions)
        word = _own_verdict(store, group, place, decisions)
        return bytes(store.compare_set(f"{place}/word", "", word)).decode()
    except RuntimeError as error:
        raise collective_failure(group, error) from error


def _own_verdict(store: Store, group: Group, place: str, decisions: str) -> str:
    """Wait for the digests of all ranks, for a limited time; return this rank's verdict."""
    waiting = [rank for rank in range(group.world_size) if rank != group.rank]
    digests, pause_s = {decisions}, _PAUSES_S[0]
    end_s = time.monotonic() + group.timeout_s * _SHARE_OF_TIMEOUT
    while waiting and time.monotonic() < end_s:
        here = [rank for rank in waiting if store.check([f"{place}/{rank}"])]
        digests |= {bytes(store.get(f"{place}/{rank}")).decode() for rank in here}
        waiting = [rank for rank in waiting if rank not in here]
        if waiting and store.check([f"{place}/word"]):
            return _APART  # any value: compare_set returns the verdict that is set
        if waiting:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSES_S[1])
    if len(digests) == 1 and not waiting:
        return _ALIKE
    return _VOID if any(digest.endswith(REORDERED) for digest in digests) else _APART


NAMESPACE = "overweave_graphs"
TensorList = list[torch.Tensor]
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_WHERE = "str group_name, str decisions"
# products, bias_parts: of each collective that a sum stands for, how many products and biases it adds.
_SUM = f"(Tensor[] x, Tensor[] w, Tensor[] biases, *, int[] products, int[] bias_parts, {_WHERE}) -> Tensor"
_GATHER = f"(Tensor x, Tensor[] w, Tensor? bias, *, bool return_gathered, {_WHERE}) -> Tensor[]"


def _called(operator: Operator, group_name: str, given: OperatorArguments) -> TensorList:
    return in_order(given, call(operator, group_name, given, ""))


def _given_to_gather(
    x: torch.Tensor, w: TensorList, bias: torch.Tensor | None, return_gathered: bool
) -> OperatorArguments:
    return {"x": x, "w": w if len(w) > 1 else w[0], "bias": bias, "return_gathered": return_gathered}


def _gather(
    x: torch.Tensor, w: TensorList, bias: torch.Tensor | None, *, return_gathered: bool, group_name: str, decisions: str
) -> TensorList:
    if is_agreed(group_name, decisions):
        return _called(all_gather_matmul.OPERATOR, group_name, _given_to_gather(x, w, bias, return_gathered))
    ranks = process_group_of(group_name).size()
    whole = COLLECTIVE.wait_tensor(COLLECTIVE.all_gather_into_tensor(x.contiguous(), ranks, group_name))
    products = [whole @ each for each in w]
    if bias is not None:
        widths = [each.shape[1] for each in w]
        products = [y.add_(part) for y, part in zip(products, bias.split(widths), strict=True)]
    return [*products, whole] if return_gathered else products


def _gather_shapes(
    x: torch.Tensor, w: TensorList, bias: torch.Tensor | None, *, return_gathered: bool, group_name: str, decisions: str
) -> TensorList:
    return results_for(all_gather_matmul.OPERATOR, group_name, _given_to_gather(x, w, bias, return_gathered))


class _Sum:
    """The kernel of an op that sums over ranks."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    def __call__(
        self,
        x: TensorList,
        w: TensorList,
        biases: TensorList,
        *,
        products: Sequence[int],
        bias_parts: Sequence[int],
        group_name: str,
        decisions: str,
    ) -> torch.Tensor:
        if is_agreed(group_name, decisions):
            y = _called(self._operator, group_name, _given_to_sum(x, w))[0]
            return y + _reduced(sum(biases[1:], biases[0].clone()), group_name) if biases else y
        parts = zip(_runs(products), _runs(bias_parts), strict=True)
        sums = [self._over_ranks(_added(x[of], w[of], biases[beside]), group_name) for of, beside in parts]
        return sum(sums[1:], sums[0])

    def shapes(self, x: TensorList, w: TensorList, biases: TensorList, *, group_name: str, **_: object) -> torch.Tensor:
        """Of its result, for tensors without memory."""
        return results_for(self._operator, group_name, _given_to_sum(x, w))[0]

    def _over_ranks(self, x: torch.Tensor, group_name: str) -> torch.Tensor:
        if not self._operator.scatters:
            return _reduced(x, group_name)
        ranks = process_group_of(group_name).size()
        return torch.as_tensor(
            COLLECTIVE.wait_tensor(COLLECTIVE.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group_name))
        )


def _given_to_sum(x: TensorList, w: TensorList) -> OperatorArguments:
    return {"x": x if len(x) > 1 else x[0], "w": w if len(w) > 1 else w[0]}


def _runs(lengths: Sequence[int]) -> list[slice]:
    return [slice(*ends) for ends in pairwise(accumulate(lengths, initial=0))]


def _added(x: TensorList, w: TensorList, biases: TensorList) -> torch.Tensor:
    """This rank's part of a sum over ranks."""
    first, *others = (rows @ columns for rows, columns in zip(x, w, strict=True))
    return sum([*others, *biases], first)


def _reduced(x: torch.Tensor, group_name: str) -> torch.Tensor:
    total: torch.Tensor = COLLECTIVE.wait_tensor(COLLECTIVE.all_reduce(x.contiguous(), "sum", group_name))
    return total


def _beside(x: torch.Tensor, *, group_name: str, decisions: str) -> torch.Tensor:
    is_agreed(group_name, decisions)
    return _beside_shapes(x, group_name=group_name, decisions=decisions)


def _beside_shapes(x: torch.Tensor, *, group_name: str, decisions: str) -> torch.Tensor:
    view: torch.Tensor = torch.ops.aten.alias(x)
    return view


def _defined(name: str, schema: str, kernel: Callable[..., Any], shapes: Callable[..., Any]) -> OpOverload:
    _LIBRARY.define(f"{name}{schema}")
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=_LIBRARY)
    op: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return op


def _sum(operator: Operator) -> OpOverload:
    kernel = _Sum(operator)
    return _defined(operator.name, _SUM, kernel.__call__, kernel.shapes)


GATHERED = _defined(all_gather_matmul.OPERATOR.name, _GATHER, _gather, _gather_shapes)
SCATTERED, REDUCED = _sum(matmul_reduce_scatter.OPERATOR), _sum(matmul_all_reduce.OPERATOR)
BESIDE = _defined("beside", f"(Tensor(a) x, *, {_WHERE}) -> Tensor(a)", _beside, _beside_shapes)


# Ranks whose digests are equal call the same collectives, fused or not, in the same order.

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
            orders[group] += _collectives_called(node)
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


def _collectives_called(node: Node) -> list[str]:
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
