"""Layers that torch.compile puts into CUDA graphs: whose first call is made there, or eagerly before; of several sizes.

What a first call keeps must lie outside of the graphs' memory pool: torch ends it with an error, or hands the memory to
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import silu

import overweave as ow
from campaigns.gpu_ranks import Check, sharers
from overweave.functional import all_gather_linear, linear_all_reduce, linear_reduce_scatter

MODES, STATES = ("reduce-overhead", "max-autotune"), ("cold", "warm")
ROWS = (40, 64, 40, 24, 64, 40, 40)  # of steps: a size comes back behind others
WIDTH, INNER, STEP = 256, 512, 64
MOST_OFF = 0.03  # of the largest number, in bf16


class Mlp(nn.Module):
    """Two layers, whole on every rank before they are split."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner, bias=False), nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of rows `[m, WIDTH]`."""
        y: torch.Tensor = self.down(silu(self.up(x)))
        return y


class Way(NamedTuple):
    """How a layer's collectives become ours. is_split: whether ranks share rows out. makes: of a whole layer."""

    name: str
    is_split: bool
    makes: Callable[[Mlp], Callable[[torch.Tensor], torch.Tensor]]


def by_functional(is_split: bool, mlp: Mlp) -> Callable[[torch.Tensor], torch.Tensor]:
    """By functions, whose plans are named: ranks that share a GPU have no library that a graph holds."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    up, down = (
        whole.chunk(ranks, dim)[rank].detach().contiguous() for whole, dim in ((mlp.up.weight, 0), (mlp.down.weight, 1))
    )

    def split(x: torch.Tensor) -> torch.Tensor:
        h = silu(all_gather_linear(x, up, plan="push", backward_plan="scatter"))
        return linear_reduce_scatter(h, down, plan="scatter", backward_plan="push")

    return split if is_split else lambda x: linear_all_reduce(silu(x @ up.t()), down, plan="two_shot")


def by_styles(styles: tuple[Any, Any], is_split: bool, mlp: Mlp) -> Callable[[torch.Tensor], torch.Tensor]:
    """By styles for column-parallel and row-parallel layers, torch's or ours."""
    column, row = styles
    rows = Shard(0)
    plan = {
        "up": column(input_layouts=rows) if is_split else column(),
        "down": row(output_layouts=rows) if is_split else row(),
    }
    return parallelize_module(mlp, init_device_mesh("cuda", (dist.get_world_size(),)), plan)


def ways() -> Iterator[Way]:
    """Those that ranks of these GPUs can be asked for."""
    for is_split in (True, False):
        word = "split rows" if is_split else "all rows"
        yield Way(f"functional, {word}", is_split, partial(by_functional, is_split))
        if sharers() == 1:
            ours, torchs = (ow.Colwise, ow.Rowwise), (ColwiseParallel, RowwiseParallel)
            yield Way(f"styles, {word}", is_split, partial(by_styles, ours, is_split))
            yield Way(f"installed, {word}", is_split, partial(by_styles, torchs, is_split))


@contextmanager
def installed(way: Way) -> Iterator[None]:
    """The pass over graphs, where a way needs it."""
    if not way.name.startswith("installed"):
        yield
        return
    ow.install(graphs=True)
    try:
        yield
    finally:
        ow.uninstall()


def step(call: Any, x: torch.Tensor, trains: bool) -> list[torch.Tensor]:
    """The result, and, in training, the gradient of the rows."""
    torch.compiler.cudagraph_mark_step_begin()
    if not trains:
        with torch.no_grad():
            return [call(x).clone()]
    x = x.clone().requires_grad_()
    y = call(x)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    return [y.detach().clone(), x.grad.clone()]


def own_rows(whole: torch.Tensor, way: Way) -> torch.Tensor:
    """What a rank has of all rows."""
    return whole.chunk(dist.get_world_size())[dist.get_rank()].contiguous() if way.is_split else whole


def outcomes(way: Way, mode: str, is_warm: bool, inner: int) -> Iterator[str]:
    """What is wrong with steps of several sizes. inner: a width that no call has had before, if it is to be cold."""
    torch.manual_seed(inner)
    with torch.device("cuda"):
        mlp = Mlp(inner).bfloat16()
    whole = Mlp(inner).cuda().bfloat16()
    whole.load_state_dict(mlp.state_dict())
    torch._dynamo.reset()
    counters.clear()
    with installed(way):
        call = way.makes(mlp)
        compiled = torch.compile(call, mode=mode)
        drawn = torch.Generator("cuda").manual_seed(inner)
        for trains in (False, True) if way.is_split or not way.name.startswith("functional") else (False,):
            for rows in ROWS:
                x = torch.randn(rows, WIDTH, device="cuda", generator=drawn).bfloat16()
                wanted = step(whole, x, trains)
                if is_warm:
                    step(call, own_rows(x, way), trains)
                found = step(compiled, own_rows(x, way), trains)
                mlp.zero_grad()  # those that a graph made are overwritten by its next step
                for one, other in zip(found, (own_rows(each, way) for each in wanted), strict=True):
                    off = float((one - other).abs().max() / other.abs().max())
                    yield "" if off <= MOST_OFF else f"{rows} rows, training {trains}: off by {off:.2g}"
    skipped = counters["inductor"]["cudagraph_skips"]
    yield f"{skipped} graphs of torch's were no CUDA graphs" if skipped else ""


def in_cuda_graphs(modes: Sequence[str]) -> Iterator[Check]:
    """A line for each mode, way and state. Layers have widths of their own, so that a cold one is cold."""
    for number, (mode, way, state) in enumerate(product(modes, ways(), STATES)):
        inner = INNER + STEP * dist.get_world_size() * number
        yield Check(f"{mode}, {state}: {way.name}", partial(outcomes, way, mode, state == "warm", inner))
