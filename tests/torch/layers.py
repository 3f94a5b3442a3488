"""Layers of `overweave.functional` as data, and the same in plain torch, in any dtype, with its gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from overweave import functional as woven
from overweave.errors import InputError
from overweave.ops.call.norm import RmsNorm

K = 24
FP64 = torch.float64


class Layer(NamedTuple):
    """A call by every rank. shape: of the whole x, but for its last dimension; dim: of the ranks' rows.

    widths: of the weights; products: how many pairs of x and weight are summed. extras: tensors beside them. plain:
    other options of the call. strided: x and the weights lie in memory as slices of larger tensors.
    """

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    widths: tuple[int, ...] = (24,)
    products: int = 1
    extras: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    strided: bool = False

    @property
    def gathers(self) -> bool:
        return self.name == "all_gather_linear"

    @property
    def scatters(self) -> bool:
        return self.name == "linear_reduce_scatter"


Tensors = dict[str, torch.Tensor]


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Normal numbers, the same on every rank that names the seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64)


def own(layer: Layer, whole: torch.Tensor) -> torch.Tensor:
    """A rank's part along the dimension of the rows."""
    rank, parts = dist.get_rank(), whole.chunk(dist.get_world_size(), layer.dim)
    return parts[rank] if rank < len(parts) else whole.narrow(layer.dim, 0, 0)


def operands(layer: Layer, dtype: torch.dtype) -> Tensors:
    """What a rank brings, rounded to a dtype: x0, x1, .., w0, w1, .., and the extras."""
    rank, n = dist.get_rank(), sum(layer.widths)
    made: Tensors = {}
    for index in range(layer.products):
        whole = drawn((*layer.shape, K), index if layer.gathers else 10 * rank + index)
        made[f"x{index}"] = own(layer, whole) if layer.gathers else whole
    count = max(len(layer.widths), layer.products)
    widths = layer.widths * count if layer.products > 1 else layer.widths
    made |= {f"w{index}": drawn((width, K), 100 + 10 * rank + index) for index, width in enumerate(widths)}
    of_rank = 50 * rank if layer.gathers else 0  # of sums all ranks have the same
    for name in layer.extras:
        seed = 200 + of_rank + len(name)
        if name == "gate":
            made[name] = drawn((n, K), seed)
        elif name == "residual":
            residual = drawn((*layer.shape, n), seed)
            made[name] = own(layer, residual) if layer.scatters else residual
        else:
            made[name] = drawn((n,), seed)
    return {name: (_strided(each) if layer.strided else each).to(dtype) for name, each in made.items()}


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def ours(layer: Layer, tensors: Tensors) -> list[torch.Tensor]:
    """The results of `overweave.functional`."""
    xs, ws = (_listed(tensors, letter) for letter in "xw")
    beside: dict[str, Any] = {name: tensors[name] for name in layer.extras if name not in ("bias", "norm")}
    if "norm" in tensors:
        beside["norm"] = RmsNorm(tensors["norm"])
    if layer.gathers and layer.shape[layer.dim] % dist.get_world_size():
        beside["size"] = layer.shape[layer.dim]
    if layer.name != "linear_all_reduce":
        beside["dim"] = layer.dim
    x, w = (each if len(each) > 1 else each[0] for each in (xs, ws))
    results = getattr(woven, layer.name)(x, w, tensors.get("bias"), **beside, **dict(layer.options))
    return _flat(results)


def plain(layer: Layer, tensors: Tensors) -> list[torch.Tensor]:
    """The same in torch's own collectives and operations, one after the other."""
    xs, ws = (_listed(tensors, letter) for letter in "xw")
    options = dict(layer.options)
    act = {"silu": functional.silu, "gelu": functional.gelu}.get(options.get("activation", ""), lambda value: value)
    bias, gate, residual = (tensors.get(name) for name in ("bias", "gate", "residual"))
    if layer.gathers:
        whole = _Gathered.apply(xs[0], layer.dim, layer.shape[layer.dim])
        biases = [None] * len(ws) if bias is None else bias.split(layer.widths)
        products = [functional.linear(whole, w) for w in ws]
        products = [y if b is None else y + b for y, b in zip(products, biases, strict=True)]
        if gate is not None:
            ys = [products[0] * act(functional.linear(whole, gate))]
        else:
            ys = [act(product) for product in products]
        shared = _GatheredAlike.apply(xs[0], layer.dim, layer.shape[layer.dim])
        found = [*ys, shared] if options.get("return_gathered") else ys
    else:
        product = sum(functional.linear(x, w) for x, w in zip(xs, ws, strict=True))
        found = [_Scattered.apply(product, layer.dim) if layer.scatters else _Reduced.apply(product)]
        found[0] = found[0] if bias is None else found[0] + _Replicated.apply(bias, layer.scatters)
        found[0] = act(found[0])
    if residual is not None:
        found[0] = found[0] + residual
    if "norm" in tensors:
        found = [functional.rms_norm(found[0], found[0].shape[-1:], tensors["norm"], 1e-5), found[0]]
    return found


