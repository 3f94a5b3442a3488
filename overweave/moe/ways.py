"""The ways to compute a layer of experts, and each of them on this rank's part: by the library, and by each plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from overweave.ir.shards import shard_rows
from overweave.memory.group import Group
from overweave.moe.cases import ExpertsCase, popularity
from overweave.moe.dispatch import combine, dispatch
from overweave.moe.fp8 import FP8, quantise_rows
from overweave.moe.glu import Glu
from overweave.moe.library_ways import LayerInput, gathered, gathered_and_scattered, link_alone, sent_and_returned
from overweave.moe.overlapped import ExpertWeights
from overweave.moe.pairs import experts_matmul, experts_sum
from overweave.moe.tensor_parallel import all_gather_experts, experts_mlp, experts_reduce_scatter
from overweave.schedules.records.experts import PLANS
from overweave.schedules.records.experts import SEQUENTIAL as NOT_OVERLAPPED
from overweave.tuner.measure.baselines import COMMUNICATION, MATMUL, NAMED, OURS, SEQUENTIAL
from overweave.tuner.measure.bench import BenchRequest, BenchRun, rank_device
from overweave.tuner.measure.timer import MOST_INPUT_SETS
from overweave.tuner.measure.ways import Comparison, Way
from overweave.tuner.space.shapes import DTYPES


class LayerSetup:
    """The weights and inputs of one case on this rank, the same for every way. Experts are drawn by the shares of the
    routing, and dealt over the ranks that hold them. In fp8 weights are, with scales by rows, and tokens are quantised
    when they are multiplied; what the library multiplies is bf16, as tokens are that travel."""

    def __init__(self, case: ExpertsCase, group: Group, place: tuple[torch.device, torch.dtype]) -> None:
        self.case, self.group, (self.device, self.dtype) = case, group, place
        self.is_fp8 = self.dtype == FP8
        self.dtype = torch.bfloat16 if self.is_fp8 else self.dtype
        ranks, routing = group.world_size, case.routing
        self.draw = torch.Generator(self.device).manual_seed(group.rank)
        own, is_whole = shard_rows(routing.experts, ranks, group.rank), case.parallel == "expert"
        experts = own[1] - own[0] if is_whole else routing.experts
        inner = case.intermediate if is_whole else case.intermediate // ranks
        up, down = self.drawn(experts, 2 * inner, case.hidden), self.drawn(experts, case.hidden, inner)
        self.unquantised = ExpertWeights(up, down, glu=Glu(), first=own[0] if is_whole else None)
        self.weights = _quantised(self.unquantised) if self.is_fp8 else self.unquantised
        self.inputs = [self._input(routing.tokens // ranks) for _ in range(MOST_INPUT_SETS)]
        self.gathered = [gathered(each, group) for each in self.inputs]

    def drawn(self, *shape: int) -> torch.Tensor:
        scale = float(shape[-1]) ** -0.5
        return torch.randn(*shape, generator=self.draw, device=self.device, dtype=self.dtype).mul_(scale)

    def _input(self, tokens: int) -> LayerInput:
        routing = self.case.routing
        popularity_ranks = torch.arange(1, routing.experts + 1, device=self.device)
        shares = (popularity_ranks.float() ** -routing.skew).expand(tokens, -1)
        dealt = torch.tensor(popularity(routing.experts, self.group.world_size), device=self.device, dtype=torch.int32)
        ids = dealt[torch.multinomial(shares, routing.topk, generator=self.draw)]
        topk_weights = torch.rand(ids.shape, generator=self.draw, device=self.device, dtype=torch.float32)
        return LayerInput(self.drawn(tokens, self.case.hidden), ids, topk_weights)

    def given(self, sample: int) -> LayerInput:
        return self.inputs[sample % MOST_INPUT_SETS]

    def by_library(self, sample: int) -> torch.Tensor:
        return gathered_and_scattered(self.given(sample), self.unquantised, self.group)

    def by_all_to_all(self, sample: int) -> torch.Tensor:
        return sent_and_returned(self.given(sample), self.unquantised, self.case.routing.experts, self.group)

    def by_plan(self, sample: int, plan: str | None) -> torch.Tensor:
        return experts_mlp(*self.given(sample), self.weights, self.group.process_group, plan=plan)

    def by_halves(self, sample: int, plan: str) -> torch.Tensor:
        (x, ids, topk_weights), (up, down, group) = self.given(sample), (*self.weights[:2], self.group.process_group)
        h, routed = all_gather_experts(x, ids, up, group, glu=self.weights.glu, plan=plan)
        return experts_reduce_scatter(h, routed, topk_weights, down, group, plan=plan)

    def by_dispatch(self, sample: int) -> torch.Tensor:
        (x, ids, topk_weights), (up, down) = self.given(sample), self.weights[:2]
        of_up, of_down = self.weights.up_scale, self.weights.down_scale
        sent = dispatch(x, ids, topk_weights, self.case.routing.experts, self.group.process_group)
        if not up.shape[0]:  # a rank without experts receives nothing
            return combine(sent.x, sent)
        h, routed = experts_matmul(sent.x, sent.topk_ids, up, scale_w=of_up, glu=self.weights.glu)
        return combine(experts_sum(h, routed, sent.topk_weights, down, scale_w=of_down), sent)

    def matmuls_alone(self, sample: int) -> torch.Tensor:
        return self.weights.sums(*self.gathered[sample % MOST_INPUT_SETS])

    def link_alone(self, sample: int) -> torch.Tensor:
        return link_alone(self.given(sample), self.group)


def _quantised(weights: ExpertWeights) -> ExpertWeights:
    (up, of_up), (down, of_down) = quantise_rows(weights.up), quantise_rows(weights.down)
    return weights._replace(up=up, down=down, up_scale=of_up, down_scale=of_down)


ROOFS = (
    Way(MATMUL, "matmuls alone", LayerSetup.matmuls_alone),
    Way(COMMUNICATION, "all-gather and reduce-scatter alone", LayerSetup.link_alone),
)
LIBRARY = Way(SEQUENTIAL, "library: gather, torch's grouped matmul, scatter", LayerSetup.by_library)


ALL_TO_ALL = Way("all_to_all", "library: uneven all-to-alls", LayerSetup.by_all_to_all, reads_counts=True)


def ways_of(case: ExpertsCase, plans: tuple[str, ...] = (), is_fp8: bool = False) -> tuple[Way, ...]:
    """Return the rows of a case. plans: in place of our choice, and of all plans; those of weights in fp8 are
    sequential."""
    by_choice = () if plans else (Way(OURS, "overweave", partial(LayerSetup.by_plan, plan=None)),)
    named = plans or ((NOT_OVERLAPPED,) if is_fp8 else tuple(PLANS))
    ours = [
        Way(f"{NAMED}{plan}", f"overweave: {plan}", partial(LayerSetup.by_plan, plan=plan), plan=plan) for plan in named
    ]
    if case.parallel == "tensor":
        halves = [plan for plan in named if plan != NOT_OVERLAPPED]
        more = [
            Way(f"halves.{plan}", f"overweave, halves: {plan}", partial(LayerSetup.by_halves, plan=plan), plan=plan)
            for plan in halves
        ]
    else:
        more = [
            ALL_TO_ALL,
            Way("dispatch", "overweave: dispatch", LayerSetup.by_dispatch, reads_counts=True, plan="dispatch"),
        ]
    return (*ROOFS, LIBRARY, *by_choice, *ours, *more)


def layer_runs(
    cases: tuple[ExpertsCase, ...],
    request: BenchRequest,
    group: Group,
    on_progress: Callable[[str, float], None] | None = None,
) -> Iterator[BenchRun]:
    """Compare the ways, as `Comparison.runs` says."""
    place = rank_device(request.device), getattr(torch, DTYPES[request.dtype])
    is_fp8 = request.dtype == "fp8"
    compared: Comparison[ExpertsCase] = Comparison(
        lambda case: LayerSetup(case, group, place),
        lambda case: ways_of(case, request.plans, is_fp8),
        # What the library multiplies in bf16 rounds as fp8 does not.
        (LIBRARY.name, ALL_TO_ALL.name) if is_fp8 else (),
    )
    return compared.runs(cases, request, group, on_progress)
