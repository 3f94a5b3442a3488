"""The pass over compiled graphs on CPU ranks: collectives beside matmuls are fused, and compute what they computed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, product
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config
from torch.distributed import _symmetric_memory as torch_symm_mem
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
    all_reduce,
    reduce_scatter_tensor,
    reduce_scatter_tensor_autograd,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import linear

import overweave as ow
from campaigns.torch.small_llama import Llama, Sizes, plan
from overweave.adapters.inductor.fusion import FuseCollectives
from overweave.block.predicted import backend
from overweave.errors import InputError
from tests.ranks import run_ranks
from tests.torch.compiled import collectives, woven

K = 16
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


class Row(NamedTuple):
    """A function of x and weights, and the operators that its graph must hold. sums_bias: beside a sum of biases."""

    name: str
    shape: tuple[int, ...]
    function: Callable[..., object]
    wanted: tuple[str, ...]
    sums_bias: bool = False


def rows(ranks: int, is_short: bool) -> Iterator[Row]:
    """Every number of dimensions, dimension, batch and form; or, of the former, a flat and a batched input."""
    group, own = dist.group.WORLD, dist.get_rank() + 1
    places = [((2 * ranks, K), 0), ((2, 2 * ranks, K), 1), ((2 * ranks, 3, K), 0), ((1, 2 * ranks, K), 1)]
    for shape, dim in places[: 2 if is_short else 4]:
        where = f"{shape} along {dim}"

        gathered = partial(all_gather_tensor, gather_dim=dim, group=group)
        scattered = partial(reduce_scatter_tensor, reduceOp="sum", scatter_dim=dim, group=group)
        yield Row(f"gather {where}", shape, lambda x, w, *_, g=gathered: linear(g(x), w[0]), (GATHER,))
        kept = lambda x, w, *_, g=gathered: [(whole * 2, linear(whole, w[0])) for whole in [g(x)]]  # noqa: E731
        yield Row(f"gather, kept {where}", shape, kept, (GATHER,))
        yield Row(f"gather, bias {where}", shape, lambda x, w, b, g=gathered: linear(g(x), w[0], b), (GATHER,))
        yield Row(
            f"query, key and value {where}",
            shape,
            lambda x, w, b, g=gathered: [linear(whole, each) for whole in [g(x)] for each in w],
            (GATHER,),
        )
        yield Row(
            f"biases of some {where}",
            shape,
            lambda x, w, b, g=gathered: [linear(whole, w[0], b) + linear(whole, w[1]) for whole in [g(x)]],
            (GATHER,),
        )
        yield from einsums(where, shape, gathered, scattered)
        yield Row(f"scatter {where}", shape, lambda x, w, *_, s=scattered: s(linear(x, w[0])), (SCATTER,))
        for word, share in (("bias", lambda b: b / ranks), ("a bias of each rank", lambda b: b * own)):
            yield Row(
                f"scatter, {word} {where}",
                shape,
                lambda x, w, b, s=scattered, share=share: s(linear(x, w[0], share(b)) + linear(x * 2, w[1], share(b))),
                (SCATTER,),
                sums_bias=True,
            )
        yield Row(
            f"backward sum {where}",
            shape,
            lambda x, w, b, s=scattered: s(linear(x, w[0]) + linear(x * 2, w[1]) + linear(x + 1, w[2])),
            (SCATTER,),
        )
        yield Row(f"all-reduce {where}", shape, lambda x, w, *_: all_reduce(linear(x, w[0]), "sum", group), (REDUCE,))
        yield Row(
            f"all-reduce of a sum {where}",
            shape,
            lambda x, w, *_: all_reduce(linear(x, w[0]) + linear(x * 2, w[1]), "sum", group),
            (REDUCE,),
        )
        yield Row(
            f"sum of all-reduces {where}",
            shape,
            lambda x, w, *_: (
                all_reduce(linear(x, w[0]), "sum", group)
                + all_reduce(linear(x * 2, w[1]), "sum", group)
                + all_reduce(linear(x + 1, w[2]), "sum", group)
            ),
            (REDUCE,),
        )


def einsums(
    where: str, shape: tuple[int, ...], gathered: Callable[..., Any], scattered: Callable[..., Any]
) -> Iterator[Row]:
    """Products that are matmuls of a batch of one between dimensions of one; of the second, columns are heads."""
    yield Row(
        f"einsum, gathered {where}", shape, lambda x, w, *_: torch.einsum("...h,oh->...o", gathered(x), w[0]), (GATHER,)
    )
    heads = (4, K // 4)
    yield Row(
        f"einsum of heads, scattered {where}",
        shape,
        lambda x, w, *_: scattered(torch.einsum("...hd,ohd->...o", x.unflatten(-1, heads), w[0].unflatten(-1, heads))),
        (SCATTER,),
    )


def leaves(*results: object) -> Iterator[tuple[torch.Tensor, ...]]:
    """The tensors of two results, side by side."""
    return zip(*map(torch.utils._pytree.tree_leaves, results), strict=True)


def table(is_short: bool, is_varying: bool) -> list[str]:
    """For `run_ranks`: rows whose graph holds other operators, or gives other results. is_varying: of every second row,
    one graph serves any number of the ranks' rows, and any batch of several."""
    found, ranks = [], dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    common = torch.Generator().manual_seed(9)
    ow.install(graphs=True)
    try:
        for row in islice(rows(ranks, is_short), 0, None, 1 + is_varying):
            w = [torch.randint(-2, 3, (24, K), generator=common).float() for _ in range(3)]
            b = torch.randint(-2, 3, (24,), generator=common).float()
            graphs: list[torch.fx.GraphModule] = []
            torch._dynamo.reset()
            compiled = torch.compile(
                row.function, backend=backend(graphs), fullgraph=True, dynamic=None if is_varying else False
            )
            for count in (2 * ranks, 6 * ranks)[: 1 + is_varying]:
                *sizes, _ = row.shape
                shape = [count if size == 2 * ranks else size + (count > 2 * ranks) for size in sizes]
                x = torch.randint(-2, 3, (*shape, K), generator=generator).float()
                if is_varying:
                    torch._dynamo.mark_dynamic(x, [*range(len(shape))])
                pairs = leaves(compiled(x, w, b), row.function(x, w, b))
                found += [f"{row.name}: values"] * (
                    not all(torch.equal(a, c) and a.stride() == c.stride() for a, c in pairs)
                )
            if tuple(woven(graphs)) != row.wanted or len(collectives(graphs)) != 0:
                found.append(f"{row.name}: {woven(graphs)}, left {collectives(graphs)}")
        return found
    finally:
        ow.uninstall()