def _listed(tensors: Tensors, letter: str) -> list[torch.Tensor]:
    return [each for name, each in tensors.items() if name[0] == letter and name[1:].isdigit()]


def _flat(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else [one for each in results for one in _flat(each)]


class _Gathered(torch.autograd.Function):
    """All rows; the gradient of the own is the sum of all ranks'."""

    @staticmethod
    def forward(ctx, x, dim, size):
        ctx.dim, world = dim, dist.get_world_size()
        most = -(-size // world)
        padded = x.new_zeros((*x.shape[:dim], most, *x.shape[dim + 1 :]))
        padded.narrow(dim, 0, x.shape[dim]).copy_(x)
        parts = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(parts, padded)
        return torch.cat(parts, dim).narrow(dim, 0, size)

    @staticmethod
    def backward(ctx, dy):
        dy = dy.contiguous()
        dist.all_reduce(dy)
        return _own(dy, ctx.dim), None, None


class _GatheredAlike(_Gathered):
    """All rows, whose gradient is the same on every rank."""

    @staticmethod
    def backward(ctx, dy):
        return _own(dy, ctx.dim), None, None


class _Scattered(torch.autograd.Function):
    """The own rows of a sum; the gradient of a part is that of all rows."""

    @staticmethod
    def forward(ctx, product, dim):
        ctx.dim, ctx.size, product = dim, product.shape[dim], product.clone()
        dist.all_reduce(product)
        return _own(product, dim)

    @staticmethod
    def backward(ctx, dy):
        return _Gathered.forward(ctx, dy, ctx.dim, ctx.size), None


class _Reduced(torch.autograd.Function):
    """A sum on every rank, whose gradient is the same on every rank."""

    @staticmethod
    def forward(ctx, product):
        product = product.clone()
        dist.all_reduce(product)
        return product

    @staticmethod
    def backward(ctx, dy):
        return dy


class _Replicated(torch.autograd.Function):
    """A bias that every rank has, and adds to its own rows where they are scattered."""

    @staticmethod
    def forward(ctx, bias, is_scattered):
        ctx.is_scattered = is_scattered
        return bias.view_as(bias)

    @staticmethod
    def backward(ctx, gradient):
        if ctx.is_scattered:
            gradient = gradient.contiguous()
            dist.all_reduce(gradient)
        return gradient, None


def _own(whole: torch.Tensor, dim: int) -> torch.Tensor:
    rank, parts = dist.get_rank(), whole.chunk(dist.get_world_size(), dim)
    return (parts[rank] if rank < len(parts) else whole.narrow(dim, 0, 0)).contiguous()


def with_gradients(layer: Layer, compute: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Results and gradients of a layer, by name, for gradients of the results that are drawn."""
    tensors = {name: each.detach().requires_grad_() for name, each in operands(layer, torch.float32).items()}
    tensors = {name: each.detach().to(dtype).requires_grad_() for name, each in tensors.items()}
    results = compute(layer, tensors)
    seed = 300 if not layer.gathers and not layer.scatters else 300 + dist.get_rank()
    seeds = [seed] * len(results)
    if dict(layer.options).get("return_gathered"):
        seeds[-1] = 300
    given = [drawn(tuple(each.shape), each_seed) for each, each_seed in zip(results, seeds, strict=True)]
    torch.autograd.backward(results, [each.to(result.dtype) for each, result in zip(given, results, strict=True)])
    told = {f"y{index}": each.detach() for index, each in enumerate(results)}
    return told | {f"gradient of {name}": each.grad for name, each in tensors.items()}


def refusal(act: Any) -> str:
    """The words of the InputError that a call raises."""
    try:
        act()
    except InputError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
