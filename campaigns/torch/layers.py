"""Layers of `overweave.functional` as data, and the same in plain torch, in any dtype, with its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

import overweave as ow
from overweave import functional as woven
from overweave.ops.call.devices import own_device
from overweave.ops.call.norm import RmsNorm

# Collectives of torch along any dimension, of uneven parts, with gradients: what a layer in plain torch is made of.


def own_part(whole: torch.Tensor, dim: int) -> torch.Tensor:
    """A rank's part along a dimension, as torch.chunk deals it."""
    rank, parts = dist.get_rank(), whole.chunk(dist.get_world_size(), dim)
    return (parts[rank] if rank < len(parts) else whole.narrow(dim, 0, 0)).contiguous()


def gathered(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """The parts of all ranks, `size` along the dimension. The gradient of a part is the sum of all ranks'."""
    return _applied(_Gathered, x, dim, size, False)


def gathered_alike(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """As `gathered`, for results whose gradient is the same on every rank."""
    return _applied(_Gathered, x, dim, size, True)


def scattered(part: torch.Tensor, dim: int) -> torch.Tensor:
    """A rank's part of the sum. The gradient is that of all parts."""
    return _applied(_Scattered, part, dim)


def reduced(part: torch.Tensor) -> torch.Tensor:
    """The sum, on every rank, whose gradient is the same on every rank."""
    return _applied(_Reduced, part)


def replicated(bias: torch.Tensor, is_scattered: bool) -> torch.Tensor:
    """A tensor that every rank has. Where its results are scattered, its gradient is the sum of all ranks'."""
    return _applied(_Replicated, bias, is_scattered)


def _applied(function: Any, *given: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*given)
    return result


def _all(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    world_size = dist.get_world_size()
    padded = x.new_zeros((*x.shape[:dim], -(-size // world_size), *x.shape[dim + 1 :]))
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    parts = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(parts, padded)
    return torch.cat(parts, dim).narrow(dim, 0, size)


def _sum(part: torch.Tensor) -> torch.Tensor:
    whole = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole)
    return whole


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, size: int, are_alike: bool) -> torch.Tensor:
        ctx.dim, ctx.are_alike = dim, are_alike
        return _all(x, dim, size)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return own_part(dys[0] if ctx.are_alike else _sum(dys[0]), ctx.dim), None, None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim, ctx.size = dim, part.shape[dim]
        return own_part(_sum(part), dim)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return _all(dys[0], ctx.dim, ctx.size), None


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        return _sum(part)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return dys[0]


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, is_scattered: bool) -> torch.Tensor:
        ctx.is_scattered = is_scattered
        return bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return _sum(dys[0]) if ctx.is_scattered else dys[0], None


FP64 = torch.float64
FIRST_SEED = 10_000
MOST = 1.05
EXACT = 1e-6  # in the norm: the error of fp32, or none


class Layer(NamedTuple):
    """A call by every rank. shape: of the whole x, but for its last dimension; dim: of the ranks' rows.

    widths: of the weights; products: how many pairs of x and weight are summed; k: columns of x. extras: tensors beside
    them. options: others of the call. strided: x and the weights lie in memory as slices of larger tensors.
    """

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    widths: tuple[int, ...] = (96,)
    products: int = 1
    extras: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    strided: bool = False
    k: int = 40

    @property
    def gathers(self) -> bool:
        return self.name == "all_gather_linear"

    @property
    def scatters(self) -> bool:
        return self.name == "linear_reduce_scatter"


Tensors = dict[str, torch.Tensor]
Act = Callable[[torch.Tensor], torch.Tensor]
ACTIVATIONS: dict[str | None, Act] = {None: lambda y: y, "silu": functional.silu, "gelu": functional.gelu}
Compute = Callable[[Layer, Tensors], list[torch.Tensor]]


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Normal numbers where ranks compute, the same on every rank that names the seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(own_device())


def operands(layer: Layer, turn: int = 0) -> Tensors:
    """What a rank brings, in fp64: x0, x1, .., w0, w1, .., and the extras. turn: of calls on other data."""
    rank, n, first = dist.get_rank(), sum(layer.widths), FIRST_SEED * turn
    made: Tensors = {}
    for index in range(layer.products):
        whole = drawn((*layer.shape, layer.k), first + (index if layer.gathers else 10 * rank + index))
        made[f"x{index}"] = own_part(whole, layer.dim) if layer.gathers else whole
    widths = layer.widths * layer.products
    made |= {f"w{i}": drawn((width, layer.k), first + 100 + 10 * rank + i) for i, width in enumerate(widths)}
    of_rank = 50 * rank if layer.gathers else 0  # of sums all ranks have the same
    shapes = {"gate": (n, layer.k), "residual": (*layer.shape, n)}
    for name in layer.extras:
        extra = drawn(shapes.get(name, (n,)), first + 200 + of_rank + len(name))
        made[name] = own_part(extra, layer.dim) if layer.scatters and name == "residual" else extra
    return made


def upstream(layer: Layer, results: list[torch.Tensor], turn: int = 0) -> list[torch.Tensor]:
    """Gradients of the results, in fp64; those of replicated results are the same on every rank."""
    first = FIRST_SEED * turn + 300
    seeds = [first + dist.get_rank() * (layer.gathers or layer.scatters)] * len(results)
    if dict(layer.options).get("return_gathered"):
        seeds[-1] = first
    return [drawn(tuple(each.shape), seed) for each, seed in zip(results, seeds, strict=True)]


def in_dtype(layer: Layer, dtype: torch.dtype, turn: int = 0) -> Tensors:
    """What a rank brings, as leaves of a graph. Data are numbers of bf16, whatever the dtype."""
    given = operands(layer, turn)
    return {name: _strided(each.bfloat16().to(dtype), layer).requires_grad_() for name, each in given.items()}


def with_gradients(layer: Layer, compute: Compute, dtype: torch.dtype, turn: int = 0) -> Tensors:
    """Results and gradients of a layer, by name."""
    tensors = in_dtype(layer, dtype, turn)
    results = compute(layer, tensors)
    wanted = upstream(layer, results, turn)
    torch.autograd.backward(results, [each.bfloat16().to(dtype) for each in wanted])
    told = {f"y{index}": each.detach() for index, each in enumerate(results)}
    return told | {f"gradient of {name}": _gradient(each) for name, each in tensors.items()}


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def errors(layer: Layer, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Of each result and gradient our error, and that of plain torch, in the norm over all ranks. Collective."""
    exact = with_gradients(layer, plain, FP64)
    found, beside = (with_gradients(layer, compute, dtype) for compute in (ours, plain))
    told = {}
    for name, wanted in exact.items():
        assert found[name].shape == wanted.shape, (layer, name)
        assert found[name].is_contiguous() or not name.startswith("y"), (layer, name)
        squares = [(each[name].double() - wanted).square().sum() for each in (found, beside)]
        sums = torch.stack([*squares, wanted.square().sum()])
        dist.all_reduce(sums)
        own_error, torchs = (sums[:2] / sums[2].clamp_min(1e-30)).sqrt().tolist()
        told[name] = own_error, torchs
    return told


def is_too_large(pair: tuple[float, float]) -> bool:
    """Whether an error is more than that of plain torch, by more than rounding's chance."""
    return pair[0] > max(MOST * pair[1], EXACT)


def _strided(tensor: torch.Tensor, layer: Layer) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0] if layer.strided else tensor


def ours(layer: Layer, tensors: Tensors) -> list[torch.Tensor]:
    """The results of `overweave.functional`."""
    xs, ws = (_listed(tensors, letter) for letter in "xw")
    beside: dict[str, Any] = {name: tensors[name] for name in layer.extras if name not in ("bias", "norm")}
    if "norm" in tensors:
        beside["norm"] = RmsNorm(tensors["norm"])
    # Compiled, too, and the compiler of torch 2.10 reads no property of a tuple: not `gathers`.
    if layer.name == "all_gather_linear" and layer.shape[layer.dim] % dist.get_world_size():
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
    act: Act = ACTIVATIONS[options.get("activation")]
    bias, gate, residual = (tensors.get(name) for name in ("bias", "gate", "residual"))
    if layer.gathers:
        whole = gathered(xs[0], layer.dim, layer.shape[layer.dim])
        biases = [None] * len(ws) if bias is None else bias.split(layer.widths)
        products = [functional.linear(whole, w) for w in ws]
        products = [y if b is None else y + b for y, b in zip(products, biases, strict=True)]
        if gate is not None:
            ys = [products[0] * act(functional.linear(whole, gate))]
        else:
            ys = [act(product) for product in products]
        shared = gathered_alike(xs[0], layer.dim, layer.shape[layer.dim])
        found = [*ys, shared] if options.get("return_gathered") else ys
    else:
        product = torch.stack([functional.linear(x, w) for x, w in zip(xs, ws, strict=True)]).sum(0)
        found = [scattered(product, layer.dim) if layer.scatters else reduced(product)]
        found[0] = found[0] if bias is None else found[0] + replicated(bias, layer.scatters)
        found[0] = act(found[0])
    if residual is not None:
        found[0] = found[0] + residual
    if "norm" in tensors:
        weight = replicated(tensors["norm"], layer.scatters)
        found = [functional.rms_norm(found[0], found[0].shape[-1:], weight, 1e-5), found[0]]
    return found


def _listed(tensors: Tensors, letter: str) -> list[torch.Tensor]:
    return [each for name, each in tensors.items() if name[0] == letter and name[1:].isdigit()]


def _flat(results: Any) -> list[torch.Tensor]:
    return [results] if isinstance(results, torch.Tensor) else [one for each in results for one in _flat(each)]


# Both exchanges, forward and backward, held against the same in plain torch, which computes every rank's part here.

Counts = list[list[int]]
Gradients = tuple[torch.Tensor, ...]


def exchanges_off(dtype: torch.dtype, k: int, n: int, most: int) -> Iterator[str]:
    """Which results and gradients are not plain torch's, bit for bit: whole numbers, whose every sum is exact."""
    ranks = dist.get_world_size()
    uneven = [[(source + 2 * target) % (most + 1) for target in range(ranks)] for source in range(ranks)]
    for is_before in (True, False):
        for counts in (None, uneven):
            found, wanted = (
                _ours(is_before, counts, dtype, (k, n, most)),
                _plain(is_before, counts, dtype, (k, n, most)),
            )
            same = [torch.equal(one, other) for one, other in zip(found, wanted, strict=True)]
            yield "" if all(same) else f"exchange {'before' if is_before else 'behind'}, counts {counts}: {same}"


def _drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    whole = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed))
    return whole.to(own_device(), dtype)


def _operands(rank: int, matrix: Counts, dtype: torch.dtype, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """x, w and the gradient of y of a rank."""
    (k, n, _), received = sizes, sum(row[rank] for row in matrix)
    shapes = ((sum(matrix[rank]), k), (k, n), (received, n))
    x, w, dy = (_drawn(shape, 3 * rank + at, dtype) for at, shape in enumerate(shapes))
    return [x.requires_grad_(), w.requires_grad_(), dy]


def _matrix(counts: Counts | None, most: int) -> Counts:
    ranks = dist.get_world_size()
    return counts or [[most] * ranks] * ranks


def _ours(is_before: bool, counts: Counts | None, dtype: torch.dtype, sizes: tuple[int, ...]) -> Gradients:
    """y, and the gradients of x and w. Rows of an exchange behind the matmul are sent in another order."""
    x, w, dy = _operands(dist.get_rank(), _matrix(counts, sizes[2]), dtype, sizes)
    if is_before:
        y = ow.all_to_all_matmul(x, w, counts=counts)
    else:
        y = ow.matmul_all_to_all(x, w, counts=counts, tokens=_order(x))
    return (y.detach(), *torch.autograd.grad(y, (x, w), dy))


def _order(x: torch.Tensor) -> list[int]:
    return list(range(x.shape[0]))[::-1]


def _plain(is_before: bool, counts: Counts | None, dtype: torch.dtype, sizes: tuple[int, ...]) -> Gradients:
    own, matrix = dist.get_rank(), _matrix(counts, sizes[2])
    every: list[Any] = [_operands(rank, matrix, dtype, sizes) for rank in range(dist.get_world_size())]
    sent = [
        x.split(matrix[rank]) if is_before else (x[_order(x)] @ w).split(matrix[rank])
        for rank, (x, w, _) in enumerate(every)
    ]
    ys = [torch.cat([blocks[rank] for blocks in sent]) for rank in range(len(every))]
    ys = [y @ w for y, (_, w, _) in zip(ys, every, strict=True)] if is_before else ys
    x, w, _ = every[own]
    return (ys[own].detach(), *torch.autograd.grad(ys, (x, w), [dy for _, _, dy in every]))
