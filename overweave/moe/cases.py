"""The layers of experts that are timed and predicted: sizes of models and how tokens are routed, as files of one form.

    {"cases": [{"name": "MoE-1", "tokens": 8192, "hidden": 2048, "intermediate": 1536, "experts": 8, "topk": 2}]}

A case is a layer, split one way or the other, with a number of tokens and a skew of its router. The sets of the
repository lie in `benchmarks/shapes/SET.mixture_of_experts.json`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct

from overweave.errors import InputError
from overweave.ir.shards import shard_rows
from overweave.tuner.space.shapes import PositiveExtent, ShapeCase, check_names, read_set

EXPERTS = "experts"  # the argument of `overweave bench` in place of an operator
KIND = "mixture_of_experts"  # of the files
STEP = 8  # elements: rows of whole words of 16 bytes
DECODED = 512  # tokens, up to which a case counts as decoding
Parallel = Literal["tensor", "expert"]
Skew = Annotated[float, Meta(ge=0.0, le=8.0)]
_CURE = (
    'Give a file such as {"cases": [{"name": "a", "tokens": 64, "hidden": 64, "intermediate": 64, "experts": 4, '
    '"topk": 2}]}'
)


class RoutingStatistics(Struct, frozen=True):
    """Where a router sends tokens, by its statistics. skew: the exponent of Zipf's law over experts; 0: evenly."""

    tokens: int
    experts: int
    topk: int
    skew: float = 0.0

    @property
    def pairs(self) -> int:
        """Return how many pairs of a token and one of its experts there are."""
        return self.tokens * self.topk

    def rows(self) -> tuple[float, ...]:
        """Return the rows that each expert is expected to have, the heaviest first. None has a token twice."""
        shares = [(place + 1.0) ** -self.skew for place in range(self.experts)]
        found: list[float] = []
        for place, share in enumerate(shares):
            rest = self.pairs - sum(found)  # of experts with a smaller share, to which it is dealt by shares
            found.append(min(float(self.tokens), rest * share / sum(shares[place:])))
        return tuple(found)


def popularity(experts: int, ranks: int) -> tuple[int, ...]:
    """Return all experts, the most popular first: they are dealt in turns over the ranks that hold them."""
    held = (shard_rows(experts, ranks, rank) for rank in range(ranks))
    return tuple(each for _, each in sorted((each - lo, each) for lo, hi in held for each in range(lo, hi)))


class ExpertsCase(Struct, frozen=True):
    """Work of one layer of gated experts: `[tokens, hidden]` in and out, `intermediate` of each expert between. tokens
    of the routing: of all ranks together."""

    layer: str
    hidden: int
    intermediate: int
    parallel: Parallel
    routing: RoutingStatistics

    @property
    def name(self) -> str:
        """Return the name in tables."""
        skew = f"zipf={self.routing.skew:g}" if self.routing.skew else "even"
        return f"{self.layer}.{self.parallel}.{skew}.tokens={self.routing.tokens}"

    @property
    def group(self) -> str:
        """Return the group over which a mean is formed."""
        return f"{self.parallel} parallel, {'at most' if self.routing.tokens <= DECODED else 'above'} {DECODED} tokens"

    @property
    def matmul(self) -> ShapeCase:
        """Return the matmul that stands for the layer in result files: the first one, of all pairs."""
        return ShapeCase(self.name, self.routing.pairs, 2 * self.intermediate, self.hidden)

    def check(self, ranks: int) -> None:
        """Raise InputError for a layer that a group cannot split, or whose rows are no whole words."""
        asked, routing = f"{EXPERTS} {self.name} on {ranks} ranks", self.routing
        parts = ranks if self.parallel == "tensor" else 1
        if self.intermediate % (parts * STEP) or self.hidden % STEP:
            found = f"hidden {self.hidden}, and {self.intermediate} of an expert over {parts} ranks"
            raise InputError(asked, found, f"Choose multiples of {STEP}, for each rank")
        if routing.topk > routing.experts:
            raise InputError(asked, f"top {routing.topk} of {routing.experts} experts", "Choose no more than there are")


class LayerSizes(Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of a layer of experts, and the tokens of all ranks that it is timed with."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    tokens: PositiveExtent
    hidden: PositiveExtent
    intermediate: PositiveExtent
    experts: Annotated[int, Meta(ge=1, le=4096)]
    topk: PositiveExtent

    def case(self, parallel: Parallel, tokens: int, skew: float) -> ExpertsCase:
        """Return the layer, split in one way, with so many tokens."""
        routing = RoutingStatistics(tokens, self.experts, self.topk, skew)
        return ExpertsCase(self.name, self.hidden, self.intermediate, parallel, routing)


class ExpertsSet(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every layer, split every way, with every skew."""

    cases: Annotated[tuple[LayerSizes, ...], Meta(min_length=1, max_length=256)]
    parallel: Annotated[tuple[Parallel, ...], Meta(min_length=1)] = get_args(Parallel)
    skews: Annotated[tuple[Skew, ...], Meta(min_length=1, max_length=8)] = (0.0, 0.8)
    operator: str = KIND
    source: str = ""
    note: str = ""

    def on_ranks(self, ranks: int, tokens: Sequence[int] = ()) -> tuple[ExpertsCase, ...]:
        """Return the cases, in the order of the file, whose tokens are rounded up to as many for each rank. tokens: of
        all ranks, in place of the file's. Raises InputError."""
        cases = tuple(
            each.case(parallel, -(-count // ranks) * ranks, skew)
            for each in self.cases
            for parallel in self.parallel
            for count in tokens or (each.tokens,)
            for skew in self.skews
        )
        for case in cases:
            case.check(ranks)
        check_names(f"bench {EXPERTS}", [case.name for case in cases])
        return cases


def read_experts(name: str) -> ExpertsSet:
    """Return a file's set, or the repository's set `name`. Raises InputError for anything but a set of layers."""
    return read_set(name, KIND, ExpertsSet, _CURE)
