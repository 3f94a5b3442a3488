"""The blocks that are timed: sizes of models, and numbers of tokens by kind of work, as files of one form.

    {"blocks": {"Llama-3-8B": {"width": 4096, "inner": 14336, "heads": 32, "kv_heads": 8}},
     "tokens": {"forward": [8192], "training": [8192], "decoding": [16]}}

A case is a block with a number of tokens. The sets of the repository lie in `benchmarks/shapes/SET.block.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta, Struct

from overweave.errors import InputError
from overweave.tuner.space.shapes import PositiveExtent, ShapeCase, read_set

BLOCK = "block"  # the argument of `overweave bench` in place of an operator
CONTEXT = 2048  # positions of a sequence that decoding reads; it writes the last one
BlockWork = Literal["forward", "training", "decoding"]
_CURE = (
    'Give a file such as {"blocks": {"a": {"width": 64, "inner": 128, "heads": 4, "kv_heads": 4}}, '
    '"tokens": {"forward": [64]}}'
)


class BlockSizes(Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of a Llama block: hidden and inner width, heads of queries, heads of keys and values."""

    width: PositiveExtent
    inner: PositiveExtent
    heads: PositiveExtent
    kv_heads: PositiveExtent

    @property
    def head(self) -> int:
        """Return the columns of a head."""
        return self.width // self.heads


class BlockCase(Struct, frozen=True):
    """Work on one block. tokens: of all ranks together, in `sequences`; of decoding, one of each sequence."""

    block: str
    sizes: BlockSizes
    work: BlockWork
    tokens: int
    sequences: int

    @property
    def name(self) -> str:
        """Return the name in tables."""
        return f"{self.block}.{self.work}.tokens={self.tokens}"

    @property
    def length(self) -> int:
        """Return the tokens of one sequence."""
        return self.tokens // self.sequences

    @property
    def matmul(self) -> ShapeCase:
        """Return the matmul that stands for the block in result files: the tokens and the widths."""
        return ShapeCase(self.name, self.tokens, self.sizes.width, self.sizes.inner)

    def check(self, ranks: int) -> None:
        """Raise InputError for sizes that a group cannot split: heads and widths by columns, sequences by rows."""
        sizes, asked = self.sizes, f"bench block {self.name} on {ranks} ranks"
        split = {"heads": sizes.heads, "kv_heads": sizes.kv_heads, "inner": sizes.inner}
        split |= {} if self.work == "decoding" else {"tokens of a sequence": self.length}
        for name, extent in split.items():
            if extent % ranks:
                raise InputError(asked, f"{extent} {name} do not divide by {ranks}", "Choose other sizes or ranks")
        if sizes.width % sizes.heads or sizes.heads % sizes.kv_heads or sizes.head % 2 or self.tokens % self.sequences:
            found = f"width {sizes.width}, {sizes.heads} and {sizes.kv_heads} heads, {self.tokens} tokens"
            raise InputError(asked, found, "Let heads divide the width, into even numbers, and sequences the tokens")


class BlockSet(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every block with every number of tokens. sequences: that the tokens of forward and training are. torch's pass
    over compiled graphs fuses fewer collectives of one sequence than of two."""

    blocks: Annotated[dict[str, BlockSizes], Meta(min_length=1, max_length=64)]
    tokens: Annotated[
        Mapping[BlockWork, Annotated[tuple[PositiveExtent, ...], Meta(max_length=256)]], Meta(min_length=1)
    ]
    sequences: PositiveExtent = 2
    source: str = ""

    @property
    def cases(self) -> tuple[BlockCase, ...]:
        """Return the cases in the order of the file."""
        return tuple(
            BlockCase(name, sizes, work, tokens, tokens if work == "decoding" else self.sequences)
            for name, sizes in self.blocks.items()
            for work, numbers in self.tokens.items()
            for tokens in numbers
        )


def read_blocks(name: str) -> BlockSet:
    """Return a file's set, or the repository's set `name`. Raises InputError for anything but a set of blocks."""
    return read_set(name, BLOCK, BlockSet, _CURE)