def left_by_both() -> dict[str, list[bool]]:
    """For `run_ranks`: whether a collective is left of each row by overweave's pass, and by torch's."""
    return {
        row.name: [len(left_of(row, is_torchs)) > 0 for is_torchs in (False, True)]
        for row in rows(dist.get_world_size(), is_short=False)
    }


def left_of(row: Row, is_torchs: bool) -> list[str]:
    """torch's pass returns early without NCCL, and for groups without symmetric memory: here it does not."""
    graphs: list[torch.fx.GraphModule] = []
    torch._dynamo.reset()
    given = torch.ones(row.shape), [torch.ones(24, K) for _ in range(3)], torch.ones(24)
    ow.install(graphs=not is_torchs)
    try:
        with (
            config.patch(_micro_pipeline_tp=is_torchs),
            patch.object(dist, "is_nccl_available", lambda: True),
            patch.object(torch_symm_mem, "is_symm_mem_enabled_for_group", lambda group: True),
        ):
            torch.compile(row.function, backend=backend(graphs), fullgraph=True, dynamic=False)(*given)
        return collectives(graphs)
    finally:
        ow.uninstall()


@pytest.mark.nightly
def test_the_table_of_torchs_pass_beside_it():
    """`pytest -rP` shows it."""
    left, _ = run_ranks(left_by_both, 2, timeout_s=280.0)
    for name, both in left.items():
        by_overweave, by_torch = ("left" if is_left else "fused" for is_left in both)
        print(f"{name:44} overweave: {by_overweave:8} torch: {by_torch}")
    assert not any(by_overweave for by_overweave, _ in left.values())
    assert {by_torch for _, by_torch in left.values()} == {False, True}


@pytest.mark.parametrize(
    ("world_size", "is_short", "is_varying"),
    [
        pytest.param(2, True, False, marks=pytest.mark.slow),
        pytest.param(2, True, True, marks=pytest.mark.slow),
        pytest.param(4, False, False, marks=pytest.mark.nightly),
    ],
)
def test_every_row_of_the_table_is_fused(world_size: int, is_short: bool, is_varying: bool):
    assert run_ranks(table, world_size, is_short, is_varying, timeout_s=280.0) == [[]] * world_size


