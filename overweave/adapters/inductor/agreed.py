"""The ops that the pass writes, `torch.ops.overweave_graphs.*`. Each runs an operator of overweave's if all ranks have
compiled equal graphs; else the unfused collectives of torch and matmuls that it replaces, in the program's order.

    all_gather_matmul(x, w[], bias)                       y[], and the gathered rows
    matmul_reduce_scatter(x[], w[], biases[])             the sum over ranks of x[i] @ w[i] and of all biases
    matmul_all_reduce(x[], w[], biases[])                 the same, on every rank
    beside(x)                                             a copy of x; compares graphs before a collective left to torch
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

from overweave.adapters.inductor.nodes import COLLECTIVE, Writer, fake_value
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
REORDERED = "!"  # suffix of a digest: the graph calls collectives in another order than the program
# Verdicts: run fused; run unfused; raise RankMismatch, since unfused collectives would run in another order.
_EQUAL, _UNEQUAL, _VOID = "alike", "apart", "void"
_SHARE_OF_TIMEOUT = 0.5  # a peer that waits in a collective of torch's for this rank must not run into its timeout
_PAUSES_S = 0.001, 0.05


# Each rank compiles its own graph. When a rank first runs a graph, it writes the graph's digest into the group's store
# and waits for those of its peers. If digests differ, or a peer's is missing after half of the group's timeout (it may
# run no compiled graph at all), no rank runs that graph, or a new one of this group, fused any more. The first rank to
# decide sets one key of the store (compare_set), which is the verdict for all ranks.


@dataclass
class _GroupVerdicts:
    """The verdicts of a group. by_digest: digest -> verdict. count: comparisons so far. is_over: graphs differed, so
    that no later graph is compared or fused."""

    by_digest: dict[str, str] = field(default_factory=dict)
    count: int = 0
    is_over: bool = False


_VERDICTS: dict[ProcessGroup, _GroupVerdicts] = {}  # a plain dict, since each call of a graph reads it
atexit.register(_VERDICTS.clear)  # a process group must not outlive the interpreter


def ranks_agree(group_name: str, decisions: str) -> bool:
    """Return whether all ranks of a group run graphs with this digest, so that fused nodes may run fused.

    The first call for a digest waits for all ranks, at most half of the group's timeout. Raises RankMismatch on every
    rank if digests differ and a graph calls collectives in another order than its program.
    """
    group = group_of(group_name)
    agreed = _VERDICTS.get(group.process_group)
    verdict = agreed.by_digest.get(decisions) if agreed is not None else None
    if verdict is None:
        with group.lock:
            verdict = _verdict(group, _verdicts_of(group.process_group), decisions)
    if verdict == _VOID:
        found = "they have other collectives, or other matmuls beside these, and collectives were moved past each other"
        asked = f"run graphs that are alike on all ranks of group {group_name}"
        raise RankMismatch(asked, found, "Leave graphs=True out of install()")
    return verdict == _EQUAL


def _verdicts_of(process_group: ProcessGroup) -> _GroupVerdicts:
    """Return the verdicts of a group, and drop those of destroyed groups."""
    for known in [known for known in _VERDICTS if known not in LIVE_GROUPS]:
        del _VERDICTS[known]
    return _VERDICTS.setdefault(process_group, _GroupVerdicts())


def _verdict(group: Group, agreed: _GroupVerdicts, decisions: str) -> str:
    """Return the verdict on a digest, from the cache or by a comparison; count graphs that are not fused."""
    verdict = agreed.by_digest.get(decisions)
    if verdict is None and group.world_size == 1:
        verdict = _EQUAL
    elif verdict is None and agreed.is_over:
        verdict = _VOID if decisions.endswith(REORDERED) else _UNEQUAL
    elif verdict is None:
        agreed.count += 1
        verdict = _compare_in_store(group, f"overweave/graphs/{agreed.count}", decisions)
        agreed.is_over = verdict != _EQUAL
    agreed.by_digest[decisions] = verdict
    if verdict != _EQUAL:
        site(SITE).by_torch["ranks have other graphs"] += 1
    return verdict


def _compare_in_store(group: Group, prefix: str, decisions: str) -> str:
    """Compare digests in the group's store; return the verdict of the rank that decided first. prefix: of the keys."""
    store: Store = get_process_group_store(group.process_group)
    try:
        store.set(f"{prefix}/{group.rank}", decisions)
        verdict = _own_verdict(store, group, prefix, decisions)
        return bytes(store.compare_set(f"{prefix}/word", "", verdict)).decode()
    except RuntimeError as error:
        raise collective_failure(group, error) from error


