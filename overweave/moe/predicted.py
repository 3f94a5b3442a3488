"""Predicted times of layers of experts: what a schedule's kernels take by the routing's statistics, and what each plan.

Rows of an expert are what the routing lets expect; a shard has its part of each. A kernel of the layer is one tile of
its schedule, and has all SMs. A time is the slowest rank's.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from math import ceil, exp, sqrt

from msgspec.structs import replace

from overweave.hardware.machine import Machine
from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.epilogue import Epilogue
from overweave.ir.schedule import Apply
from overweave.ir.shards import shard_rows
from overweave.moe.cases import ExpertsCase, popularity
from overweave.moe.schedules import schedule_for
from overweave.schedules.records.experts import PLANS, SEQUENTIAL
from overweave.schedules.tiles.grouped import SHORT_TIME, Groups, grouped_shape
from overweave.schedules.tiles.shape import KernelChoice
from overweave.sim.cost import size, tile_us
from overweave.tuner.measure.predicted_plans import Predicted, choice_of, plans_us

LAYER = "experts_mlp"  # the operator that computes a whole layer
BYTES = ITEMSIZE_BYTES["bfloat16"]
GATED = Epilogue(activation="silu", gate=True)
LAUNCHES = 2  # of a matmul by experts: its table, and its tiles
# Rows that are gathered and scattered by index, and sums of random counts; and a call's routing and index operations.
# MEASURED: fitted to three layers on two H200s (experts.h200x2.2026-11-29.txt: alone, sequential, push), 0.94 to 1.12
# of which they give.
INDEXED, ROUTED_US = 1.15, 12.0
# Of the rows of an expert from what it is expected to have, in standard deviations: six that are equally likely.
DEVIATIONS = (-1.4, -0.67, -0.2, 0.2, 0.67, 1.4)


PredictedLayer = Predicted[ExpertsCase]


def predicted(case: ExpertsCase, ranks: int, machine: Machine) -> PredictedLayer:
    """Return what a layer takes on so many ranks of a machine. Raises InputError."""
    costs, routing = LayerCosts(case, ranks, machine), case.routing
    moved = routing.tokens * case.hidden * BYTES
    link_us = sum(machine.collective_us(each, ranks, moved) for each in ("all_gather", "reduce_scatter"))
    plans = plans_us(((plan, schedule_for(f"{LAYER}.{plan}", case, ranks), costs) for plan in PLANS), machine)
    alone_us = max(costs.layer_us(rank, 1.0) for rank in range(ranks))
    return Predicted(case, alone_us, link_us, plans, choice_of(plans, SEQUENTIAL))


def skew_costs(layers: Iterable[PredictedLayer], plan: str) -> dict[str, float]:
    """Return by a skewed case's name the time of a plan over that of the same layer with an even router; of layers
    whose ranks all have a part of each expert, so that none has more rows than another."""
    of_layers = [each for each in layers if each.case.parallel == "tensor" and plan in each.plans]
    even_us = {each.case: each.plans[plan] for each in of_layers if not each.case.routing.skew}
    skewed = ((each, _evenly(each.case)) for each in of_layers if each.case.routing.skew)
    return {each.case.name: each.plans[plan] / even_us[even] for each, even in skewed if even in even_us}


def _evenly(case: ExpertsCase) -> ExpertsCase:
    return replace(case, routing=replace(case.routing, skew=0.0))


class LayerCosts:
    """The time of each kernel of a layer on one rank of a group, by what it reads and makes."""

    def __init__(self, case: ExpertsCase, ranks: int, machine: Machine) -> None:
        self.case, self.ranks, self.machine = case, ranks, machine
        is_hopper = any(tile.kernel == "hopper" for tile in machine.tiles)
        self.kernel: KernelChoice = "hopper" if is_hopper else "portable"

    def __call__(self, operation: Apply) -> float:
        """Return microseconds of an operation of any schedule of the layer."""
        case, routing = self.case, self.case.routing
        read, made = ({each.tensor for each in side} for side in (operation.needs, operation.makes))
        elements = sum(size(goal.region) for goal in operation.makes)
        share = elements / (routing.tokens * case.hidden)
        if not made:
            return ROUTED_US
        columns = operation.makes[0].region.shape[1]
        if "h" in made:  # tiles of one matmul, whatever each of them waits for
            return self.first_us(operation.rank, 1.0) * elements / (routing.pairs * columns)
        if "h" in read and "y" not in made:  # columns of all products, whichever of their sums it makes
            return self.second_us(operation.rank, 1.0) * columns / case.hidden
        if "x" in read:
            return self.layer_us(operation.rank, share)
        summed = routing.topk if "h" in read else 0
        return self._moved_us((len(operation.needs) + 1 + summed) * elements)

    def layer_us(self, rank: int, share: float) -> float:
        """Return the time of a whole layer, without communication, of a share of the tokens."""
        return ROUTED_US + self.first_us(rank, share) + self.second_us(rank, share)

    def first_us(self, rank: int, share: float) -> float:
        """Return the time of the first matmul, and of what its gated unit makes, of a share of the tokens."""
        return self._grouped_us(self._rows(rank, share), (self._inner, self.case.hidden), GATED)

    def second_us(self, rank: int, share: float) -> float:
        """Return the time of the second matmul, and of the sums over a token's experts, of a share of the tokens."""
        rows, case = self._rows(rank, share), self.case
        products = sum(rows) * case.hidden
        summed = self._moved_us(products + share * case.routing.tokens * case.hidden)
        return self._grouped_us(rows, (case.hidden, self._inner), Epilogue()) + summed

    @cached_property
    def _by_expert(self) -> list[float]:
        """The rows of each expert."""
        routing = self.case.routing
        of_expert = dict(zip(popularity(routing.experts, self.ranks), routing.rows(), strict=True))
        return [of_expert[expert] for expert in range(routing.experts)]

    def _rows(self, rank: int, share: float) -> list[float]:
        """The rows of each expert that a rank multiplies of a share of the tokens."""
        is_whole = self.case.parallel == "expert"
        own = slice(*shard_rows(self.case.routing.experts, self.ranks, rank)) if is_whole else slice(None)
        return [share * rows for rows in self._by_expert[own]]

    @property
    def _inner(self) -> int:
        return self.case.intermediate // (self.ranks if self.case.parallel == "tensor" else 1)

    def _grouped_us(self, rows: list[float], sizes: tuple[int, int], epilogue: Epilogue) -> float:
        """sizes: columns of one product, and the reduced axis."""
        (n, k), machine = sizes, self.machine
        groups = Groups(ceil(sum(rows)), len(rows), n, k, "bfloat16", epilogue)
        config = grouped_shape(groups, self.kernel, machine.processor.sms)
        block = config.block_m, config.block_n * epilogue.products
        tiles = sum(_tiles(each, config.block_m) for each in rows) * ceil(n / config.block_n)
        each_us = tile_us(machine, machine.tile(self.kernel, *block), (*block, k), "bfloat16")
        read = sum(1 - exp(-each) for each in rows) * n * epilogue.products * k
        moved_us = self._moved_us(read + sum(rows) * (k + n))
        waves = max(1.0, tiles / machine.processor.sms)
        return LAUNCHES * machine.latency.kernel.us + INDEXED * max(waves * each_us, moved_us)

    def _moved_us(self, elements: float) -> float:
        return elements * BYTES / self.machine.hbm.gb_per_s / 1e3


def _tiles(rows: float, block_m: int) -> float:
    """Of one expert that is expected to have so many rows: the mean over what a router lets it have."""
    around = (max(0.0, rows + each * sqrt(rows)) for each in DEVIATIONS)
    return sum(_tiles_of(each, block_m) for each in around) / len(DEVIATIONS)


def _tiles_of(rows: float, block_m: int) -> float:
    """The last tile is a short one where only the first of two consumers has rows."""
    whole, rest = divmod(rows, block_m)
    short = SHORT_TIME if block_m >= 128 and rest <= block_m / 2 else 1.0
    return whole + short * min(1.0, rest)
