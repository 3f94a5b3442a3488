"""Predicted time of a transformer block: matmuls beside collectives as the tuner predicts them, and the rest.

Sequential is torch and NCCL at every site. Asynchronous tensor parallelism is a matmul per shard, at the share of the
sites that torch's pass fuses in the block's graph. overweave is what the model chooses for each site, unmeasured.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from msgspec import Struct

from overweave.block.cases import CONTEXT, BlockCase
from overweave.block.graphs import FusedCounts
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
    choice = cold_choice(rank_candidates(problem, target, is_thorough=False), problem, target.found.doubt)
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
