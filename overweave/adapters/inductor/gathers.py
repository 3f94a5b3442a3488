"""Fuses an all-gather and the matmuls that read it into one `all_gather_matmul` with all of their weights."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from overweave.adapters.inductor.agreed import GATHERED, record_replaced
from overweave.adapters.inductor.nodes import (
    ATEN,
    COLLECTIVE,
    VARIES,
    Writer,
    ancestors,
    fake_value,
    has_dtype,
    has_sizes,
    is_call,
    is_same,
    keeps_rows,
    pieces_joined,
)
from overweave.ir.problem import LONGEST_LIST

LAST_DIMENSION = "the last dimension, which holds columns, is gathered"


class GatheredRows(NamedTuple):
    """The layout of all ranks' rows in a tensor: `[lead, ranks, rest]`. order: of the ranks; empty: ascending."""

    lead: Any = 1
    order: tuple[int, ...] = ()

    @property
    def is_gathered(self) -> bool:
        """Whether the layout is that of an all-gather."""
        return is_same(self.lead, 1) and [*self.order] == sorted(self.order)


class GatheredProduct(NamedTuple):
    """A matmul of gathered rows. bias: of any shape. rows: their layout."""

    node: Node
    w: Node
    bias: Node | None
    rows: GatheredRows


class GatherReaders(NamedTuple):
    """The readers of an all-gather: its matmuls (products), the nodes between it and them, and why another reader could
    not be fused (obstacle)."""

    products: list[GatheredProduct]
    between: set[Node]
    obstacle: str


def gathers(graph: Graph) -> list[Node]:
    """Return the nodes that wait for an all-gather."""
    found = [node for node in graph.nodes if is_call(node, COLLECTIVE.wait_tensor.default)]
    return [node for node in found if is_call(node.args[0], COLLECTIVE.all_gather_into_tensor.default)]


def fuse_gather(graph: Graph, wait: Node) -> str:
    """Replace an all-gather and the matmuls that read it by one node. Return why it is not fused; empty if it is."""
    gather: Any = wait.args[0]
    shard, ranks, group = gather.args
    if not has_dtype(shard) or fake_value(shard).dim() < 2:
        return f"operands in {fake_value(shard).dtype}, or of one dimension"
    products, between, obstacle = _find_products(wait, ranks)
    if not products:
        return obstacle or "no matmul reads it"
    # A second user of the collective reads a symbolic size of it.
    if len(gather.users) > 1 or not all(has_sizes(shard, product.rows.lead) for product in products):
        return VARIES
    products = _with_one_layout(products)
    fused = {product.node for product in products}
    writer = Writer(graph, products[0].node)
    biases = [product.bias for product in products]
    is_biased = all(_is_column_bias(product) for product in products)
    is_needed = any(user not in between and user not in fused for node in between for user in node.users)
    bias = _concatenated(writer, [each for each in biases if each is not None]) if is_biased else None
    results = writer.call(
        GATHERED,
        writer.rows(shard),
        [product.w for product in products],
        bias,
        return_gathered=is_needed,
        group_name=group,
        decisions="",
    )
    record_replaced(results, gather)
    for index, product in enumerate(products):
        y = writer.item(results, index)
        if not product.rows.is_gathered:
            y = writer.rows(y, (ranks, product.rows.lead), (product.rows.order, ()))
        if product.bias is not None and not is_biased:
            y = writer.call(ATEN.add.Tensor, y, product.bias)
        product.node.replace_all_uses_with(writer.shaped(y, product.node))
    if is_needed:
        wait.replace_all_uses_with(writer.shaped(writer.item(results, len(products)), wait))
    for node in fused:
        graph.erase_node(node)
    if not is_needed:  # torch's dead-code elimination keeps waits
        _erase(between - {wait})
    graph.erase_node(wait)
    graph.erase_node(gather)
    return ""


def _erase(nodes: set[Node]) -> None:
    """Erase nodes that only other nodes of the set read."""
    while nodes:
        last = {node for node in nodes if not node.users}
        for node in last:
            node.graph.erase_node(node)
        nodes -= last


def _find_products(wait: Node, ranks: int) -> GatherReaders:
    """Follow reshapes, and splits that are concatenated again, from an all-gather to the matmuls that read it."""
    products: list[GatheredProduct] = []
    between: set[Node] = set()
    obstacle = ""
    waiting = [(wait, GatheredRows())]
    while waiting:
        node, rows = waiting.pop()
        between.add(node)
        for user in node.users:
            if keeps_rows(user, node):
                waiting.append((user, rows))
                continue
            products += _product_of(user, node, rows)
            for cat, onto, order in _rejoined_splits(user, node, ranks) if rows.is_gathered else ():
                shape = fake_value(cat).shape
                if onto == len(shape) - 1:
                    obstacle = LAST_DIMENSION
                    continue
                between |= {user, *user.users}
                waiting.append((cat, GatheredRows(prod(shape[:onto]), order)))
    graph_order = {node: index for index, node in enumerate(wait.graph.nodes)}
    products.sort(key=lambda product: graph_order[product.node])
    return GatherReaders(_independent(products), between, obstacle)


def _rejoined_splits(split: Node, gathered: Node, ranks: int) -> Iterator[tuple[Node, int, tuple[int, ...]]]:
    """Yield (cat, its dimension, order of the ranks) where a split into the ranks' parts is concatenated again."""
    if not is_call(split, ATEN.split.Tensor) or split.args[0] is not gathered:
        return
    for cat in dict.fromkeys(user for part in split.users for user in part.users):  # in an order that all ranks have
        found = pieces_joined(cat)
        if found is not None and found.x is gathered and found.cut == 0 and len(found.order) == ranks:
            yield cat, found.onto, found.order


def _product_of(user: Node, matrix: Node, rows: GatheredRows) -> list[GatheredProduct]:
    """Match a matmul whose first factor is this matrix."""
    if is_call(user, ATEN.mm.default) and user.args[0] is matrix and user.args[1] is not matrix:
        return [GatheredProduct(user, user.args[1], None, rows)]  # type: ignore[arg-type]
    if is_call(user, ATEN.addmm.default) and user.args[1] is matrix and user.args[2] is not matrix and not user.kwargs:
        return [GatheredProduct(user, user.args[2], user.args[0], rows)]  # type: ignore[arg-type]
    return []


def _independent(products: list[GatheredProduct]) -> list[GatheredProduct]:
    """Return the products that depend on no other product of the list: one call computes all."""
    found: list[GatheredProduct] = []
    for product in products[:LONGEST_LIST]:
        needed = [product.w] if product.bias is None else [product.w, product.bias]
        if not {each.node for each in products} & set(ancestors(needed)):
            found.append(product)
    return found


def _with_one_layout(products: list[GatheredProduct]) -> list[GatheredProduct]:
    """Return the products whose weight has the memory layout of the first: one call takes one layout."""
    first = fake_value(products[0].w).is_contiguous()
    return [product for product in products if fake_value(product.w).is_contiguous() == first]


def _is_column_bias(product: GatheredProduct) -> bool:
    """Whether the operator can add the bias: it is `[n]`."""
    return product.bias is not None and is_same(fake_value(product.bias).shape, fake_value(product.node).shape[1:])


def _concatenated(writer: Writer, biases: list[Node]) -> Node:
    return biases[0] if len(biases) == 1 else writer.call(ATEN.cat.default, biases)