def _own_verdict(store: Store, group: Group, prefix: str, decisions: str) -> str:
    """Wait for the digests of all ranks, for a limited time, and return this rank's verdict."""
    waiting = [rank for rank in range(group.world_size) if rank != group.rank]
    digests, pause_s = {decisions}, _PAUSES_S[0]
    end_s = time.monotonic() + group.timeout_s * _SHARE_OF_TIMEOUT
    while waiting and time.monotonic() < end_s:
        here = [rank for rank in waiting if store.check([f"{prefix}/{rank}"])]
        digests |= {bytes(store.get(f"{prefix}/{rank}")).decode() for rank in here}
        waiting = [rank for rank in waiting if rank not in here]
        if waiting and store.check([f"{prefix}/word"]):
            return _UNEQUAL  # any value: compare_set returns the verdict that is set
        if waiting:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSES_S[1])
    if len(digests) == 1 and not waiting:
        return _EQUAL
    return _VOID if any(digest.endswith(REORDERED) for digest in digests) else _UNEQUAL


NAMESPACE = "overweave_graphs"
TensorList = list[torch.Tensor]
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_GROUP_AND_DIGEST = "str group_name, str decisions"
# products, bias_parts: how many matmuls and biases belong to each collective that the sum replaces.
_SUM = f"(Tensor[] x, Tensor[] w, Tensor[] biases, *, int[] products, int[] bias_parts, {_GROUP_AND_DIGEST}) -> Tensor"
_GATHER = f"(Tensor x, Tensor[] w, Tensor? bias, *, bool return_gathered, {_GROUP_AND_DIGEST}) -> Tensor[]"


def _run_operator(operator: Operator, group_name: str, given: OperatorArguments) -> TensorList:
    """Run an operator of overweave's without autograd, and return its results in order."""
    return in_order(given, call(operator, group_name, given, ""))


def _gather_arguments(
    x: torch.Tensor, w: TensorList, bias: torch.Tensor | None, return_gathered: bool
) -> OperatorArguments:
    # Inductor may lay a copy of a transposed tensor out as the tensor is.
    return {"x": x.contiguous(), "w": w if len(w) > 1 else w[0], "bias": bias, "return_gathered": return_gathered}


def _gather(
    x: torch.Tensor, w: TensorList, bias: torch.Tensor | None, *, return_gathered: bool, group_name: str, decisions: str
) -> TensorList:
    """Run `all_gather_matmul` if all ranks' graphs agree; else torch's all_gather, then one matmul for each weight."""
    if ranks_agree(group_name, decisions):
        return _run_operator(all_gather_matmul.OPERATOR, group_name, _gather_arguments(x, w, bias, return_gathered))
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
    return results_for(all_gather_matmul.OPERATOR, group_name, _gather_arguments(x, w, bias, return_gathered))


class _Sum:
    """The kernel of an op that sums matmuls and biases over ranks, by a reduce-scatter or an all-reduce."""

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
        """Run the fused operator if all ranks' graphs agree; else the collectives that it replaces, in order."""
        if ranks_agree(group_name, decisions):
            y = _run_operator(self._operator, group_name, _sum_arguments(x, w))[0]
            return y + _all_reduced(sum(biases[1:], biases[0].clone()), group_name) if biases else y
        parts = zip(_consecutive_slices(products), _consecutive_slices(bias_parts), strict=True)
        sums = [
            self._over_ranks(_local_sum(x[product_slice], w[product_slice], biases[bias_slice]), group_name)
            for product_slice, bias_slice in parts
        ]
        return sum(sums[1:], sums[0])

    def shapes(self, x: TensorList, w: TensorList, biases: TensorList, *, group_name: str, **_: object) -> torch.Tensor:
        """Return the result's FakeTensor."""
        return results_for(self._operator, group_name, _sum_arguments(x, w))[0]

    def _over_ranks(self, x: torch.Tensor, group_name: str) -> torch.Tensor:
        if not self._operator.scatters:
            return _all_reduced(x, group_name)
        ranks = process_group_of(group_name).size()
        return torch.as_tensor(
            COLLECTIVE.wait_tensor(COLLECTIVE.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group_name))
        )


def _sum_arguments(x: TensorList, w: TensorList) -> OperatorArguments:
    rows = [each.contiguous() for each in x]
    return {"x": rows if len(rows) > 1 else rows[0], "w": w if len(w) > 1 else w[0]}


def _consecutive_slices(lengths: Sequence[int]) -> list[slice]:
    return [slice(*ends) for ends in pairwise(accumulate(lengths, initial=0))]


