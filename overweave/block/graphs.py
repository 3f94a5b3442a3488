"""Which collectives of a block torch's pass over compiled graphs fuses: found by running the pass, without GPUs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from overweave.block.cases import BlockCase, BlockSizes
from overweave.block.llama import TransformerBlock, styles
from overweave.compat.torch_names import (
    FakeStore,
    V,
    aot_autograd,
    config,
    detect_fake_mode,
    make_boxed_func,
    min_cut_rematerialization_partition,
    post_grad_passes,
    reset,
    select_decomp_table,
    symmetric_memory,
    view_to_reshape,
)

HEAD, LENGTH = 8, 4  # columns of a head and rows of a rank, of the small block that is compiled for any size
_FUSED = ("fused_all_gather", "fused_matmul_reduce_scatter")
_LOG = logging.getLogger("torch._inductor.fx_passes.micro_pipeline_tp")
Graphs = list[torch.fx.GraphModule]


def backend(graphs: Graphs, is_run: bool = True) -> Callable[..., Any]:
    """Return a backend with Inductor's passes over graphs and none of its code generation; it appends to `graphs`.
    is_run: graphs run operator by operator; else they return empty tensors of the right shapes."""

    def compiled(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        view_to_reshape(module)  # as Inductor does, and torch's pass over tensor parallelism expects
        with V.set_fake_mode(detect_fake_mode(inputs)):
            post_grad_passes(module, is_inference=False)
        module.graph.lint()
        module.recompile()
        graphs.append(module)
        return module.forward if is_run else _shapes_of(module)

    traced: Callable[..., Any] = aot_autograd(
        fw_compiler=compiled,
        bw_compiler=compiled,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    return traced


class FusedCounts(NamedTuple):
    """How many collectives beside matmuls a pass has fused in a block's graphs."""

    gathers: int
    scatters: int


def fused_by_torch(case: BlockCase, ranks: int) -> FusedCounts:
    """Return what torch's pass fuses in a compiled block: forward and, of training, backward.

    A small block of as many sequences stands for the case: fusion depends on the form only. It initialises a fake
    process group, so this process may have no other.
    """
    sizes = BlockSizes(HEAD * ranks, 2 * HEAD * ranks, ranks, ranks)
    graphs: Graphs = []
    with _fake_world(ranks), config.patch(_micro_pipeline_tp=True):
        reset()
        mesh = init_device_mesh("cpu", (ranks,))
        is_split = case.work != "decoding"
        block = parallelize_module(TransformerBlock(sizes).float(), mesh, styles(is_split, by_overweave=False))
        shape = case.sequences if is_split else 1, LENGTH, sizes.width
        x = torch.ones(shape, dtype=torch.float32, requires_grad=case.work == "training")
        with torch.set_grad_enabled(case.work == "training"):
            y = torch.compile(block, backend=backend(graphs, is_run=False), dynamic=False)(x)
        if case.work == "training":
            y.sum().backward()
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    return FusedCounts(*(sum(name.startswith(f"symm_mem.{kind}") for name in names) for kind in _FUSED))


@contextmanager
def _fake_world(ranks: int) -> Iterator[None]:
    """Initialise a fake world in which this process is rank 0, and patch the checks for NCCL that torch's pass
    makes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with (
            patch.object(dist, "is_nccl_available", lambda: True),
            patch.object(_LOG, "disabled", True),  # it warns where it fuses nothing
            patch.object(symmetric_memory, "is_symm_mem_enabled_for_group", lambda group: True),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _shapes_of(module: torch.fx.GraphModule) -> Callable[..., list[Any]]:
    """Return a function that returns empty tensors with the shapes of a graph's results."""
    results: Any = module.graph.output_node().args[0]

    def empty(node: Any) -> Any:
        value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)

    boxed: Callable[..., list[Any]] = make_boxed_func(lambda *_: [empty(node) for node in results])
    return boxed
