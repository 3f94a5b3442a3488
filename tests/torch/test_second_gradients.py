"""Gradients of gradients: `create_graph=True` of every form of layer, against the graph of all ranks in one process."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import overweave as ow
from campaigns.torch.layers import ACTIVATIONS, FP64, Layer, Tensors, drawn, operands, ours
from tests.ranks import run_ranks
from tests.torch.test_bad import raised
from tests.torch.test_gradients import gathers

pytestmark = pytest.mark.slow
MOST = 1e-4  # of the largest element, in fp32
LAYERS = (
    gathers((6,), extras=("bias",), widths=(12, 8)),
    gathers((2, 5), 1, "shard", extras=("gate", "residual"), activation="silu", widths=(12,)),
    gathers((7, 2), 0, "shard", widths=(12,), return_gathered=True),
    Layer("linear_reduce_scatter", (2, 6), 1, (12,), products=2, extras=("bias", "residual")),
    Layer("linear_reduce_scatter", (5,), 0, (12,), extras=("norm", "residual")),
    Layer("linear_reduce_scatter", (6,), 0, (12,), extras=("bias",), options=(("activation", "gelu"),)),
    Layer("linear_all_reduce", (2, 3), 0, (12,), products=2, extras=("bias", "residual")),
    Layer("linear_all_reduce", (5,), 0, (12,), extras=("norm",)),
)


def is_replicated(layer: Layer, name: str) -> bool:
    """Whether ranks have one tensor of that name, whose gradient is whole on each."""
    return not layer.gathers and (name in ("bias", "norm") or (name == "residual" and not layer.scatters))


def leaves_of(layer: Layer, rank: int, dtype: torch.dtype) -> Tensors:
    with patch.object(dist, "get_rank", return_value=rank):
        return {name: each.to(dtype).requires_grad_() for name, each in operands(layer).items()}


def weighed(tensors: dict[str, torch.Tensor]) -> Any:
    """A function of tensors with a third derivative; what stands for a tensor in it follows from its name."""
    return sum(
        (each.tanh() * drawn(tuple(each.shape), crc32(name.encode())).to(each.dtype)).sum()
        for name, each in tensors.items()
    )


def named(layer: Layer, rank: int, tensors: Tensors) -> Tensors:
    """By names that are those of all ranks for what ranks have alike."""
    return {name if is_replicated(layer, name) else f"{rank} {name}": each for name, each in tensors.items()}


def results_by_name(layer: Layer, rank: int, results: list[torch.Tensor]) -> Tensors:
    alike = [not layer.gathers and not layer.scatters] * len(results)
    if dict(layer.options).get("return_gathered"):
        alike[-1] = True
    return {
        f"y{index}" if is_alike else f"{rank} y{index}": each
        for index, (each, is_alike) in enumerate(zip(results, alike, strict=True))
    }


def second_gradients(leaves: Tensors, results: Tensors) -> Tensors:
    """Of a function of all first gradients of a function of the results."""
    first = torch.autograd.grad(weighed(results), list(leaves.values()), create_graph=True)
    second = weighed(dict(zip(leaves, first, strict=True)))
    return dict(zip(leaves, torch.autograd.grad(second, list(leaves.values())), strict=True))


def results_of_all(layer: Layer, every: list[Tensors]) -> list[list[torch.Tensor]]:
    """Of each rank, in plain torch. every: the leaves of each."""
    options = dict(layer.options)
    act = ACTIVATIONS[options.get("activation")]
    if layer.gathers:
        whole = torch.cat([each["x0"] for each in every], layer.dim)
        return [_gathered(layer, own, whole, act) for own in every]
    own = every[0]
    sums: Any = sum(functional.linear(each[f"x{i}"], each[f"w{i}"]) for each in every for i in range(layer.products))
    y = act(sums + own.get("bias", torch.zeros(())))
    if "residual" in own:
        y = y + (torch.cat([each["residual"] for each in every], layer.dim) if layer.scatters else own["residual"])
    found = [functional.rms_norm(y, y.shape[-1:], own["norm"], 1e-5), y] if "norm" in own else [y]
    parts = [each.chunk(len(every), layer.dim) if layer.scatters else [each] * len(every) for each in found]
    return [[each[rank] for each in parts] for rank in range(len(every))]


def _gathered(layer: Layer, own: Tensors, whole: torch.Tensor, act: Any) -> list[torch.Tensor]:
    options = dict(layer.options)
    ws = [own[f"w{index}"] for index in range(len(layer.widths))]
    biases = own["bias"].split(layer.widths) if "bias" in own else [torch.zeros(())] * len(ws)
    ys = [functional.linear(whole, w) + bias for w, bias in zip(ws, biases, strict=True)]
    ys = [ys[0] * act(functional.linear(whole, own["gate"]))] if "gate" in own else [act(y) for y in ys]
    ys[0] = ys[0] + own.get("residual", torch.zeros(()))
    return [*ys, whole] if options.get("return_gathered") else ys


def wanted_of(layer: Layer) -> Tensors:
    """The second gradients of this rank's leaves, by one graph of all ranks' in fp64."""
    ranks = range(dist.get_world_size())
    every = [leaves_of(layer, rank, FP64) for rank in ranks]
    for own in every:
        own.update({name: each for name, each in every[0].items() if is_replicated(layer, name)})
    leaves: Tensors = {}
    results: Tensors = {}
    for rank, found in enumerate(results_of_all(layer, every)):
        leaves |= named(layer, rank, every[rank])
        results |= results_by_name(layer, rank, found)
    own_names = named(layer, dist.get_rank(), every[dist.get_rank()])
    return {name: each for name, each in second_gradients(leaves, results).items() if name in own_names}


def differences(got: Tensors, wanted: Tensors) -> list[str]:
    off = {name: (each - wanted[name]).abs().max() / wanted[name].abs().max() for name, each in got.items()}
    return [f"{name}: off by {each.item():.2g}" for name, each in off.items() if not each < MOST]


def wrong_of_layers() -> list[str]:
    """For `run_ranks`: what is not as in one process, by layer and tensor."""
    found, rank = [], dist.get_rank()
    for layer in LAYERS:
        own = leaves_of(layer, rank, torch.float32)
        results = results_by_name(layer, rank, ours(layer, own))
        got = second_gradients(named(layer, rank, own), results)
        found += [f"{layer.name} {layer.extras} {each}" for each in differences(got, wanted_of(layer))]
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_second_gradients_are_those_of_one_process(world_size: int):
    assert run_ranks(wrong_of_layers, world_size) == [[]] * world_size


def exchanged_rows(xs: list[torch.Tensor], counts: list[list[int]]) -> list[torch.Tensor]:
    """Of each rank, the blocks that all have for it."""
    blocks = [x.split(sent) for x, sent in zip(xs, counts, strict=True)]
    return [torch.cat([sent[rank] for sent in blocks]) for rank in range(len(xs))]


def wrong_of_exchanges(name: str) -> list[str]:
    """For `run_ranks`: of an all-to-all before or behind a matmul, of uneven blocks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    counts = [[(source + 2 * target) % 4 for target in range(ranks)] for source in range(ranks)]
    xs = [drawn((sum(sent), 6), each).requires_grad_() for each, sent in enumerate(counts)]
    ws = [drawn((6, 5), 100 + each).requires_grad_() for each in range(ranks)]
    if name == "all_to_all_matmul":
        ys = [x @ w for x, w in zip(exchanged_rows(xs, counts), ws, strict=True)]
    else:
        ys = exchanged_rows([x @ w for x, w in zip(xs, ws, strict=True)], counts)
    leaves = {f"{each} {letter}": every[each] for letter, every in (("x", xs), ("w", ws)) for each in range(ranks)}
    wanted = second_gradients(leaves, {f"{each} y0": y for each, y in enumerate(ys)})
    own = {f"{rank} {letter}": each[rank].detach().float().requires_grad_() for letter, each in (("x", xs), ("w", ws))}
    y = getattr(ow, name)(*own.values(), counts=counts)
    return differences(second_gradients(own, {f"{rank} y0": y}), wanted)


@pytest.mark.parametrize("name", ["all_to_all_matmul", "matmul_all_to_all"])
def test_second_gradients_of_exchanges(name: str):
    assert run_ranks(wrong_of_exchanges, 3, name) == [[]] * 3


def what_is_refused() -> list[str]:
    """Of options that keep gathered rows without their history."""
    found = []
    for options in ({"save": "columns"}, {"return_gathered": True}):
        x, w = torch.ones(4, 16, requires_grad=True), torch.ones(8, 16, requires_grad=True)
        y = ow.functional.all_gather_linear(x, w, **options)
        y = y[0] if isinstance(y, tuple) else y
        found.append(raised(lambda y=y, x=x: torch.autograd.grad(y.sum(), x, create_graph=True))[1])
    return found


def test_what_has_no_history_is_refused():
    for columns, returned in run_ranks(what_is_refused, 2):
        assert "save='columns'" in columns
        assert "return_gathered" in returned