def _local_sum(x: TensorList, w: TensorList, biases: TensorList) -> torch.Tensor:
    """Return the sum of matmuls and biases on this rank."""
    first, *others = (rows @ columns for rows, columns in zip(x, w, strict=True))
    return sum([*others, *biases], first)


def _all_reduced(x: torch.Tensor, group_name: str) -> torch.Tensor:
    total: torch.Tensor = COLLECTIVE.wait_tensor(COLLECTIVE.all_reduce(x.contiguous(), "sum", group_name))
    return total


def _compare(x: torch.Tensor, *, group_name: str, decisions: str) -> torch.Tensor:
    ranks_agree(group_name, decisions)
    return _compare_shapes(x, group_name=group_name, decisions=decisions)


def _compare_shapes(x: torch.Tensor, *, group_name: str, decisions: str) -> torch.Tensor:
    # Not a view of x: Inductor (torch 2.13) reuses x's memory while an in-place collective still works on the view.
    return x.clone()


def _define_op(name: str, schema: str, kernel: Callable[..., Any], shapes: Callable[..., Any]) -> OpOverload:
    _LIBRARY.define(f"{name}{schema}")
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=_LIBRARY)
    op: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return op


def _sum(operator: Operator) -> OpOverload:
    kernel = _Sum(operator)
    return _define_op(operator.name, _SUM, kernel.__call__, kernel.shapes)


GATHERED = _define_op(all_gather_matmul.OPERATOR.name, _GATHER, _gather, _gather_shapes)
SCATTERED, REDUCED = _sum(matmul_reduce_scatter.OPERATOR), _sum(matmul_all_reduce.OPERATOR)
COMPARE = _define_op("beside", f"(Tensor x, *, {_GROUP_AND_DIGEST}) -> Tensor", _compare, _compare_shapes)


# Ranks with equal digests call the same collectives, fused or not, in the same order.

_REPLACED = "overweave_replaced_collectives"
Orders = dict[str, list[str]]


def record_replaced(node: Node, *others: Node) -> None:
    """Record which collectives of the program a node replaces, in their order."""
    node.meta[_REPLACED] = [name for other in others for name in _replaced_by(other)]


def collectives_by_group(graph: Graph) -> Orders:
    """Return group -> names of its collectives in graph order; a fused node counts as those that it replaces."""
    orders: Orders = defaultdict(list)
    for node in graph.nodes:
        group = _group_of(node)
        if group is not None:
            orders[group] += _collectives_called(node)
    return orders


def record_decisions(graph: Graph, before: Orders) -> None:
    """Give each fused node the digest of its group's nodes. before: `collectives_by_group` of the program's graph."""
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
    """Insert a comparison of digests before a group's first collective, unless that is fused and compares itself."""
    if first.target.namespace == COLLECTIVE.name and isinstance(first.args[0], Node):
        x = first.args[0]
        first.replace_input_with(x, Writer(graph, first).call(COMPARE, x, **where))


def _group_of(node: Node) -> str | None:
    """Return the name of the group of a collective, fused or not; None for any other node."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    names = [argument.name for argument in node.target._schema.arguments]
    if "group_name" not in names or node.target is COMPARE:
        return None
    at = names.index("group_name")
    group = node.kwargs.get("group_name", node.args[at] if at < len(node.args) else None)
    return group if isinstance(group, str) else None


def _replaced_by(node: Node) -> list[str]:
    replaced: list[str] = node.meta.get(_REPLACED, [node.name])
    return replaced


def _collectives_called(node: Node) -> list[str]:
    """Return the collectives that a node calls if it runs unfused. A collective of torch's is one call, even if it
    replaces several."""
    replaced = _replaced_by(node)
    return replaced if _is_ours(node) else ["+".join(replaced)]


def _is_ours(node: Any) -> bool:
    """Whether a node is an op of this file."""
    return isinstance(node.target, OpOverload) and node.target.namespace == NAMESPACE


def _decision(node: Any) -> str:
    """Return the text of a node that must be equal on all ranks; the number of rows may differ, and is left out."""
    if not _is_ours(node):
        return str(node.target)
    x, ws, biases = node.args
    xs = x if isinstance(x, list) else [x]
    weights = [(tuple(fake_value(w).shape), fake_value(w).is_contiguous()) for w in ws]
    biased = len(biases) if isinstance(biases, list) else biases is not None
    options = [(name, each) for name, each in node.kwargs.items() if name not in ("group_name", "decisions")]
    return f"{node.target} {fake_value(xs[0]).dtype} {len(xs)} {weights} {biased} {options}"
