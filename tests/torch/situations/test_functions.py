"""Every hand-written autograd Function under autocast, forward-mode AD, vmap, `inference_mode` and hooks.

Each computes what one process does, or refuses, on every rank, by the name of what was called.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import linear

import overweave as ow
from overweave.errors import InputError
from overweave.functional import all_gather_linear, linear_all_reduce, linear_reduce_scatter
from overweave.layers.replicated import replicated_linear
from tests.ranks import run_ranks
from tests.source_tree import modules, nodes

RANKS, ROWS, K, N = 2, 6, 8, 12


class Called(NamedTuple):
    """A function of x and of this rank's part of a weight, that one process computes as `linear` of the whole ones.

    functions: the hand-written Functions that it goes through. x_cut, w_cut, y_cut: along which dimension this rank's
    part of each is cut; None: it is whole.
    """

    functions: tuple[str, ...]
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    x_cut: int | None
    w_cut: int
    y_cut: int | None
    refuses_transforms: bool = True


def in_main_grad(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    w.main_grad = torch.zeros_like(w)  # type: ignore[attr-defined]
    y = all_gather_linear(x, w, dim=0, main_grad=w.requires_grad)
    if w.requires_grad:
        w.grad = w.main_grad  # type: ignore[attr-defined]
    return y


PREPARED: list[torch.nn.Module] = []  # one, of the group that there is


def prepare() -> None:
    """Makes the module of `prepared`: transforms of torch.func make none."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = torch.nn.Sequential(torch.nn.Linear(K, N, bias=False))
    parallelize_module(module, mesh, {"0": ow.Colwise(), "": ow.PrepareGather(input_layouts=Shard(0))})
    PREPARED[:] = [module]


