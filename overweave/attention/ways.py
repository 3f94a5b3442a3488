"""The ways to compute attention over a shared sequence, and each of them on this rank's part: by the library, by
torch's own, and by each plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from overweave.attention.cases import AttentionCase
from overweave.attention.context_parallel import context_parallel_attention
from overweave.attention.library_ways import AttentionCall, by_context_parallel, by_gather, by_heads, link_alone
from overweave.attention.work import AttendWork, Call, GradientWork, Rows, as_rows
from overweave.compat.torch_names import all_gather_single
from overweave.memory.group import Group
from overweave.schedules.records.attention import PER_SHARD, PLANS
from overweave.tuner.measure.baselines import CACHE_BYTES, COMMUNICATION, MATMUL, NAMED, OURS, SEQUENTIAL
from overweave.tuner.measure.bench import BenchRequest, BenchRun, rank_device
from overweave.tuner.measure.timer import MOST_INPUT_SETS
from overweave.tuner.measure.trial import CallResult
from overweave.tuner.measure.ways import Comparison, Way
from overweave.tuner.space.shapes import DTYPES

ROTATIONS = {"torch_all_gather": "allgather", "torch_all_to_all": "alltoall"}


class AttentionSetup:
    """Queries, keys, values and the gradient of the result of one case on this rank, the same for every way."""

    def __init__(self, case: AttentionCase, group: Group, place: tuple[torch.device, torch.dtype]) -> None:
        self.case, self.group, (self.device, self.dtype) = case, group, place
        self.sequence = case.sequence(group.world_size)
        self.draw = torch.Generator(self.device).manual_seed(group.rank)
        rows = self.sequence.own(group.rank)
        heads = (case.heads, case.groups, case.groups, case.heads)
        shapes = [(case.batch, each, rows, case.head_dim) for each in heads]
        bytes_per_set = sum(torch.Size(shape).numel() for shape in shapes) * self.dtype.itemsize
        sets = 2 if 2 * bytes_per_set >= CACHE_BYTES else MOST_INPUT_SETS
        self.inputs = [tuple(map(self._drawn, shapes)) for _ in range(sets)]
        self._shards: list[Rows] = []

    def _drawn(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.draw, device=self.device, dtype=self.dtype)

    def run(self, attention: AttentionCall, sample: int) -> CallResult:
        """An attention of q, k and v, with its gradients where the case is trained."""
        *given, dout = self.inputs[sample % len(self.inputs)]
        if not self.case.is_trained:
            with torch.no_grad():
                return attention(*given)
        leaves = [each.detach().requires_grad_() for each in given]
        out = attention(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    def by_plan(self, sample: int, plan: str | None) -> CallResult:
        options: dict[str, Any] = {"is_causal": self.case.is_causal, "window": self.case.window, "plan": plan}
        options |= {"enable_gqa": self.case.groups != self.case.heads, "sequence": self.case.layout}
        attention = partial(
            context_parallel_attention, group=self.group.process_group, tokens=self.case.tokens, **options
        )
        return self.run(attention, sample)

    def by_library(self, sample: int, make: Callable[..., AttentionCall], *words: str) -> CallResult:
        if self.case.window is not None or self.case.tokens % self.group.world_size:
            raise ValueError("the library's ways have whole shards, and no window")
        return self.run(make(self.sequence, self.group, *words), sample)

    def alone(self, sample: int) -> torch.Tensor:
        """What this rank computes by pieces, all keys and values there from the start."""
        q, k, v, dout = self.inputs[0]
        place = {"place": [self.group.rank, self.group.world_size]}
        call = Call(q, k, v, None, self.sequence, PER_SHARD, self.case.head_dim**-0.5, place)
        result = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32 if q.is_cuda else torch.float64)
        works: list[AttendWork | GradientWork] = [AttendWork(call, result)]
        if self.case.is_trained:
            works.append(GradientWork(call, (dout, *result), tuple(map(torch.empty_like, (q, k, v)))))
        room = self._room() if self.case.is_trained else ()
        for work in works:
            for step in range(self.group.world_size):
                source = (self.group.rank - step) % self.group.world_size
                work.piece(source, self.shards[source] if step else ())
                work.add(tuple(each[: self.sequence.own(source)] for each in room), ())
            own = slice(0, self.sequence.own(self.group.rank))
            work.finish([(own, tuple(each[own] for each in room))])
        return result[0]

    def _room(self) -> Rows:
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        shape = (self.sequence.own(0), self.case.columns)
        return tuple(torch.zeros(shape, dtype=wide, device=self.device) for _ in range(2))

    @property
    def shards(self) -> list[Rows]:
        """All ranks' keys and values. Collective, the first time."""
        if not self._shards:
            longest, ranks, every = self.sequence.own(0), self.group.world_size, []
            for x in self.inputs[0][1:3]:
                own = torch.zeros((longest, self.case.columns), device=self.device, dtype=self.dtype)
                own[: x.shape[2]] = as_rows(x)
                landed = own.new_empty((ranks * longest, self.case.columns))
                all_gather_single(landed, own, group=self.group.process_group)
                every.append(landed.chunk(ranks))
            owns = [self.sequence.own(rank) for rank in range(ranks)]
            self._shards = [tuple(each[rank][: owns[rank]] for each in every) for rank in range(ranks)]
        return self._shards

    def link_alone(self, sample: int) -> torch.Tensor:
        _, k, v, _ = self.inputs[sample % len(self.inputs)]
        return link_alone(k, v, self.group)


def _by_library(make: Callable[..., AttentionCall], *words: str) -> Callable[[AttentionSetup, int], CallResult]:
    return lambda setup, sample: setup.by_library(sample, make, *words)


LIBRARY_WAYS = (
    Way(MATMUL, "pieces alone", AttentionSetup.alone),
    Way(COMMUNICATION, "all-gather of keys and values alone", AttentionSetup.link_alone),
    Way(SEQUENTIAL, "library: gather, then torch's attention", _by_library(by_gather)),
    Way("library_heads", "library: all-to-alls around torch's attention (Ulysses)", _by_library(by_heads)),
    *(
        Way(name, f"torch: context_parallel, {rotation}", _by_library(by_context_parallel, rotation))
        for name, rotation in ROTATIONS.items()
    ),
)


def ways_of(plans: Sequence[str] = ()) -> tuple[Way, ...]:
    """Return the rows of a case. plans: in place of our choice, and of all plans."""
    chosen = () if plans else (Way(OURS, "overweave", partial(AttentionSetup.by_plan, plan=None)),)
    named = (
        Way(f"{NAMED}{plan}", f"overweave: {plan}", partial(AttentionSetup.by_plan, plan=plan), plan=plan)
        for plan in plans or PLANS
    )
    return (*LIBRARY_WAYS, *chosen, *named)


def attention_runs(
    cases: Sequence[AttentionCase],
    request: BenchRequest,
    group: Group,
    on_progress: Callable[[str, float], None] | None = None,
) -> Iterator[BenchRun]:
    """Compare the ways, as `Comparison.runs` says."""
    place = rank_device(request.device), getattr(torch, DTYPES[request.dtype])
    compared: Comparison[AttentionCase] = Comparison(
        lambda case: AttentionSetup(case, group, place), lambda case: ways_of(request.plans)
    )
    return compared.runs(cases, request, group, on_progress)
