"""Attention that is timed, shown and predicted: heads of models and lengths of sequences, as files of one form.

    {"cases": [{"name": "Attn-1", "heads": 32, "head_dim": 128, "seq": [16384, 32768]}]}

The sets of the repository lie in `benchmarks/shapes/SET.ring_attention.json`.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Annotated, Literal

from msgspec import Meta, Struct

from overweave.attention.sequence import CONTIGUOUS, ZIGZAG, Sequence
from overweave.errors import InputError
from overweave.tuner.space.shapes import PositiveExtent, ShapeCase, check_names, read_set

ATTENTION = "attention"  # the argument of `overweave bench` in place of an operator
KIND = "ring_attention"  # of the files
LAYOUTS = (CONTIGUOUS, ZIGZAG)
_CURE = 'Give a file such as {"cases": [{"name": "a", "heads": 4, "head_dim": 64, "seq": [1024]}]}'


class AttentionCase(Struct, frozen=True):
    """Attention of one batch. tokens: of all ranks. groups: heads of keys and values."""

    heads_name: str
    tokens: int
    heads: int
    head_dim: int
    groups: int
    batch: int = 1
    is_causal: bool = True
    layout: Literal["contiguous", "zigzag"] = ZIGZAG
    window: int | None = None
    is_trained: bool = False  # with the gradients

    @property
    def name(self) -> str:
        """Return the name in tables."""
        mask = "causal" if self.is_causal else "full"
        within = f".window={self.window}" if self.window else ""
        trained = ".trained" * self.is_trained
        return f"{self.heads_name}.{self.layout}.{mask}{within}{trained}.tokens={self.tokens}"

    @property
    def group(self) -> str:
        """Return the group over which a mean is formed."""
        gradients = "forward with backward" if self.is_trained else "forward"
        return f"{self.layout}, {'causal' if self.is_causal else 'full'}, {gradients}"

    @property
    def matmul(self) -> ShapeCase:
        """Return the matmul that stands for it in result files: the scores of all heads."""
        return ShapeCase(self.name, self.batch * self.heads * self.tokens, self.tokens, self.head_dim)

    @property
    def columns(self) -> int:
        """Of keys, as rows."""
        return self.batch * self.groups * self.head_dim

    def sequence(self, ranks: int) -> Sequence:
        """Return how ranks share it."""
        return Sequence(self.tokens, ranks, self.is_causal, self.layout == ZIGZAG, self.window)

    def check(self, ranks: int) -> None:
        """Raise InputError for what ranks cannot share."""
        asked = f"{ATTENTION} {self.name} on {ranks} ranks"
        if self.heads % self.groups:
            found = f"{self.heads} heads of q, {self.groups} of k and v"
            raise InputError(asked, found, "Choose heads of k and v that divide those of q")
        if self.layout == ZIGZAG and self.tokens % (2 * ranks):
            found = f"{self.tokens} tokens are no 2 x {ranks} pieces"
            raise InputError(asked, found, f"Choose a multiple of {2 * ranks}, or contiguous rows")
        if self.window is not None and (not self.is_causal or self.layout == ZIGZAG):
            raise InputError(asked, "a window of a zigzag or full mask", "Choose contiguous rows and a causal mask")


class HeadsOfModel(Struct, frozen=True, forbid_unknown_fields=True):
    """Heads of one model, and the tokens of all ranks that they are timed with. groups: of keys; none: as many."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    heads: PositiveExtent
    head_dim: PositiveExtent
    seq: Annotated[tuple[PositiveExtent, ...], Meta(min_length=1, max_length=64)]
    groups: PositiveExtent | None = None

    def case(
        self, tokens: int, layout: Literal["contiguous", "zigzag"], is_causal: bool, is_trained: bool
    ) -> AttentionCase:
        """Return one length."""
        groups = self.groups or self.heads
        return AttentionCase(
            self.name,
            tokens,
            self.heads,
            self.head_dim,
            groups,
            is_causal=is_causal,
            layout=layout,
            is_trained=is_trained,
        )


class AttentionSet(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every heads with every length, layout and mask."""

    cases: Annotated[tuple[HeadsOfModel, ...], Meta(min_length=1, max_length=256)]
    layouts: Annotated[tuple[Literal["contiguous", "zigzag"], ...], Meta(min_length=1)] = (ZIGZAG,)
    causal: Annotated[tuple[bool, ...], Meta(min_length=1, max_length=2)] = (True,)
    trained: Annotated[tuple[bool, ...], Meta(min_length=1, max_length=2)] = (False, True)
    operator: str = KIND
    source: str = ""
    note: str = ""

    def on_ranks(self, ranks: int, tokens: Several[int] = ()) -> tuple[AttentionCase, ...]:
        """Return the cases, in the order of the file. tokens: of all ranks, in place of the file's. Raises
        InputError."""
        cases = tuple(
            each.case(count, layout, is_causal, is_trained)
            for each in self.cases
            for is_trained in self.trained
            for is_causal in self.causal
            for layout in self.layouts
            for count in tokens or each.seq
        )
        for case in cases:
            case.check(ranks)
        check_names(f"bench {ATTENTION}", [case.name for case in cases])
        return cases


def read_attention(name: str) -> AttentionSet:
    """Return a file's set, or the repository's set `name`. Raises InputError for anything but a set of attention."""
    return read_set(name, KIND, AttentionSet, _CURE)