def prepared(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A style behind `PrepareGather`, of a weight that is given."""
    (module,) = PREPARED
    layer: Any = module[0]  # type: ignore[index]
    if not torch._C._are_functorch_transforms_active():  # under which torch makes no DTensor
        layer._parameters["weight"] = DTensor.from_local(w, layer.overweave_placement.mesh, [Shard(0)], run_check=False)
    y: torch.Tensor = module(x)
    return y


def installed_gather(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x, w = as_autocast(x), as_autocast(w)
    y: torch.Tensor = torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t()], 0, _world())[1][0]
    return y


def installed_scatter(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x, w = as_autocast(x), as_autocast(w)
    y: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, _world())
    return y


def as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """torch's fused operators leave autocast to their callers."""
    return tensor.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else tensor


def _world() -> str:
    return dist.group.WORLD.group_name  # type: ignore[union-attr,no-any-return]


CALLED = {
    "all_gather_linear": Called(("_Differentiated",), lambda x, w: all_gather_linear(x, w, dim=0), 0, 0, 1),
    "linear_reduce_scatter": Called(("_Differentiated",), lambda x, w: linear_reduce_scatter(x, w, dim=0), 1, 1, 0),
    "linear_all_reduce": Called(("_Differentiated",), linear_all_reduce, 1, 1, None),
    "main_grad": Called(("_IntoMainGrad",), in_main_grad, 0, 0, 1),
    "replicated_linear": Called(("_Replicated",), replicated_linear, None, 0, 1),
    "PrepareGather": Called(("_LazyAllGather", "_GatheredLinear", "_OwnRows"), prepared, 0, 0, 1),
    "installed gather": Called(("_Gather",), installed_gather, 0, 0, 1, refuses_transforms=False),
    "installed scatter": Called(("_Scatter",), installed_scatter, 1, 1, 0, refuses_transforms=False),
}
REFUSED_ALWAYS = {"_NoGradient": "tests/torch/test_install.py"}  # it is the refusal, and that file holds it
BASELINES = {"_GatheredRows", "_Exchanged"}  # of `bench attention`: NCCL's collectives, of which a step takes gradients


class Factors(NamedTuple):
    x: torch.Tensor
    w: torch.Tensor


def part(whole: torch.Tensor, dim: int | None) -> torch.Tensor:
    return whole if dim is None else whole.chunk(RANKS, dim)[dist.get_rank()].contiguous()


def factors(called: Called | None) -> Factors:
    """Whole, or this rank's parts, as leaves."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(ROWS, K, generator=generator), torch.randn(N, K, generator=generator)
    cut = whole if called is None else (part(whole[0], called.x_cut), part(whole[1], called.w_cut))
    return Factors(*(each.clone().requires_grad_() for each in cut))


def gradients(call: Callable[..., torch.Tensor], called: Called | None, within: Any = None) -> Factors:
    """Of a weighed sum of the result."""
    x, w = factors(called)
    with within or torch.enable_grad():
        y = call(x, w)
    weights = torch.arange(ROWS * N).reshape(ROWS, N).sin()
    (y.float() * (weights if called is None else part(weights, called.y_cut))).sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    return Factors(x.grad, w.grad)


def off(called: Called, got: Factors, wanted: Factors) -> float:
    pairs = (got.x, part(wanted.x, called.x_cut)), (got.w, part(wanted.w, called.w_cut))
    return max(((one - other).abs().max() / other.abs().max()).item() for one, other in pairs)


def plainly(called: Called) -> str:
    error = off(called, gradients(called.call, called), gradients(linear, None))
    return "" if error < 1e-5 else f"off by {error}"


def under_autocast(called: Called) -> str:
    within = [torch.autocast("cpu", torch.bfloat16) for _ in range(2)]
    got = gradients(called.call, called, within[0])
    error = off(called, got, gradients(linear, None, within[1]))
    return "" if error < 0.03 and got.w.dtype == torch.float32 else f"off by {error}, {got.w.dtype}"


def in_inference_mode(called: Called) -> str:
    with torch.inference_mode():
        y, wanted = called.call(*factors(called)), linear(*factors(None))
        return "" if torch.allclose(y, part(wanted, called.y_cut), atol=1e-4) else "values"


def hooked(called: Called) -> str:
    """Hooks of tensors see gradients, and may change them."""

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        between = [x * 1.0, w * 1.0]
        for each in between:
            each.register_hook(lambda gradient: gradient * 2.0)
        return called.call(*between)

    if "_IntoMainGrad" in called.functions:
        return ""  # `main_grad` gets a leaf's gradient, which no hook sees
    doubled = Factors(*(each * 2.0 for each in gradients(linear, None)))
    error = off(called, gradients(call, called), doubled)
    return "" if error < 1e-5 else f"off by {error}"


def penalized(call: Callable[..., torch.Tensor], called: Called | None) -> Factors:
    """Gradients of the gradient of x, squared."""
    x, w = factors(called)
    weights = torch.arange(ROWS * N).reshape(ROWS, N).sin()
    loss = (call(x, w).tanh() * (weights if called is None else part(weights, called.y_cut))).sum()
    (of_x,) = torch.autograd.grad(loss, x, create_graph=True)
    of_x.square().sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    return Factors(x.grad, w.grad)


def twice_differentiated(called: Called) -> str:
    try:
        got = penalized(called.call, called)
    except RuntimeError as error:
        return "" if "once_differentiable" in str(error) and not called.refuses_transforms else str(error)
    error = off(called, got, penalized(linear, None))
    return "" if error < 1e-5 else f"off by {error}"


def _right_or_refused(called: Called, ask: Callable[[], torch.Tensor], wanted: Callable[[], torch.Tensor]) -> str:
    try:
        got = ask()
    except InputError as error:
        return "" if "torch.func and forward-mode AD" in str(error) or "has a tangent" in str(error) else str(error)
    except (RuntimeError, NotImplementedError) as error:
        return str(error) if called.refuses_transforms else ""  # torch's own operators, and torch's own refusal
    return "" if torch.allclose(got, wanted(), atol=1e-4) else "wrong values"


def forward_mode(called: Called) -> str:
    with forward_ad.dual_level():
        x, w = (each.detach() for each in factors(called))

        def tangent() -> torch.Tensor:
            found = forward_ad.unpack_dual(called.call(forward_ad.make_dual(x, torch.ones_like(x)), w)).tangent
            assert found is not None
            return found

        return _right_or_refused(called, tangent, lambda: called.call(torch.ones_like(x), w))


def mapped(called: Called) -> str:
    x, w = (each.detach() for each in factors(called))
    ask = torch.vmap(lambda one: called.call(one, w))
    return _right_or_refused(called, lambda: ask(torch.stack([x, x])), lambda: torch.stack([called.call(x, w)] * 2))


def functional_gradient(called: Called) -> str:
    x, w = (each.detach() for each in factors(called))
    ask = torch.func.grad(lambda one: called.call(one, w).sum())
    return _right_or_refused(called, lambda: ask(x), lambda: torch.full_like(x, torch.nan))


SITUATIONS = {
    "plain": plainly,
    "autocast": under_autocast,
    "inference_mode": in_inference_mode,
    "hooks": hooked,
    "create_graph": twice_differentiated,
    "forward mode": forward_mode,
    "vmap": mapped,
    "torch.func.grad": functional_gradient,
}


def every_function() -> list[str]:
    """For `run_ranks`: what is wrong, by function and situation."""
    prepare()
    ow.install()
    found = []
    try:
        for name, called in CALLED.items():
            for situation, judge in SITUATIONS.items():
                try:
                    wrong = judge(called)
                except Exception as error:  # noqa: BLE001 - the cell has failed, and says so
                    wrong = f"{type(error).__name__}: {error}"
                found += [f"{name}, {situation}: {wrong}"] if wrong else []
    finally:
        ow.uninstall()
    return found


@pytest.mark.slow
def test_functions_are_right_or_refuse_by_name():
    assert run_ranks(every_function, RANKS) == [[]] * RANKS


def test_no_function_is_left_out():
    written = {
        node.name
        for path in modules().values()
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "torch.autograd.Function" for base in node.bases)
    }
    assert (
        written == {name for called in CALLED.values() for name in called.functions} | set(REFUSED_ALWAYS) | BASELINES
    )