def all_sizes_vary() -> list[str]:
    """For `run_ranks`: every fifth row's graph, all of whose sizes vary: it is right, whatever is left of it."""
    found, ranks = [], dist.get_world_size()
    ow.install(graphs=True)
    try:
        for row in islice(rows(ranks, is_short=True), 0, None, 5):
            torch._dynamo.reset()
            compiled = torch.compile(row.function, backend=backend([]), fullgraph=True, dynamic=True)
            w, b = [torch.ones(24, K) for _ in range(3)], torch.ones(24)
            pairs = leaves(*(function(torch.ones(row.shape), w, b) for function in (compiled, row.function)))
            found += [f"{row.name}: values"] * (not all(torch.equal(a, c) for a, c in pairs))
        return found if "columns vary from call to call" in str(ow.report()) else [*found, str(ow.report())]
    finally:
        ow.uninstall()


@pytest.mark.slow
def test_graphs_all_of_whose_sizes_vary_are_right():
    assert run_ranks(all_sizes_vary, 2, timeout_s=120.0) == [[]] * 2


def off_by_inductor() -> list[str]:
    """For `run_ranks`: of graphs that Inductor has compiled, in which a collective is left beside others, or a gathered
    tensor is transposed, those that are not eager torch's."""
    group = dist.group.WORLD
    w = torch.randn(K, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    x = torch.randn(4, K, generator=torch.Generator().manual_seed(12 + dist.get_rank()))
    functions = {
        "two sums": lambda x: (all_reduce(x @ w, "sum", group), all_reduce((x * 2) @ w, "sum", group)),
        "a sum beside": lambda x: (all_reduce(x * 2, "sum", group), all_reduce(x @ w, "sum", group)),
        "a transposed shard": lambda x: (all_gather_tensor(x.t(), 0, group) @ torch.ones(4, 3),),
    }
    found = []
    ow.install(graphs=True)
    try:
        for (name, function), is_dynamic in product(functions.items(), (False, True)):
            torch._dynamo.reset()
            pairs = zip(torch.compile(function, dynamic=is_dynamic)(x), function(x), strict=True)
            if not all(torch.allclose(one, other, atol=1e-4) for one, other in pairs):
                found.append(f"{name}, dynamic {is_dynamic}")
        return found
    finally:
        ow.uninstall()


@pytest.mark.slow
def test_what_is_left_beside_what_is_fused_is_right_by_inductor():
    assert run_ranks(off_by_inductor, 2, timeout_s=180.0) == [[], []]


def left() -> list[str]:
    """What is no matmul beside a collective stays, and so does a product that others read."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    w = torch.randn(16, K)
    cases = {
        "last dimension": lambda x: all_gather_tensor(x, 1, group) @ torch.ones(K * ranks, 4),
        "float64": lambda x: linear(all_gather_tensor(x.double(), 0, group), w.double()),
        "others read": lambda x: [all_reduce(y, "sum", group) + y for y in [linear(x, w)]],
        "no matmul reads": lambda x: all_gather_tensor(x, 0, group) + 1,
    }
    found = []
    ow.install(graphs=True)
    try:
        for word, function in cases.items():
            graphs: list[torch.fx.GraphModule] = []
            torch._dynamo.reset()
            x = torch.randn(4, K)
            made = torch.compile(function, backend=backend(graphs), fullgraph=True)(x)
            plain = function(x)
            same = [
                torch.allclose(a, b) for a, b in zip(*map(torch.utils._pytree.tree_leaves, (made, plain)), strict=True)
            ]
            if woven(graphs) or not all(same):
                found.append(f"{word}: {woven(graphs)}, {same}")
        reasons = str(ow.report())
        return found + [f"{word} in {reasons}" for word in cases if word not in reasons]
    finally:
        ow.uninstall()


@pytest.mark.slow
def test_what_stays_has_a_reason():
    assert run_ranks(left, 2) == [[]] * 2


def llama(batch: int, sequence: bool) -> list[str]:
    """A compiled Llama: values and gradients as eager, and no collective of a layer is left."""
    sizes = Sizes(layers=1, has_biases=True)
    torch.manual_seed(0)
    single = Llama(sizes)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(copy.deepcopy(single), mesh, plan(1, sequence))
    block, whole = model.blocks[0], single.blocks[0]
    x = torch.randn(batch, 8, sizes.width)
    own = x.chunk(dist.get_world_size(), 1)[dist.get_rank()] if sequence else x
    x, own = x.clone().requires_grad_(), own.clone().requires_grad_()
    ow.install(graphs=True)
    try:
        graphs: list[torch.fx.GraphModule] = []
        torch._dynamo.reset()
        y = torch.compile(block, backend=backend(graphs), fullgraph=True, dynamic=False)(own)
        y.sum().backward()
    finally:
        ow.uninstall()
    wanted = whole(x)
    wanted.sum().backward()
    cut = (lambda t: t.chunk(dist.get_world_size(), 1)[dist.get_rank()]) if sequence else (lambda t: t)
    found = [] if torch.allclose(y, cut(wanted), atol=1e-5) else ["values"]
    found += [] if torch.allclose(own.grad, cut(x.grad), atol=1e-4) else ["gradient of the input"]
    for (name, a), b in zip(whole.named_parameters(), block.parameters(), strict=True):
        gradient = b.grad.full_tensor() if hasattr(b.grad, "full_tensor") else b.grad
        found += [] if torch.allclose(gradient, a.grad, atol=1e-4) else [f"gradient of {name}"]
    # Forward and backward; where every rank has all rows, the gradients of what columns read are summed, too.
    sites = [GATHER] * 4 + [SCATTER] * 4 if sequence else [REDUCE] * (2 + 2)
    if sorted(woven(graphs)) != sites:
        found.append(f"{woven(graphs)}, left {collectives(graphs)}")
    return found


@pytest.mark.parametrize(
    ("batch", "sequence"),
    [
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.nightly),
        pytest.param(2, False, marks=pytest.mark.nightly),
    ],
)
def test_all_sites_of_a_compiled_layer_are_fused(batch: int, sequence: bool):
    assert run_ranks(llama, 2, batch, sequence, timeout_s=120.0) == [[]] * 2


def by_hand() -> list[str]:
    """Collectives with gradients, along a second dimension: those of the gradient have slices where torch splits."""
    group, generator = dist.group.WORLD, torch.Generator().manual_seed(5)
    w, v = (torch.randint(-2, 3, shape, generator=generator).float() for shape in ((24, K), (K, 24)))

    def function(x):
        h = torch.relu(linear(all_gather_tensor_autograd(x, 1, group), w))
        return reduce_scatter_tensor_autograd(linear(h, v), "sum", 1, group)

    def results(called, x):
        y = called(x)
        return y, torch.autograd.grad(y, x, y.detach() % 3)[0]

    graphs: list[torch.fx.GraphModule] = []
    ow.install(graphs=True)
    try:
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend(graphs), fullgraph=True)
        same = []
        for shape in ((2, 4, K), (3, 6, K), (5, 2, K)):  # the first has graphs of its own
            x = torch.randint(-2, 3, shape, generator=generator).float().requires_grad_()
            same += [torch.equal(*pair) for pair in leaves(results(compiled, x), results(function, x))]
    finally:
        ow.uninstall()
    found = [] if all(same) else [f"values: {same}"]
    if sorted(woven(graphs)) != [GATHER] * 4 + [SCATTER] * 4 or collectives(graphs):
        found.append(f"{woven(graphs)}, left {collectives(graphs)}")
    return found


@pytest.mark.slow
def test_collectives_with_gradients_are_fused_in_both_directions():
    assert run_ranks(by_hand, 2, timeout_s=120.0) == [[]] * 2


def test_graphs_without_collectives_stay_as_they_are():
    graph = make_fx(torch.bmm, tracing_mode="fake")(torch.ones(1, 2, 3), torch.ones(1, 3, 4)).graph
    before = str(graph)
    FuseCollectives()(graph)
    assert str(graph) == before


def beside_others() -> list[str]:
    seen = []

    def other(graph: torch.fx.Graph) -> None:
        seen.append(len(graph.nodes))

    config.post_grad_custom_post_pass = other
    try:
        ow.install(graphs=True)
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend=backend([]))(torch.ones(2))
        held = config.post_grad_custom_post_pass
        config.post_grad_custom_post_pass = None
        with pytest.raises(InputError, match="Inductor's pass is NoneType"):
            ow.uninstall()
        config.post_grad_custom_post_pass = held
        ow.uninstall()
        return [] if seen and config.post_grad_custom_post_pass is other else ["the other pass"]
    finally:
        config.post_grad_custom_post_pass = None


@pytest.mark.slow
def test_it_stands_beside_what_is_registered():
    assert run_ranks(beside_others, 1) == [[]]
