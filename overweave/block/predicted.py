"""Predicted time of a transformer block: matmuls beside collectives as the tuner predicts them, and the rest.

Sequential is torch and NCCL at every site. Asynchronous tensor parallelism is a matmul per shard, at the share of the
sites that torch's pass fuses in the block's graph. overweave is what the model chooses for each site, unmeasured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from msgspec import Struct
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from overweave.block.cases import CONTEXT, BlockCase, BlockSizes
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
from overweave.errors import InputError
from overweave.hardware.machine import Machine
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.operators.registry import operator_of
from overweave.ir.problem import Problem
from overweave.schedules.records.outside import OUTSIDE
from overweave.sim.cost import library_matmul_us
from overweave.tuner.model.rank import cold_choice, predictor, rank_candidates
from overweave.tuner.space.shapes import DTYPES, ShapeCase
from overweave.tuner.space.space import families, library_path, reason_unsupported
from overweave.tuner.space.target import Target

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


GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


class PredictedSite(Struct, frozen=True):
    """A collective beside its matmul. plan: overweave's choice. torch_us: None if torch fuses no such operator."""

    name: str
    problem: Problem
    plan: str
    sequential_us: float
    torch_us: float | None
    overweave_us: float


class PredictedBlock(Struct, frozen=True):
    """The predicted times of a case, in microseconds. rest_us: matmuls without a collective, attention, norms and the
    like. fused: how many of the sites torch's pass fuses."""

    case: str
    sites: tuple[PredictedSite, ...]
    rest_us: float
    fused: FusedCounts

    @property
    def sequential_us(self) -> float:
        """Return the time with NCCL's collectives and matmuls in sequence."""
        return self.rest_us + sum(site.sequential_us for site in self.sites)

    @property
    def torch_us(self) -> float:
        """Return the time with torch's asynchronous tensor parallelism."""
        return self.rest_us + sum(map(self._by_torch_us, self.sites))

    @property
    def overweave_us(self) -> float:
        """Return the time with the model's choices."""
        return self.rest_us + sum(site.overweave_us for site in self.sites)

    def _by_torch_us(self, site: PredictedSite) -> float:
        """Return the time of a site, at the share of the sites of its kind that torch fuses."""
        gathers = site.problem.record.gathers
        sites = sum(other.problem.record.gathers == gathers for other in self.sites)
        share = (self.fused.gathers if gathers else self.fused.scatters) / sites
        if site.torch_us is None:
            return site.sequential_us
        return share * site.torch_us + (1 - share) * site.sequential_us


def predicted(case: BlockCase, ranks: int, target: Target, fused: FusedCounts) -> PredictedBlock:
    """Return the predicted times of a case. Raises InputError if the machine has fewer GPUs than ranks."""
    machine = target.machine(ranks)
    if machine is None:
        found = f"{target.found.machine} cannot have {ranks} GPUs"
        raise InputError("bench block --simulate", found, "Ask for fewer ranks, or another machine")
    case.check(ranks)
    sites = tuple(_site(name, problem, target) for name, problem in _problems(case, ranks))
    return PredictedBlock(case.name, sites, _rest_us(case, ranks, machine), fused)


def _site(name: str, problem: Problem, target: Target) -> PredictedSite:
    """Return the predicted times of one site: sequential, by torch, and by overweave's choice."""
    predict, operator = predictor(problem, target), problem.operator
    choice = cold_choice(
        rank_candidates(problem, target, is_thorough=False), problem, target.found.doubt, bool(target.parted)
    )
    like = {each.like: each for name in problem.record.baselines if (each := OUTSIDE.get(name)) is not None}
    by_torch = next((family.first for family in families(operator) if family.plan in like), None)
    least_us = 0.0 if by_torch is None else like[by_torch.plan].least_host_us  # however quick its pieces are
    is_able = by_torch is not None and not reason_unsupported(problem, target, by_torch)
    torch_us = predict(by_torch, inf) if by_torch is not None and is_able else None
    return PredictedSite(
        name=name,
        problem=problem,
        plan=str(choice.candidate),
        sequential_us=_known(predict(library_path(operator), inf)),
        torch_us=None if torch_us is None else max(torch_us, least_us),
        overweave_us=_known(predict(choice.candidate, inf)),
    )


def _known(us: float | None) -> float:
    assert us is not None, "the model has no time of a plan that it chooses"
    return us


def _matmuls(case: BlockCase) -> Iterator[tuple[str, ShapeCase, bool]]:
    """Yield each matmul of the forward, of all ranks together: its name, sizes, and whether it ends half of the
    block."""
    sizes, rows = case.sizes, case.tokens
    kv = sizes.kv_heads * sizes.head
    columns, inner = (sizes.width, kv, kv), (sizes.inner, sizes.inner)
    yield "attention.qkv", ShapeCase("qkv", rows, sum(columns), sizes.width, columns), False
    yield "attention.o", ShapeCase("o", rows, sizes.width, sizes.width), True
    yield "mlp.gate_up", ShapeCase("gate_up", rows, sum(inner), sizes.width, inner), False
    yield "mlp.down", ShapeCase("down", rows, sizes.width, sizes.inner), True


def _problems(case: BlockCase, ranks: int) -> Iterator[tuple[str, Problem]]:
    """Yield the matmuls beside a collective: of the forward and, in training, of the gradients of inputs."""
    for name, sizes, is_end in _matmuls(case):
        if case.work == "decoding":
            if is_end:
                yield name, sizes.problem(REDUCE, ranks, "bf16")
            continue
        operator = SCATTER if is_end else GATHER
        yield name, sizes.problem(operator, ranks, "bf16")
        if case.work == "training":
            dual = operator_of(operator).dual
            assert dual
            yield f"{name}.backward", ShapeCase(name, sizes.m, sizes.k, sizes.n).problem(dual, ranks, "bf16")


def _rest_us(case: BlockCase, ranks: int, machine: Machine) -> float:
    """Return the time that all ways share.

    That is: gradients of weights and, in decoding, matmuls of each rank alone, and attention, all at cuBLAS' rate; and
    by bytes read and written: keys and values that decoding reads, norms, residuals, rotary embeddings and SwiGLU. A
    backward takes twice as long as its forward.
    """
    sizes, dtype = case.sizes, DTYPES["bf16"]
    is_decoding = case.work == "decoding"
    alone_us = 0.0
    for _, matmul, is_end in _matmuls(case):
        n, k = (matmul.n, matmul.k // ranks) if is_end else (matmul.n // ranks, matmul.k)
        if case.work == "training":
            alone_us += library_matmul_us(machine, (k, n, matmul.m), dtype)
        if is_decoding and not is_end:
            alone_us += library_matmul_us(machine, (matmul.m, n, k), dtype)
    columns = sizes.width // ranks
    # Queries by keys, then by values; of a causal mask half.
    attention_us = 0.0 if is_decoding else library_matmul_us(machine, (case.tokens, case.length, columns), dtype)
    rows = case.tokens if is_decoding else case.tokens // ranks
    moved_elements = rows * 2 * (2 + 3) * sizes.width  # norms read and write; residuals read twice and write
    moved_elements += case.tokens * (
        2 * 2 * columns + 3 * sizes.inner // ranks
    )  # rotations of queries and keys; SwiGLU
    moved_elements += is_decoding * case.tokens * CONTEXT * 2 * sizes.kv_heads * sizes.head // ranks
    each_us = attention_us + moved_elements * ITEMSIZE_BYTES[dtype] / machine.hbm.gb_per_s / 1e3
    return alone_us + (3 if case.work == "training" else 1) * each_us
