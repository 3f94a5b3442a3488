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
from overweave.moe.schedules import EXPERTS_KERNEL, schedule_for
from overweave.schedules.records.experts import PLANS, SEQUENTIAL
from overweave.schedules.tiles.grouped import SHORT_TIME, Groups, grouped_shape
from overweave.schedules.tiles.shape import KernelChoice
from overweave.sim.cost import size, tile_us
from overweave.sim.nccl import collective_us
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


class PredictedLayer(Predicted[ExpertsCase], frozen=True):
    """And moved_us: all tokens and sums that a rank sends, by what moves them quickest."""

    moved_us: float = 0.0

    @property
    def roof_us(self) -> float:
        """Return the time that no plan goes below: of all matmuls, or of all that travels."""
        return max(self.alone_us, self.moved_us)

    @property
    def is_bound_by_links(self) -> bool:
        """Return whether what travels takes longer than what is multiplied."""
        return self.moved_us > self.alone_us

    def efficiency(self, time_us: float) -> float | None:
        """Return the part of the sequential plan's communication that is hidden in a layer of so many microseconds."""
        return self.measures_of(time_us).overlap_efficiency


def predicted(case: ExpertsCase, ranks: int, machine: Machine) -> PredictedLayer:
    """Return what a layer takes on so many ranks of a machine. Raises InputError."""
    costs, routing = LayerCosts(case, ranks, machine), case.routing
    moved = routing.tokens * case.hidden * BYTES
    link_us = _collectives_us(moved, ranks, machine)
    plans = predicted_plans(LAYER, case, ranks, machine)
    alone_us = max(costs.layer_us(rank, 1.0) for rank in range(ranks))
    choice = choice_of(plans, SEQUENTIAL)
    return PredictedLayer(case, alone_us, link_us, plans, choice, _moved_us(moved, ranks, machine))


def predicted_plans(operator: str, case: ExpertsCase, ranks: int, machine: Machine) -> dict[str, float]:
    """Return the time of each plan of an operator of experts that the machine can run. Raises InputError."""
    costs = LayerCosts(case, ranks, machine)
    return plans_us(((plan, schedule_for(f"{operator}.{plan}", case, ranks), costs) for plan in PLANS), machine)


def _moved_us(moved: int, ranks: int, machine: Machine) -> float:
    """Return the time of a rank's tokens to all peers, and of their sums to their owners. moved: bytes of all ranks."""
    if not machine.peer_access:
        return _collectives_us(moved, ranks, machine)
    shard = moved // ranks
    copies_us = sum(
        max(machine.links.push.time_us(shard), machine.routes.time_us(0, peer, shard)) for peer in range(1, ranks)
    )
    return min(_collectives_us(moved, ranks, machine), 2 * copies_us)


def _collectives_us(moved: int, ranks: int, machine: Machine) -> float:
    return sum(collective_us(machine, each, tuple(range(ranks)), moved) for each in ("all_gather", "reduce_scatter"))


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
        if operation.function == EXPERTS_KERNEL and "h" in read:
            return self.second_us(operation.rank, 1.0)
        if "h" in read and "y" not in made:  # columns of all products, in launches of their own, and of peers' sums
            return self._added_us(operation.rank, 1.0, (columns, elements // columns))
        if "x" in read:
            return self.layer_us(operation.rank, share)
        landed = sum(need.tensor != "h" for need in operation.needs)
        return self._moved_us((landed + 1 + (routing.topk if "h" in read else 0)) * elements)

    def layer_us(self, rank: int, share: float) -> float:
        """Return the time of a whole layer, without communication, of a share of the tokens."""
        return ROUTED_US + self.first_us(rank, share) + self.second_us(rank, share)

    def first_us(self, rank: int, share: float) -> float:
        """Return the time of the first matmul, and of what its gated unit makes, of a share of the tokens."""
        return self._grouped_us(self._rows(rank, share), (self._inner, self.case.hidden), GATED)

    def second_us(self, rank: int, share: float) -> float:
        """Return the time of the second matmul, and of the sums over a token's experts, of a share of the tokens."""
        case = self.case
        return self._added_us(rank, share, (case.hidden, share * case.routing.tokens))

    def _added_us(self, rank: int, share: float, sums: tuple[int, float]) -> float:
        """Return the time of columns of all products of a share of the tokens, and of sums. sums: columns, and of how
        many of these tokens."""
        (columns, tokens), rows = sums, self._rows(rank, share)
        read = sum(rows) * columns * tokens / (share * self.case.routing.tokens)
        return self._grouped_us(rows, (columns, self._inner), Epilogue()) + self._moved_us(read + tokens * columns)

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
