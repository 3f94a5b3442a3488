"""Are layers right on GPUs, forward and backward, eager and replayed, and does nothing grow?

    torchrun --standalone --nproc-per-node 4 -m campaigns.gpu_torch [--only all_reduce] [--model | --soak [CALLS]]
    torchrun --standalone --nproc-per-node 2 -m campaigns.gpu_torch --only reduce-overhead

errors: results and gradients of every form in bf16, held against fp64 autograd: at most 1.05 times the error of torch's
collectives in bf16. exchanges: those of whole numbers are exact. replayed: forward and backward in one CUDA graph,
whose inputs change between replays: the same bits as the same calls made one by one. reduce-overhead, max-autotune:
layers, styles and install(graphs=True) in the CUDA graphs of torch.compile, called there first or eagerly before, with
sizes that change: values of eager torch; of ranks that share a GPU, layers with named plans alone. --model: instead, a
Llama trains for 200 steps and generates 64 tokens in a CUDA graph (gpu_models.py). --soak: instead, so many layers
forward and backward, in every form by turns: memory of the GPU, open files and threads stay what they are after the
first hundred.
Of layers plans are named, since ranks that share a GPU have gloo as their library, which no graph holds; for the
same reason no layer there gathers its shard again by the library.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.distributed as dist

from campaigns.exact.calls import captured
from campaigns.gpu_ranks import Check, arguments, run_campaign, sharers
from campaigns.torch.gpu_models import whole_models
from campaigns.torch.in_cuda_graphs import MODES, in_cuda_graphs
from campaigns.torch.layers import Layer, Tensors, errors, exchanges_off, in_dtype, is_too_large, ours, upstream

GATHER, SCATTER, REDUCE = "push", "scatter", "two_shot"
wide = partial(Layer, widths=(512,), k=256)
WARM, STEPS, STEPS_OF_MODEL = 100, 20, 200
DRAWN = 3  # sets of inputs that replays meet by turns


def layers() -> Iterator[Layer]:
    """Every form, by named plans."""
    gather = (("plan", GATHER), ("backward_plan", SCATTER))
    for save in ("gathered", "columns", "shard"):
        options = (("save", save), *gather)
        yield wide("all_gather_linear", (512,), 0, extras=("bias",), options=options)
        yield Layer("all_gather_linear", (2, 512), 1, (256, 72, 56), 1, (), options, k=256)
    gated = (*gather, ("activation", "silu"))
    yield wide("all_gather_linear", (512, 2), 0, extras=("gate", "residual"), options=gated)
    yield wide("all_gather_linear", (500,), 0, extras=("bias",), options=gather)
    scatter = (("plan", SCATTER), ("backward_plan", GATHER))
    ending = (*scatter, ("activation", "gelu"))
    for products in (1, 3):
        yield Layer("linear_reduce_scatter", (2, 512), 1, (512,), products, ("bias", "residual"), scatter, k=256)
    yield wide("linear_reduce_scatter", (500,), 0, extras=("bias",), options=ending)
    for extras in (("bias", "residual"), ("norm", "residual")):
        yield wide("linear_all_reduce", (2, 250), 0, extras=extras, options=(("plan", REDUCE),))
    yield wide("linear_all_reduce", (500,), products=2, extras=("bias",), options=(("plan", REDUCE),))
    yield wide("linear_reduce_scatter", (500,), 0, extras=("norm", "residual"), options=scatter)


def too_large(layer: Layer) -> Iterator[str]:
    """What is further from fp64 than plain torch is; empty where nothing is."""
    for name, pair in errors(layer, torch.bfloat16).items():
        yield f"{layer} {name}: error {pair[0]:.3g}, of torch {pair[1]:.3g}" if is_too_large(pair) else ""


def in_bf16(layer: Layer, turn: int) -> tuple[Tensors, Tensors]:
    """A rank's tensors, and gradients of its results, by name."""
    given = in_dtype(layer, torch.bfloat16, turn)
    with torch.no_grad():
        results = ours(layer, given)
    return given, {str(index): each.bfloat16() for index, each in enumerate(upstream(layer, results, turn))}


