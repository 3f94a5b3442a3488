"""The Problem of a call: sizes, dtype, ranks, and the epilogue."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from overweave.ir.counts import COUNTS, COUNTS_DTYPE
from overweave.ir.dtype import ITEMSIZE_BYTES, Dtype
from overweave.ir.epilogue import NO_EPILOGUE, Applied, Epilogue, Norm
from overweave.ir.operators.forms import SCALE_W, SCALE_X, Place, input_of
from overweave.ir.operators.record import CallMatrix, MatmulDim, Operator
from overweave.ir.operators.registry import record_of
from overweave.ir.schedule import Count, Index, Name, Range
from overweave.ir.shards import owned_rows, rows_of, shard_rows, strip_rows
from overweave.ir.tensors import FACTORS, all_to_all_result

LONGEST_LIST = 64  # of weights, in one call


class Problem(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One call of an operator with one matmul, as every rank sees it: `[m, k] @ [k, n]` of one rank.

    m: all rows, after a gather or before a scatter. Of n and k a rank has its part where the record splits them.
    b_is_transposed: the weight lies in memory as `[n, k]`.
    epilogue: what is applied to the product; where products are summed over ranks, its scaling to each product and the
    rest to the whole sum (`product_epilogue`, `sum_epilogue`).
    columns: of each weight, if the `n` columns are those of several weights, which all multiply the rows that were
    gathered once.
    norm: RMSNorm of the rows of the sum. rows: a registered form of whole rows, in its place.
    counted: each call's counts say how many rows it fills of each block that ranks exchange (ir/counts.py).
    out_dtype: of the result, if it is not that of the operands, and of the parts of a sum, which travel in it: products
    of fp8 are kept in 16 bits or more.
    strip: block-cyclic rows of the sum, in strips of so many rows (`strip_rows`). 0: one shard for each rank.
    islands: the ranks that map each other's memory, island by island, ascending; none: all ranks do.
    batch_invariant: whether bits of a row must not depend on m; unset: they may.
    """

    operator: Name
    m: Annotated[int, Meta(ge=0)]
    n: Annotated[int, Meta(ge=0)]
    k: Annotated[int, Meta(ge=0)]
    world_size: Count
    dtype: Dtype
    b_is_transposed: bool = False
    returns_gathered: bool = False
    epilogue: Epilogue = NO_EPILOGUE
    norm: Norm | None = None
    columns: Annotated[tuple[Count, ...], Meta(max_length=LONGEST_LIST)] = ()
    out_dtype: Dtype | None = None
    counted: bool = False
    strip: Annotated[int, Meta(ge=0)] = 0
    rows: Applied | UnsetType = UNSET
    islands: tuple[tuple[Index, ...], ...] | UnsetType = UNSET
    batch_invariant: Literal[True] | UnsetType = UNSET

    @property
    def record(self) -> Operator:
        return record_of(self.operator)

    @property
    def sizes(self) -> dict[MatmulDim, int]:
        return {"m": self.m, "n": self.n, "k": self.k}

    def start(self, operand: CallMatrix, rank: int) -> tuple[int, int]:
        """Return the row and the column of the whole matrix at which a rank's shard of an operand begins."""
        rows, cols = operand.dims
        return self._start(rows, operand, rank), self._start(cols, operand, rank)

    def _start(self, dim: MatmulDim, operand: CallMatrix, rank: int) -> int:
        """Return where a rank's shard of an operand begins along one dimension."""
        if dim != operand.along:
            return 0
        if dim == "m" or operand.ownership == "gathered":
            return shard_rows(self.sizes[dim], self.world_size, rank)[0]
        return rank * self.sizes[dim]

    def weight_rows(self, rank: int) -> Range:
        """Return which rows of the weight a rank passes: all, or its shard if the operator gathers the weight."""
        return shard_rows(self.k, self.world_size, rank) if self.record.gathers_weight else (0, self.k)

    @property
    def _adds(self) -> bool:
        return self.record.adds and self.world_size > 1

    @property
    def product_epilogue(self) -> Epilogue:
        return self.epilogue.part_epilogue if self._adds else self.epilogue

    @property
    def sum_epilogue(self) -> Epilogue:
        """Return what is applied once to the sum of all ranks' products; nothing in a group of one."""
        return self.epilogue.sum_epilogue if self._adds else NO_EPILOGUE

    @property
    def of_rows(self) -> Norm | Applied | None:
        """What is done, once, to each whole row of the sum."""
        return self.norm or self.rows or None

    @property
    def added(self) -> tuple[Applied, ...]:
        """Everything that was registered."""
        return (*self.epilogue.added, *((self.rows,) if self.rows else ()))

    @property
    def has_fixed_sizes(self) -> bool:
        """Whether it is known before a call how many rows move; else its counts say so."""
        return not self.counted

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that a call passes for what follows the product, by name."""
        found = {name: number for each in self.added for name, number in each.by_name.items()}
        return found | ({"norm_eps": self.norm.eps} if self.norm else {})

    def place_of(self, added: Applied) -> Place:
        """Return to what a registered form is done."""
        if not self.record.adds:
            return "product"
        return "row" if added is self.rows else "part" if added.of_parts else "sum"

    @property
    def endings(self) -> tuple[Epilogue | Norm | Applied, ...]:
        """What is done to the product, in this order; none of a bare one."""
        return (self.epilogue,) * bool(self.epilogue.steps) + ((self.of_rows,) if self.of_rows else ())

    @property
    def without_endings(self) -> Problem:
        return replace(self, epilogue=NO_EPILOGUE, norm=None, rows=UNSET)

    @property
    def beside(self) -> tuple[str, ...]:
        """The caller's tensors that no schedule moves: what follows the product reads them, and counts are such."""
        return tuple(name for each in self.endings for name in each.inputs) + (COUNTS,) * self.counted

    @property
    def words(self) -> frozenset[str]:
        """What is asked beyond a bare product, in the words of forms (`Form.words`)."""
        options = {"activation": self.epilogue.activation, "return_gathered": self.returns_gathered}
        return frozenset((*self.beside, *self.numbers, *(name for name, is_asked in options.items() if is_asked)))

    @property
    def also_made(self) -> tuple[str, ...]:
        """The results beside the products that what follows them makes."""
        return self.of_rows.makes if self.of_rows else ()

    def tile_epilogue(self, finish: bool) -> Epilogue:
        """Return what a tile kernel is compiled for. finish: whether tiles of its queue hold whole sums."""
        return self.epilogue if finish else self.product_epilogue

    @property
    def has_sum_epilogue(self) -> bool:
        return self.of_rows is not None or self.sum_epilogue.steps != ()

    @property
    def widths(self) -> tuple[int, ...]:
        return self.columns or (self.n,)

    def columns_of(self, weight: str) -> Range:
        """Return where the columns of a weight, given by its buffer, lie among those of all weights."""
        index = int(weight.partition(".")[2] or 0)
        lo = sum(self.widths[:index])
        return lo, lo + self.widths[index]

    @property
    def multiplied_columns(self) -> int:
        """Return how many columns are multiplied: with a gate, twice those of the result."""
        return self.n * self.epilogue.products

    @property
    def n_text(self) -> str:
        """Return n for reports: `1024+256+256`."""
        return "+".join(map(str, self.widths))

    @property
    def extents(self) -> str:
        """Return the sizes for reports: `m=4096 n=1024+256+256 k=4096`."""
        return f"m={self.m} n={self.n_text} k={self.k}{'' if self.has_fixed_sizes else ' counted'}"

    @property
    def result_dtype(self) -> Dtype:
        return self.out_dtype or self.dtype

    @property
    def moved_dtype(self) -> Dtype:
        """Return the dtype of the rows that travel: those of x if they are gathered, else parts of the result."""
        return self.dtype if self.record.gathers else self.result_dtype

    @property
    def moved_columns(self) -> int:
        return self.k if self.record.gathers else self.n

    def operand(self, name: str, rank: int) -> tuple[int, int, str]:
        """Return rows, columns and dtype of a tensor that the schedule does not know: of an epilogue, of RMSNorm, or
        counts. A residual has the rows of the result: of a reduce-scatter, the rank's own."""
        if name == COUNTS:
            return self.world_size, self.world_size, COUNTS_DTYPE
        read = input_of(name)
        assert read is not None, name
        scales = (self.n if self.epilogue.scaling == "rows" else 1) * self.epilogue.products
        extents = {"1": 1, "k": self.k, "n": self.n, "y": self.result_rows(rank), "of_columns": scales}
        dtype = {"result": self.result_dtype, "factor": self.dtype}.get(read.dtype, read.dtype)
        return extents[read.rows], extents[read.cols], dtype

    def bytes_beside(self, rows: int, cols: int) -> int:
        """What is read and made beside so many elements of the result, in memory, each once: at their rows, alone."""
        names = (*self.epilogue.inputs, *((*self.rows.inputs, *self.rows.makes) if self.rows else ()))
        read = [each for each in map(input_of, names) if each is not None and each.rows == "y"]
        of_row = sum((cols if each.cols == "n" else 1) * ITEMSIZE_BYTES[self.operand(each.name, 0)[2]] for each in read)
        return rows * of_row

    def is_vector(self, name: str) -> bool:
        """Whether callers pass a tensor beside the factors with one dimension."""
        read = input_of(name)
        return read is not None and read.rows == "1" and name not in (SCALE_X, SCALE_W)

    @property
    def block(self) -> int:
        """Return the rows of one block of an all-to-all: the most that a rank sends to another."""
        return self.m // self.world_size

    def factor(self, rank: int) -> str:
        """Return the name of the tensor whose rows a rank multiplies or gets products of; after an all-to-all one of
        its own."""
        return all_to_all_result(FACTORS[0], rank) if self.record.exchanges else FACTORS[0]

    def result_rows(self, rank: int) -> int:
        return self._rows(rank) if self.record.scatters else self.m

    def result_ranges(self, rank: int) -> tuple[Range, ...]:
        """Return which rows of the whole result a rank has, in the order in which they stand in its tensor."""
        if self.strip and self.m:
            return strip_rows(self.m, self.world_size, rank, self.strip)
        return (shard_rows(self.m, self.world_size, rank) if self.record.scatters else (0, self.m),)

    def operand_rows(self, rank: int) -> int:
        return rows_of(self.operand_ranges(rank))

    def operand_ranges(self, rank: int) -> tuple[Range, ...]:
        """Return which rows of the whole x a rank has, in the order in which they stand in its tensor."""
        record = self.record
        return owned_rows(self.m, self.world_size, rank, record.x.ranges) if record.has_row_shards else ((0, self.m),)

    def _rows(self, rank: int) -> int:
        lo, hi = shard_rows(self.m, self.world_size, rank)
        return hi - lo
