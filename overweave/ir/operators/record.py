"""The record of an operator: who owns its operands and its result, its epilogues, and its baselines.

All other code reads records; it never compares an operator's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from msgspec import Struct

from overweave.ir.operators.forms import FORMS, Form

MatmulDim = Literal["m", "n", "k"]
# gathered: each rank passes a shard, and all ranks need all of it. sharded: each rank has a shard and uses it alone.
# summed: each rank has a partial sum of every element, and the result is the sum over ranks. replicated: every rank has
# the same. exchanged: each rank passes a block for each rank (all-to-all).
Ownership = Literal["gathered", "sharded", "summed", "replicated", "exchanged"]


class CallMatrix(Struct, frozen=True):
    """A matrix of a call. dims: of its rows and its columns. along: the dimension that is sharded over ranks, if any.
    ranges: of how many ranges of rows a rank's shard consists (`ir/shards.py`: owned_rows): two are zigzag."""

    name: str
    dims: tuple[MatmulDim, MatmulDim]
    ownership: Ownership
    along: MatmulDim | None = None
    ranges: int = 1


class Forms(Struct, frozen=True, kw_only=True):
    """What a caller may ask of an operator beyond the bare product.

    epilogue: a bias, an activation, a residual. scaling: fp8 operands with scales. gate: a second weight. norm: RMSNorm
    of the rows of the result. several_weights: over one gather. several_products: of as many x and w, summed before the
    sum travels. returns_gathered: the gathered operand is a result as well.
    """

    epilogue: bool = True
    scaling: bool = True
    gate: bool = False
    norm: bool = False
    several_weights: bool = False
    several_products: bool = False
    returns_gathered: bool = False

    @property
    def keywords(self) -> tuple[str, ...]:
        """Return the keywords by which a caller asks for these forms."""
        return tuple(name for form in self.allowed for name in form.keywords)

    @property
    def allowed(self) -> tuple[Form, ...]:
        """The records of those that may be asked of the operator by keywords."""
        return tuple(form for form in FORMS if getattr(self, form.allowed_by))


class SizeRule(Struct, frozen=True):
    """The overlapped plan of an operator, and its options on a GPU (tuner/model/choose.py).

    without_kernel: the plan where no tile kernel can run. A scatter of cuBLAS matmuls would be summed by torch's passes
    over memory, hardly faster than NCCL. MEASURED: 0.96 to 1.04 times, mlp, W=4 (4 x H200, 2026-11-20).
    """

    overlapped: str
    without_kernel: str
    options: dict[str, str | int] = {}


class Demo(Struct, frozen=True):
    """What `overweave demo` shows of an operator: a schedule, and the sizes of one rank's matmul among four."""

    schedule: str
    m: int
    n: int
    k: int


class PlainTorch(Protocol):
    """The language of references: a matmul, and plain collectives of a group over matrices."""

    def matmul(self, x: Any, w: Any) -> Any:
        """`x @ w`."""

    def all_gather(self, shard: Any, rows: int | None = None) -> Any:
        """Return the shards of all ranks, one below the other. rows: of all; None: those of the problem."""

    def all_reduce(self, part: Any) -> Any:
        """Return the sum of all ranks' partial sums."""

    def reduce_scatter(self, part: Any) -> Any:
        """Return this rank's rows of the sum of all ranks' partial sums."""

    def all_to_all(self, blocks: Any) -> Any:
        """Return the blocks that all ranks hold for this one, one below the other, of equal numbers of rows."""


Reference = Callable[[Mapping[str, Any], PlainTorch], Any]


class Operator(Struct, frozen=True, kw_only=True):
    """One operator.

    summary: one line. x, w: the factors of its matmul; y: their product. sizes: the extents that its Problem states;
    split: the one of which a rank's problem has only the rank's part. matmuls: of one call. groups: over how many a
    call communicates. reference: plain torch on a call's tensors by their names. baselines: plans that `bench` times
    besides cuBLAS with NCCL and the chosen one. torch's own (schedules/records/outside.py) are candidates by that.
    dual: the operator that computes the gradient of x from that of y; empty: a
    matmul of each rank alone; None: there are no gradients.
    """

    name: str
    summary: str
    x: CallMatrix
    w: CallMatrix
    y: CallMatrix
    split: MatmulDim | None
    reference: Reference
    size_rule: SizeRule
    sizes: tuple[MatmulDim, ...] = ("m", "n", "k")
    forms: Forms = Forms()
    baselines: tuple[str, ...] = ()
    matmuls: int = 1
    groups: int = 1
    demo: Demo | None = None
    dual: str | None = None

    @property
    def keywords(self) -> tuple[str, ...]:
        """Return the keywords of a call besides its operands and the group."""
        rows = ("m",) if self.has_row_shards else ("counts", "most") if self.exchanges else ()
        tokens = ("tokens",) if self.exchanges and not self.gathers else ()
        return (*rows, *tokens, *self.forms.keywords, "plan")

    @property
    def gathers(self) -> bool:
        """Whether x travels and is multiplied where it arrives; otherwise the product travels."""
        return self.x.ownership in ("gathered", "exchanged")

    @property
    def gathers_weight(self) -> bool:
        """Whether each rank passes a shard of the weight's rows, and multiplies by all of them."""
        return self.w.ownership == "gathered"

    @property
    def exchanges(self) -> bool:
        """Whether each rank passes a block of rows for each rank (all-to-all): of x, or of the product."""
        return "exchanged" in (self.x.ownership, self.y.ownership)

    @property
    def adds(self) -> bool:
        return self.y.ownership == "summed"

    @property
    def has_row_shards(self) -> bool:
        return self.x.along == "m"

    @property
    def scatters(self) -> bool:
        """Whether a rank's result is its shard of the rows."""
        return self.y.along == "m" and self.y.ownership in ("summed", "sharded")

    @property
    def shares_sums(self) -> bool:
        return self.adds and not self.scatters

    def whole_rows(self, m: int, world_size: int) -> int:
        """Return the rows of a problem: m, rounded down to a multiple of `world_size` for an all-to-all."""
        return m // world_size * world_size if self.exchanges else m

    def parts(self, world_size: int) -> dict[MatmulDim, int]:
        """Return for each extent into how many parts it is split over ranks; a rank's problem has one of them."""
        return {size: world_size if size == self.split else 1 for size in self.sizes}

    @property
    def moved(self) -> CallMatrix:
        return self.x if self.gathers else self.y