def step(layer: Layer, given: Tensors, wanted: Tensors) -> tuple[torch.Tensor, ...]:
    """Results and gradients of a layer, each at a place of its own: that of a residual is the one of the result."""
    results = ours(layer, given)
    gradients = torch.autograd.grad(results, [*given.values()], [*wanted.values()])
    return (*(each.detach() for each in results), *(each.clone() for each in gradients))


def replayed(layer: Layer, replays: int) -> Iterator[str]:
    """Where replays of a layer's forward and backward differ from the same calls made one by one."""
    sets = [in_bf16(layer, turn) for turn in range(DRAWN)]
    eager = [[each.clone() for each in step(layer, *one)] for one in sets]
    given, wanted = ({name: each.detach().clone() for name, each in part.items()} for part in sets[0])
    replay = captured(partial(step, layer, {name: each.requires_grad_() for name, each in given.items()}, wanted))
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(replays):
        for places, data in zip((given, wanted), sets[turn % DRAWN], strict=True):
            for name, place in places.items():
                place.detach().copy_(data[name].detach())
        found = replay()
        for result, exact in zip(found, eager[turn % DRAWN], strict=True):
            differing += (result != exact).any()
    torch.cuda.synchronize()
    yield f"{layer}: {int(differing)} results differ" if int(differing) else ""


def held() -> tuple[int, int, int, int]:
    """Bytes that torch has of the GPU, those that all of this process has, open files, threads."""
    torch.cuda.synchronize()
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    reserved = torch.cuda.memory_reserved()
    return torch.cuda.memory_allocated(), reserved, open_files, threading.active_count()


def soaked(calls: int) -> Iterator[str]:
    """What has grown over so many layers, forward and backward."""
    every = [(layer, *in_bf16(layer, 0)) for layer in layers()]
    for layer, given, wanted in islice(cycle(every), max(WARM, 2 * len(every))):
        step(layer, given, wanted)
    before = held()
    for number, (layer, given, wanted) in enumerate(islice(cycle(every), calls)):
        step(layer, given, wanted)
        if number % (calls // STEPS or 1) == 0 and dist.get_rank() == 0:
            print(f"    {number:6d} layers: bytes, bytes reserved, files, threads {held()}", flush=True)
    after = held()
    yield "" if after == before else f"bytes, bytes reserved, files, threads: {before} before, {after} after"


def asks_library(layer: Layer) -> bool:
    """Whether its gradients need a collective of the library, which no graph holds where gloo is the library."""
    sums_norm = layer.name == "linear_reduce_scatter" and "norm" in layer.extras
    return sums_norm or ("save", "shard") in layer.options


def checks(asked: argparse.Namespace) -> Iterator[Check]:
    """A line for each form."""
    if asked.model:
        yield from whole_models(STEPS_OF_MODEL)
        return
    if asked.soak:
        yield Check(f"soak: {asked.soak} layers", partial(soaked, asked.soak), asked.soak)
        return
    yield from in_cuda_graphs(asked.modes)
    yield Check("exchanges: results and gradients", partial(exchanges_off, torch.bfloat16, 256, 512, 128))
    for layer in layers():
        words = " ".join(map(str, (*layer.shape, *layer.extras, *(value for _, value in layer.options))))
        name = f"{layer.name} x{layer.products} {words}"
        yield Check(f"errors: {name}", partial(too_large, layer))
        if sharers() == 1 or not asks_library(layer):
            yield Check(f"replayed: {name}", partial(replayed, layer, asked.replays))


def main() -> None:
    parser = arguments(__doc__ or "", deadline_s=30)
    parser.add_argument("--replays", type=int, default=100, help="of each captured layer")
    parser.add_argument("--model", action="store_true", help="a whole model instead")
    parser.add_argument("--soak", type=int, nargs="?", const=10_000, default=0, help="so many layers instead")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=MODES, help="of torch.compile; default: both")
    run_campaign(parser, checks)


if __name__ == "__main__":
    main()
