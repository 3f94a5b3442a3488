"""The ops of torch's dispatcher: schemas, fake kernels, gradients under a compiler, and graphs that hold one node."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

import overweave as ow
from campaigns.torch.layers import Layer, in_dtype, ours, upstream
from overweave.ops.dispatch.schema import DEFINED
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow
OPERATORS: tuple[Any, ...] = (
    ow.all_gather_matmul,
    ow.matmul_reduce_scatter,
    ow.matmul_all_reduce,
    ow.all_to_all_matmul,
    ow.matmul_all_to_all,
)
K, N = 8, 16
# Each form of an op: how many x and w, which tensors beside them, and options.
FORMS: dict[str, tuple[str, int, int, dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "gather": ("all_gather_matmul", 1, 1, {"bias": (N,)}, {}),
    "gather columns": ("all_gather_matmul", 1, 2, {}, {"save": "columns", "return_gathered": True}),
    "gather shard": ("all_gather_matmul", 1, 1, {}, {"save": "shard", "activation": "silu"}),
    "gather gate": ("all_gather_matmul", 1, 1, {"gate": (K, N)}, {"activation": "silu"}),
    "scatter": ("matmul_reduce_scatter", 1, 1, {"bias": (N,)}, {}),
    "scatter sum": ("matmul_reduce_scatter", 3, 3, {}, {"activation": "gelu"}),
    "scatter norm": ("matmul_reduce_scatter", 2, 2, {"norm_weight": (N,)}, {}),
    "reduce": ("matmul_all_reduce", 1, 1, {"bias": (N,)}, {}),
    "reduce sum": ("matmul_all_reduce", 2, 2, {"bias": (N,)}, {}),
    "reduce norm": ("matmul_all_reduce", 1, 1, {"norm_weight": (N,)}, {}),
    "to ranks": ("all_to_all_matmul", 1, 1, {}, {}),
    "to ranks counted": ("all_to_all_matmul", 1, 1, {}, {"counts": [1, 3, 4, 0], "most": 4}),
    "from ranks": ("matmul_all_to_all", 1, 1, {}, {}),
    "from ranks counted": ("matmul_all_to_all", 1, 1, {}, {"counts": [1, 3, 4, 0]}),
}
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def checked(form: str, needs_gradient: bool) -> list[str]:
    """torch.library.opcheck of a form; what it says."""
    name, xs, ws, beside, options = FORMS[form]
    torch.manual_seed(dist.get_rank())
    tensors = [[torch.randn(4, K) for _ in range(xs)], [torch.randn(K, N) for _ in range(ws)]]
    for each in (one for factors in tensors for one in factors):
        each.requires_grad_(needs_gradient)
    named = {key: torch.randn(shape).requires_grad_(needs_gradient) for key, shape in beside.items()}
    options = {"group_name": dist.group.WORLD.group_name, **options}
    given = [*tensors, *(named.get(key) for key in DEFINED[name].names)]
    return [f"{test} {said}" for test, said in torch.library.opcheck(DEFINED[name].op, given, options).items()]


@pytest.mark.parametrize("form", ["gather columns", "to ranks counted"])
def test_ops_pass_torchs_own_checks(form: str):
    assert run_ranks(checked, 2, form, True) == [[f"{test} SUCCESS" for test in CHECKS]] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_passes_torchs_own_checks(form: str, needs_gradient: bool):
    assert run_ranks(checked, 2, form, needs_gradient) == [[f"{test} SUCCESS" for test in CHECKS]] * 2


LAYERS = (
    Layer("all_gather_linear", (2, 8), 1, extras=("bias",), options=(("activation", "silu"),)),
    Layer("all_gather_linear", (8, 2), 0, (16, 8), options=(("save", "columns"), ("return_gathered", True))),
    Layer("all_gather_linear", (7,), 0, extras=("gate", "residual"), options=(("save", "shard"),)),
    Layer("linear_reduce_scatter", (2, 8), 1, products=2, extras=("bias", "residual")),
    Layer("linear_reduce_scatter", (8,), extras=("norm", "residual")),
    Layer("linear_all_reduce", (2, 3), extras=("norm", "residual")),
)
Answers = list[torch.Tensor]


def compiled(layer: Layer, dynamic: bool, backend: str) -> dict[str, Any]:
    """A layer under torch.compile, forward and backward, of two batches, beside the same without."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    function = torch.compile(lambda tensors: ours(layer, tensors), fullgraph=True, dynamic=dynamic, backend=backend)
    told: dict[str, Any] = {}
    for turn in range(3):
        more = turn * 2 * dist.get_world_size() if layer.shape[0] % 2 == 0 else 0  # an uneven size is told
        size = layer._replace(shape=(layer.shape[0] + more, *layer.shape[1:]))
        both = [_answers(size, compute, turn) for compute in (function, lambda tensors, size=size: ours(size, tensors))]
        # Inductor's own code computes activations, and rounds otherwise.
        alike = partial(torch.allclose, rtol=1e-5, atol=1e-5) if backend == "inductor" else torch.equal
        told[f"equal {turn}"] = [alike(one, other) for one, other in zip(*both, strict=True)]
    told["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    explained = torch._dynamo.explain(lambda tensors: ours(layer, tensors))(in_dtype(layer, torch.float32))
    told["breaks"] = explained.graph_break_count
    return told


def _answers(layer: Layer, compute: Any, turn: int) -> Answers:
    given = in_dtype(layer, torch.float32, turn)
    results = compute(given)
    wanted = [each.float() for each in upstream(layer, results, turn)]
    return [*results, *torch.autograd.grad(results, [*given.values()], wanted)]


def is_whole(told: dict[str, Any], graphs: int) -> bool:
    equal = all(all(each) for name, each in told.items() if name.startswith("equal"))
    return equal and told["breaks"] == 0 and told["graphs"] <= graphs


def test_a_layer_compiles_whole():
    for told in run_ranks(compiled, 2, LAYERS[1], True, "aot_eager", timeout_s=120):
        assert is_whole(told, 2), told


@pytest.mark.nightly
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.name}-{'-'.join(layer.extras)}")
def test_every_layer_compiles_whole(layer: Layer, dynamic: bool):
    for told in run_ranks(compiled, 2, layer, dynamic, "aot_eager", timeout_s=240):
        assert is_whole(told, 3), told


