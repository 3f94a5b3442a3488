"""Is a Llama's block with overweave as quick and as small as plain torch's, where nothing travels? One process, a GPU.

    python -m campaigns.torch_block [--models 8b 70b] [--tokens 64 256 1024 4096 8192]

Blocks are whole, and the shards of four ranks with communication left out: a group of one. forward, training: the block
under overweave's styles, its plans chosen, beside the same `nn.Linear`s alone; up to 512 tokens both as captured
graphs. fused: from 4,096 tokens on, its linear layers alone by overweave's kernels, named, beside torch's matmuls.
memory: what a training step has of torch's allocator at most, weights included; the workspace lies outside of it. host:
of an eager call of a small layer, beyond its prepared plan, without and with gradients to record. On a CPU nothing of
this is judged but that results agree.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import linear, silu

import overweave as ow
from campaigns.verdict import Verdict, tell
from overweave.block.cases import BlockSizes
from overweave.block.llama import COLUMNS, ROWS, TransformerBlock, styles
from overweave.functional import all_gather_linear, linear_all_reduce, linear_reduce_scatter
from overweave.memory.group import Group
from overweave.ops.call.prepared import CALLS, Tensors
from overweave.tuner.measure.bench import join_world
from overweave.tuner.measure.timer import Effort, capture_graphs, compare, is_replayed, paired_ratio, with_graph_warmup
from overweave.tuner.measure.trial import agrees

SLOWER, LARGER, FORWARD_US, RECORDED_US = 1.02, 1.03, 5.0, 15.0  # at most
TOKENS, RANKS, FUSED_FROM = (64, 256, 1024, 4096, 8192), (1, 4), 4096
GATHER, SCATTER = "push", "scatter"
LLAMAS = {"8b": BlockSizes(4096, 14336, 32, 8), "70b": BlockSizes(8192, 28672, 64, 8)}
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
BURST, SMALL = 10, (64, 512)
Call = Callable[[int], Any]


class Here(NamedTuple):
    """Where blocks run. effort: of timing. bursts: of calls, whose host time counts."""

    device: torch.device
    group: Group
    effort: Effort
    bursts: int = 30

    def bar(self, holds: bool) -> bool | None:
        """A verdict on a time or on memory; None on a CPU, where they say nothing."""
        return holds if self.device.type == "cuda" else None

    def ratio(self, tokens: int, calls: Sequence[Call]) -> float:
        """How much longer the second call takes than the first, which has run. Of few tokens both are graphs."""
        timed = [capture_graphs(call) for call in calls] if is_replayed(self.device, tokens) else calls
        named = dict(zip(("plain", "ours"), timed, strict=True))
        times = compare(named, self.device, None, with_graph_warmup(self.effort, self.device)).device_us
        return paired_ratio(times["ours"], times["plain"]).value


class Pair(NamedTuple):
    """A rank's part of a block: by torch alone, and under overweave's styles in a group of one."""

    plain: nn.Module
    ours: nn.Module

    @classmethod
    def of(cls, sizes: BlockSizes, ranks: int, here: Here) -> Pair:
        """ranks: of whom the part is one's."""
        torch.manual_seed(0)
        with here.device:
            block = TransformerBlock(sizes).bfloat16()
        for name in (*COLUMNS, *ROWS):
            layer: Any = block.get_submodule(name)
            layer.weight = nn.Parameter(layer.weight.detach().chunk(ranks, int(name in ROWS))[0].clone())
            layer.out_features, layer.in_features = layer.weight.shape
        mesh = DeviceMesh.from_group(here.group.process_group, here.device.type)
        return cls(block, parallelize_module(copy.deepcopy(block), mesh, styles(is_split=True, by_overweave=True)))


def forward(block: nn.Module, x: torch.Tensor, turn: int = 0) -> torch.Tensor:
    """The result of a block."""
    with torch.no_grad():
        result: torch.Tensor = block(x)
        return result


def trained(block: nn.Module, x: torch.Tensor, turn: int = 0) -> tuple[torch.Tensor, ...]:
    """Forward and backward: the gradients of the rows; those of weights are made anew."""
    block.zero_grad(set_to_none=True)
    y = block(x)
    return torch.autograd.grad(y, (x, *block.parameters()), y.detach())[:1]


