"""The pass that Inductor runs on a graph after its own post-grad passes, chained to one that was registered before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.fx import Graph, Node

from overweave import errors
from overweave.adapters.inductor import agreed, gathers, nodes, reductions
from overweave.adapters.inductor.nodes import ATEN, VIEWS, Writer, fake_value, has_sizes, is_call, is_same, replace
from overweave.adapters.report import Site, site
from overweave.compat.torch_names import CustomGraphPass, config, get_hash_for_files, stable_topological_sort
from overweave.errors import InputError
from overweave.memory.group import LIVE_GROUPS

SINGLE = frozenset((ATEN.unsqueeze.default, ATEN.squeeze.dim, ATEN.squeeze.dims))


def flatten_products(graph: Graph) -> None:
    """Rewrite the matmuls of `einsum` into those of `linear`, the only form that the other passes match.

    unsqueeze, permute of dimensions of size 1 -> reshape        reshape of a reshape -> one reshape
    bmm of a batch of one                      -> mm
    """
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
    """Whether the batch size is 1, and reshapes can be given the sizes of both factors."""
    return is_same(fake_value(bmm).shape[0], 1) and all(has_sizes(factor, 1) for factor in bmm.args)


def _bmm_to_mm(graph: Graph, bmm: Any) -> None:
    """Replace `bmm(a, b)` by `unsqueeze(mm(squeeze(a, 0), squeeze(b, 0)), 0)`."""
    writer = Writer(graph, bmm)
    factors = [writer.call(ATEN.squeeze.dim, factor, 0) for factor in bmm.args]
    replace(bmm, writer.call(ATEN.unsqueeze.default, writer.call(ATEN.mm.default, *factors), 0))


def _is_reshape(node: Any) -> bool:
    """Whether a node is a view that keeps the order of its input's elements."""
    if is_call(node, ATEN.permute.default):
        shape = fake_value(node.args[0]).shape
        moved = [at % len(shape) for at in node.args[1] if not is_same(shape[at], 1)]
        return moved == sorted(moved)
    return is_call(node, *VIEWS, *SINGLE)


SITES = {"gathers in compiled graphs": gathers.gathers, "sums in compiled graphs": reductions.reductions}
_FUSE: dict[str, Callable[[Graph, Node], str]] = {
    "gathers in compiled graphs": gathers.fuse_gather,
    "sums in compiled graphs": reductions.fuse_reduction,
}
# The key of Inductor's graph caches: the version and the source of the pass, so that a changed pass compiles anew.
_VERSION = Path(str(errors.__file__)).with_name("__init__.py")
_PASS = (agreed, gathers, nodes, reductions)
FILES = (str(_VERSION), __file__, *(str(module.__file__) for module in _PASS))


class FuseCollectives(CustomGraphPass):  # type: ignore[misc]
    """Fuses collectives with the matmuls next to them into overweave's operators, and counts those fused and left.

    It also fuses what torch's own pass (`_micro_pipeline_tp`) does not: a batch of one, biases, sums of matmuls,
    all-reduces. Sums over ranks are merged first (reductions.py). previous: a pass that was registered before, and runs
    first.
    """

    def __init__(self, previous: Any = None) -> None:
        self.previous = previous

    def __call__(self, graph: Graph) -> None:
        """Run the chained pass, then rewrite and fuse the collectives of the graph."""
        if self.previous is not None:
            self.previous(graph)
        if not any(find(graph) for find in SITES.values()):
            return
        orders_before = agreed.collectives_by_group(graph)
        flatten_products(graph)
        nodes.split_slices(graph)
        reductions.merge_sums(graph)
        for name, find in SITES.items():
            for node in find(graph):
                _count(site(name), _fuse_or_reason(_FUSE[name], graph, node))
        stable_topological_sort(graph)  # a fused node stands where the first of its results is read
        graph.eliminate_dead_code()
        agreed.record_decisions(graph, orders_before)

    def uuid(self) -> Any:
        """Return the key of this pass in Inductor's graph caches: a digest of its files, and the ranks of all groups.

        None, which disables caching, if the chained pass has no key.
        """
        own = get_hash_for_files(FILES), _ranks_of_groups()
        if self.previous is None:
            return own
        others = self.previous.uuid() if isinstance(self.previous, CustomGraphPass) else None
        return None if others is None else (others, *own)


def _ranks_of_groups() -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return (name, ranks) of each group: a graph's text holds only the name."""
    return tuple(sorted((str(each.group_name), tuple(dist.get_process_group_ranks(each))) for each in LIVE_GROUPS))


def register() -> None:
    """Chain the pass after the one in `torch._inductor.config.post_grad_custom_post_pass`."""
    config.post_grad_custom_post_pass = FuseCollectives(config.post_grad_custom_post_pass)


def unregister() -> None:
    """Restore the previous pass. Raises InputError if another pass was registered since."""
    current = config.post_grad_custom_post_pass
    if not isinstance(current, FuseCollectives):
        cure = "Set torch._inductor.config.post_grad_custom_post_pass back first"
        raise InputError("uninstall", f"Inductor's pass is {type(current).__name__}, not overweave's", cure)
    config.post_grad_custom_post_pass = current.previous


def _fuse_or_reason(fuse: Callable[[Graph, Node], str], graph: Graph, node: Node) -> str:
    """Fuse a collective. Return why it was not fused, also if the operator refuses the arguments; empty if it was."""
    try:
        return fuse(graph, node)
    except InputError as error:
        return str(error)


def _count(counts: Site, obstacle: str) -> None:
    if obstacle:
        counts.by_torch[obstacle] += 1
    else:
        counts.by_overweave += 1