@pytest.mark.nightly
def test_a_layer_compiles_by_inductor():
    for told in run_ranks(compiled, 2, LAYERS[0], True, "inductor", timeout_s=280):
        assert is_whole(told, 2), told


def exchanged_whole() -> list[str]:
    """Experts' matmuls between two exchanges in one graph, of two sets of counts, beside the same without."""
    torch._dynamo.reset()
    rank, told = dist.get_rank(), []
    up, down = torch.randn(K, N, requires_grad=True), torch.randn(N, K, requires_grad=True)

    def experts(x: torch.Tensor, counts: list[list[int]], back: list[list[int]], order: list[int]) -> torch.Tensor:
        hidden = ow.all_to_all_matmul(x, up, counts=counts, most=8)
        return ow.matmul_all_to_all(hidden.relu(), down, counts=back, most=8, tokens=order)

    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
    for counts in ([[1, 3], [4, 2]], [[2, 2], [1, 3]]):
        x, order = torch.randn(sum(counts[rank]), K), list(range(sum(row[rank] for row in counts)))[::-1]
        back = [list(column) for column in zip(*counts, strict=True)]
        both = [run(x, counts, back, order) for run in (compiled, experts)]
        grads = [torch.autograd.grad(y.square().sum(), (up, down)) for y in both]
        told.append(str([torch.equal(*pair) for pair in (both, *zip(*grads, strict=True))]))
    return told


def test_exchanges_with_counts_compile_whole():
    assert run_ranks(exchanged_whole, 2, timeout_s=120) == [[str([True] * 3)] * 2] * 2


def recorded() -> list[str]:
    """make_fx and torch.export of each operator: nodes, and whether the graph is right on other data."""
    told = []
    x, w = torch.ones(4, K), torch.ones(K, N)

    class Module(torch.nn.Module):
        def __init__(self, operator: Any) -> None:
            super().__init__()
            self.operator = operator

        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return self.operator(x, w)

    for operator in OPERATORS:
        traced = make_fx(Module(operator))(x, w)
        exported = torch.export.export(Module(operator), (x, w)).module()
        for graph in (traced, exported):
            nodes = [node for node in graph.graph.nodes if "overweave" in str(node.target)]
            told.append(f"{len(nodes)} {torch.equal(graph(x + 1, w * 2), operator(x + 1, w * 2))}")
    return told


def test_graphs_hold_one_node_and_no_memory():
    assert run_ranks(recorded, 2, timeout_s=120) == [["1 True"] * 10] * 2