def peak(block: nn.Module, x: torch.Tensor) -> int:
    """What a training step has allocated at most, its weights included, in bytes of torch's allocator."""
    trained(block, x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trained(block, x)
    return torch.cuda.max_memory_allocated() - before + sum(each.numel() * 2 for each in block.parameters())


def of_block(pair: Pair, tokens: int, width: int, here: Here) -> Iterator[tuple[str, str, bool | None]]:
    """What is asked of a block on so many tokens, what was found, and whether it holds."""
    x = torch.randn(1, tokens, width, device=here.device, dtype=torch.bfloat16)
    leaf = x.clone().requires_grad_()
    for word, run, rows in (("forward", forward, x), ("training", trained, leaf)):
        calls: list[Call] = [partial(run, each, rows) for each in pair]
        plain, ours = (call(0) for call in calls)
        if not agrees(ours, plain):
            yield word, "other results than plain torch's", False
            continue
        ratio = here.ratio(tokens, calls)
        yield word, f"{ratio:.3f} of plain torch's time", here.bar(ratio <= SLOWER)
    if here.device.type == "cuda":
        plain_bytes, own_bytes = (peak(each, leaf) for each in pair)
        told = f"{own_bytes / plain_bytes:.3f} of {plain_bytes / 2**20:.0f} MiB"
        beside = ow.memory_report().symmetric_bytes / 2**20
        yield "memory", f"{told}, workspace {beside:.0f} MiB", own_bytes <= LARGER * plain_bytes


def of_linears(block: nn.Module, tokens: int, here: Here) -> Iterator[tuple[str, str, bool | None]]:
    """The linear layers alone, each on rows of its own: by overweave's kernels, and by torch."""
    layers: dict[str, Any] = {name.split(".")[1]: block.get_submodule(name) for name in (*COLUMNS, *ROWS)}
    w = {name: layer.weight.detach() for name, layer in layers.items()}
    x, y, z = (
        torch.randn(tokens, w[name].shape[1], device=here.device, dtype=torch.bfloat16) for name in ("q", "o", "down")
    )

    def by_kernels(turn: int = 0) -> tuple[torch.Tensor, ...]:
        q, k, v = all_gather_linear(x, [w["q"], w["k"], w["v"]], plan=GATHER)
        h = all_gather_linear(x, w["up"], gate=w["gate"], activation="silu", plan=GATHER)
        return (
            q, k, v, h,
            linear_reduce_scatter(y, w["o"], plan=SCATTER), linear_reduce_scatter(z, w["down"], plan=SCATTER),
        )  # fmt: skip

    def by_torch(turn: int = 0) -> tuple[torch.Tensor, ...]:
        q, k, v = (linear(x, w[name]) for name in "qkv")
        return q, k, v, silu(linear(x, w["gate"])) * linear(x, w["up"]), linear(y, w["o"]), linear(z, w["down"])

    with torch.no_grad():
        if not agrees(by_kernels(), by_torch()):
            yield "fused", "other results than plain torch's", False
            return
        ratio = here.ratio(tokens, (by_torch, by_kernels))
    yield "fused", f"{ratio:.3f} of the time of torch's matmuls", here.bar(ratio <= SLOWER)


def of_host(here: Here) -> Iterator[tuple[str, str, bool | None]]:
    """What an eager call of each layer takes of the host beyond its prepared plan."""
    tokens, width = SMALL
    x, weight = (
        torch.randn(rows, width, device=here.device, dtype=torch.bfloat16).requires_grad_() for rows in (tokens, width)
    )
    for layer in (all_gather_linear, linear_reduce_scatter, linear_all_reduce):
        call = partial(layer, x, weight)
        for word, records, most in (("host", False, FORWARD_US), ("host, recorded", True, RECORDED_US)):
            with torch.set_grad_enabled(records):
                launch = planned(call, here)
                beyond_us = host_us(call, here)
            with torch.no_grad():
                beyond_us -= host_us(launch, here)
            told = f"{layer.__name__}: {beyond_us:.1f} us beyond its plan, at most {most:g}"
            yield word, told, here.bar(beyond_us <= most)


def planned(call: Callable[[], Any], here: Here) -> Callable[[], Any]:
    """The prepared plan of a call on the call's own tensors, results included."""
    call()
    prepared = CALLS[here.group.process_group].latest()
    run, kept = prepared.run, dict[str, torch.Tensor]()

    def note(tensors: Tensors) -> None:
        kept.update({name: each.detach() for name, each in tensors.items()})
        run(tensors)

    prepared.run = note
    try:
        call()
    finally:
        prepared.run = run
    return lambda: prepared(dict(kept))


def host_us(call: Callable[[], Any], here: Here) -> float:
    """Of one call, in the median burst that nobody waits for."""

    def burst() -> float:
        start_ns = time.perf_counter_ns()
        for _ in range(BURST):
            call()
        took_ns = time.perf_counter_ns() - start_ns
        if here.device.type == "cuda":
            torch.cuda.synchronize()
        return took_ns / BURST / 1e3

    return median([burst() for _ in range(2 * here.bursts)][here.bursts :])


def verdicts(models: dict[str, BlockSizes], tokens: Sequence[int], here: Here) -> Iterator[Verdict]:
    """A line for each bar."""
    for name, sizes in models.items():
        for ranks in RANKS:
            pair = Pair.of(sizes, ranks, here)
            for rows in tokens:
                found = [*of_block(pair, rows, sizes.width, here)]
                if rows >= FUSED_FROM or here.device.type == "cpu":
                    found += of_linears(pair.plain, rows, here)
                for word, told, holds in found:
                    yield Verdict(f"{name:4s} a rank of {ranks}, {rows:5d} tokens, {word:8s}", told, holds)
            del pair
    for word, told, holds in of_host(here):
        yield Verdict(word, told, holds)


def main(words: Sequence[str] | None = None) -> int:
    """Prints a line for each bar; 1 if one is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*LLAMAS], default=[*LLAMAS])
    parser.add_argument("--tokens", nargs="+", type=int, default=[*TOKENS])
    asked = parser.parse_args(words)
    os.environ.update({"MASTER_PORT": "0", **ALONE})
    with join_world("cuda" if torch.cuda.is_available() else "cpu") as group:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        models = {name: LLAMAS[name] for name in asked.models}
        codes = [tell([each]) for each in verdicts(models, asked.tokens, Here(device, group, Effort(host_calls=0)))]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
