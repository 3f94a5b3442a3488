"""What layers keep for gradients, and skip: saved tensors, frozen halves, checkpoints, main_grad, shared weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from campaigns.torch.layers import Layer, in_dtype, ours
from overweave import functional as woven
from overweave.memory.board.board import Board
from overweave.ops.call.groups import group_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow
K, N, ROWS = 8, 16, 12  # rows of all ranks


def operands(x: bool = True, weight: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    shard = torch.randn(ROWS // dist.get_world_size(), K)
    return shard.requires_grad_(x), torch.randn(N, K).requires_grad_(weight)


def saved(save: str) -> list[list[int]]:
    """The shapes that hooks of saved tensors see."""
    shapes: list[list[int]] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(list(tensor.shape))
        return tensor

    x, weight = operands()
    with saved_tensors_hooks(note, lambda tensor: tensor):
        woven.all_gather_linear(x, weight, save=save).sum().backward()
    return shapes


def test_what_is_saved_is_what_was_asked_for():
    own, columns = [ROWS // 2, K], [K // 2, ROWS]
    for save, wanted in (("gathered", [ROWS, K]), ("shard", own), ("columns", columns)):
        for shapes in run_ranks(saved, 2, save):
            assert wanted in shapes
            assert ([ROWS, K] in shapes) == (save == "gathered")


def calls_of_backward(layer: str, x: bool, weight: bool) -> tuple[float, list[bool]]:
    """How many calls of an operator a backward makes, of those of one forward, and which gradients there are."""
    given = operands(x, weight)
    getattr(woven, layer)(*given).sum().backward()  # ranks agree on what is new to them by calls of their own
    board = Board.of(group_of(None))
    start = board.call
    y = getattr(woven, layer)(*given)
    middle = board.call
    y.sum().backward()
    return (board.call - middle) / (middle - start), [each.grad is not None for each in given]


@pytest.mark.parametrize("layer", ["all_gather_linear", "linear_reduce_scatter", "linear_all_reduce"])
def test_what_is_frozen_is_not_computed(layer: str):
    def calls(x: bool, weight: bool) -> tuple[float, list[bool]]:
        found, same = run_ranks(calls_of_backward, 2, layer, x, weight)
        assert found == same
        return found

    dual = 0 if layer == "linear_all_reduce" else 1
    assert calls(True, True) == [dual, [True, True]]
    assert calls(True, False) == [dual, [True, False]]
    assert calls(False, True) == [0, [False, True]]


def used_otherwise() -> dict[str, bool]:
    """Gradients of a layer that is recomputed, of a weight used twice, and of one whose gradient is added elsewhere."""
    x, weight = operands()

    def layers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        h = torch.relu(woven.all_gather_linear(x, weight, save="columns"))
        return woven.linear_reduce_scatter(h, weight.t().contiguous())

    def gradients(act: Any) -> list[torch.Tensor]:
        return list(torch.autograd.grad(act(x, weight).square().sum(), (x, weight)))

    once = gradients(layers)
    told = {}
    for reentrant in (False, True):
        again = gradients_by_backward(lambda x, w, r=reentrant: checkpoint(layers, x, w, use_reentrant=r), x, weight)
        told[f"checkpoint {reentrant}"] = all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    twice = gradients(lambda x, w: layers(x, w) + layers(x, w))
    told["twice"] = all(torch.allclose(a * 4, b, rtol=1e-5) for a, b in zip(once, twice, strict=True))
    told |= with_main_grad(x, weight.detach())
    return told


def gradients_by_backward(act: Any, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in (x, weight)]
    act(*leaves).square().sum().backward()
    return [leaf.grad for leaf in leaves]


def with_main_grad(x: torch.Tensor, weight: torch.Tensor) -> dict[str, bool]:
    plain = torch.nn.Parameter(weight.clone())
    woven.all_gather_linear(x, plain).sum().backward()
    added: Any = torch.nn.Parameter(weight.clone())
    marked: Any = torch.nn.Parameter(weight.clone())
    marked.grad_added_to_main_grad = False
    for each in (added, marked):
        each.main_grad = torch.ones(weight.shape, dtype=torch.float64)
        for _ in range(2):
            woven.all_gather_linear(x, each, main_grad=True).sum().backward()
    wanted = 1 + 2 * plain.grad.double()
    return {
        "added up": torch.equal(added.main_grad, wanted) and added.grad is None,
        "marked": torch.equal(marked.main_grad, wanted) and marked.grad_added_to_main_grad,
    }


def test_layers_are_recomputed_used_twice_and_added_up():
    for told in run_ranks(used_otherwise, 2):
        assert told == dict.fromkeys(told, True)
        assert len(told) == 5


def layouts() -> list[bool]:
    """Gradients lie as their weights do, so that nobody copies them where they are added up."""
    x, weight = operands()
    woven.all_gather_linear(x, weight).sum().backward()
    _, transposed = operands()
    across = transposed.detach().t().contiguous().t().requires_grad_()
    woven.all_gather_linear(x, across).sum().backward()
    return [weight.grad.stride() == weight.stride(), across.grad.stride() == across.stride()]


def test_gradients_lie_as_weights_do():
    assert run_ranks(layouts, 2) == [[True, True]] * 2


def cast() -> list[str]:
    """Results and gradients of fp32 layers under autocast."""
    told = []
    for name in ("all_gather_linear", "linear_reduce_scatter", "linear_all_reduce"):
        layer = Layer(name, (2, 4), extras=("bias", "residual"))
        given = in_dtype(layer, torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (y,) = ours(layer, given)
        y.sum().backward()
        told += [str(y.dtype), *{str(each.grad.dtype) for each in given.values()}]
    return told


def test_autocast_casts_operands_and_not_their_gradients():
    assert run_ranks(cast, 2) == [["torch.bfloat16", "torch.float32"] * 3] * 2


class Copies(TorchDispatchMode):
    """Notes what is copied inside, by the number of its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            self.elements.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def copies(layer: Layer) -> list[int]:
    given = in_dtype(layer, torch.float32)
    with Copies() as noted:
        ours(layer, given)
    return noted.elements


@pytest.mark.parametrize("name", ["all_gather_linear", "linear_reduce_scatter"])
def test_nothing_is_copied_where_the_dimension_leads(name: str):
    leading = (Layer(name, (8,)), Layer(name, (8, 3)), Layer(name, (1, 8, 3), 1), Layer(name, (7,)))
    for layer in leading:
        assert run_ranks(copies, 2, layer) == [[], []], layer
    (once,), _ = run_ranks(copies, 2, Layer(name, (3, 8), 1))
    assert once == 24 * (96 if name == "all_gather_linear" else 40)  # y, or x
