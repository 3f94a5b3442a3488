"""Parallel modules on CPU ranks: values and gradients of the whole layers that they are parts of."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import silu

import overweave as ow
from overweave.errors import InputError
from overweave.memory.group import GroupLike
from tests.ranks import run_ranks

K, N, ROWS = 16, 24, 6  # of a rank


def own(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


class Case:
    """Whole input and weights of the next layers, and what the whole layers make of them."""

    def __init__(self, dim: int | None) -> None:
        torch.manual_seed(3)
        self.dim = dim
        rows = ROWS * dist.get_world_size()
        self.x = torch.randn(2, rows, K, requires_grad=True)
        given = self.x.detach() if dim is None else own(self.x.detach(), dim)
        self.given = given.clone().requires_grad_()

    def differences(self, made: torch.Tensor, wanted: torch.Tensor, what: str) -> list[str]:
        """Of a result, and of the gradient of the input, where every element weighs otherwise."""
        found = [] if torch.allclose(made, wanted if self.dim is None else own(wanted, self.dim), atol=1e-5) else [what]
        weighed = (wanted * torch.arange(wanted.numel()).reshape(wanted.shape).sin()).sum()
        factors = torch.arange(wanted.numel()).reshape(wanted.shape).sin()
        (made * (factors if self.dim is None else own(factors, self.dim))).sum().backward()
        truth = torch.autograd.grad(weighed, self.x)[0]
        truth = truth if self.dim is None else own(truth, self.dim)
        return found if torch.allclose(self.given.grad, truth, atol=1e-4) else [*found, f"{what}: gradient of x"]


def modules(dim: int | None, on_mesh: bool) -> list[str]:
    """For `run_ranks`: in what modules differ from the whole layers that they were cut from."""
    group: GroupLike = init_device_mesh("cpu", (dist.get_world_size(),)) if on_mesh else None
    whole = {name: nn.Linear(*sizes) for name, sizes in {"up": (K, N), "down": (N, K), "gate": (K, N)}.items()}
    up = ow.ColumnParallelLinear.of(whole["up"], group, dim=dim)
    down = ow.RowParallelLinear.of(whole["down"], group, dim=dim)
    case = Case(dim)
    found = case.differences(down(up(case.given).relu()), whole["down"](whole["up"](case.x).relu()), "linear")
    grads = [(up.weight, whole["up"].weight, 0), (down.weight, whole["down"].weight, 1), (up.bias, whole["up"].bias, 0)]
    case.x.grad = None
    case = Case(dim)
    y = whole["down"](whole["up"](case.x).relu())
    (y * torch.arange(y.numel()).reshape(y.shape).sin()).sum().backward()
    for part, full, cut in grads:
        got = part.grad.to_local() if isinstance(part.grad, DTensor) else part.grad
        found += [] if torch.allclose(got, own(full.grad, cut), atol=1e-4) else [f"gradient of {tuple(full.shape)}"]
    if on_mesh and not (isinstance(up.weight, DTensor) and up.weight.placements == (Shard(0),)):
        found.append("weights on a mesh are DTensors")
    torch.manual_seed(5)
    mlp = ow.SwiGluMlp(K, N, group, dim=dim)
    torch.manual_seed(5)
    gate, up_, down_ = (nn.Linear(*sizes, bias=False) for sizes in ((K, N), (K, N), (N, K)))
    case = Case(dim)
    found += case.differences(mlp(case.given), down_(silu(gate(case.x)) * up_(case.x)), "mlp")
    torch.manual_seed(6)
    qkv = ow.QkvParallelLinear(K, (N, 12, 12), bias=True, group=group, dim=dim)
    torch.manual_seed(6)
    layers = [nn.Linear(K, width) for width in (N, 12, 12)]
    case = Case(dim)
    for made, layer in zip(qkv(case.given), layers, strict=True):
        found += [] if torch.allclose(made, own(layer(case.x), -1), atol=1e-5) else ["query, key and value"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "dim", "on_mesh"), [(2, 1, False), (2, None, True), (3, 1, True), (4, None, False)]
)
def test_parts_compute_what_the_whole_layers_do(world_size: int, dim: int | None, on_mesh: bool):
    assert run_ranks(modules, world_size, dim, on_mesh) == [[]] * world_size


def refused() -> None:
    with pytest.raises(InputError, match="does not divide by 2 ranks"):
        ow.ColumnParallelLinear(4, 5)
    with pytest.raises(InputError, match="does not divide by 2 ranks"):
        ow.RowParallelLinear(5, 4)

    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 3.0

    replaced = nn.Linear(4, 4)
    replaced.forward = lambda input: input  # type: ignore[method-assign]
    for kind in (ow.ColumnParallelLinear, ow.RowParallelLinear):
        for layer in (Scaled(4, 4), replaced):
            with pytest.raises(InputError, match=r"the forward of this \w+ is its own"):
                kind.of(layer)


@pytest.mark.bad
def test_what_has_no_part_is_refused():
    run_ranks(refused, 2)


def hooked() -> list[str]:
    """For `run_ranks`: blocks whose parts were hooked, or lack a bias, that are not what they are of whole rows."""
    found = []
    x = torch.randn(4, K, generator=torch.Generator().manual_seed(0))
    for name in ("a hook", "weight_norm", "no bias"):
        made = []
        for dim in (None, 0):
            torch.manual_seed(5)
            mlp = ow.SwiGluMlp(K, N, dim=dim)
            qkv = ow.QkvParallelLinear(K, (N, N, N), name == "no bias", dim=dim)
            if name == "a hook":
                mlp.gate.register_forward_hook(lambda _, given, y: y * 3)
                qkv.q.register_forward_hook(lambda _, given, y: y * 3)
            elif name == "weight_norm":
                nn.utils.parametrizations.weight_norm(mlp.up)
                nn.utils.parametrizations.weight_norm(qkv.v)
            else:
                qkv.k.bias = None
            given = x if dim is None else own(x, 0)
            y = mlp(given)
            made.append([y if dim is not None else own(y, 0), *qkv(given)])
        found += [] if all(map(torch.allclose, *made)) else [name]
    return found


def test_parts_of_blocks_that_were_changed_are_called():
    assert run_ranks(hooked, 2) == [[], []]
