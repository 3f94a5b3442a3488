"""The launch that fills a routing's tables (kernels/routing.py), and the layout of the tables in one buffer."""

from __future__ import annotations

from typing import NamedTuple

import torch

from overweave.kernels.arguments import TopkShape
from overweave.kernels.routing import route_kernel
from overweave.runtime.kernel_calls.call import KernelCall

PART = 512  # (token, expert) pairs that a program sorts at a time
MOST_PROGRAMS = 128  # all must be resident at once: they meet at a grid barrier
MOST_COUNTS = 16384  # that a program holds in registers: of several programs, all experts
UNIT = 4  # words: each table begins at a multiple of 16 bytes
LINE_WORDS = 32
DEADLINE_NS = 2 * 10**9


class RoutingSizes(NamedTuple):
    """Sizes of a routing: (token, expert) pairs, experts of a token, experts, and source ranks of tokens."""

    pairs: int
    top: int
    experts: int
    sources: int

    @property
    def shard(self) -> int:
        """Return how many tokens a source has; the last ones have fewer, or none."""
        return -(-(self.pairs // max(1, self.top)) // self.sources)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of all tables, in the order of `moe.routing.Routing`."""
        pairs, experts = self.pairs, self.experts
        return (experts,), (experts + 1,), (pairs,), (pairs,), (pairs,), (self.sources, experts), (1,)


def words_of(sizes: RoutingSizes) -> int:
    """Return how many words all tables take."""
    return sum(_room(shape) for shape in sizes.shapes)


def tables_of(words: torch.Tensor, sizes: RoutingSizes) -> list[torch.Tensor]:
    """Return the tables in a buffer of `words_of(sizes)` int32."""
    rooms = words.split([_room(shape) for shape in sizes.shapes])
    return [room[: _count(shape)].view(shape) for room, shape in zip(rooms, sizes.shapes, strict=True)]


class GridBarrier(NamedTuple):
    """Memory of the grid barrier of launches on one stream. state: int32 words (kernels/routing.grid_barrier). limits:
    int64, its deadline.
    """

    state: torch.Tensor
    limits: torch.Tensor

    @classmethod
    def on(cls, device: torch.device) -> GridBarrier:
        """Allocate one."""
        return cls.several(device, 1)[0]

    @classmethod
    def several(cls, device: torch.device, count: int) -> list[GridBarrier]:
        """Allocate so many, each on a cache line of its own."""
        states = torch.zeros(count, LINE_WORDS, dtype=torch.int32, device=device)
        limits = torch.full((1,), DEADLINE_NS, dtype=torch.int64, device=device)
        return [cls(state, limits) for state in states]


def programs_of(pairs: int) -> tuple[int, int]:
    """Return how many programs route so many pairs, and how many parts each has."""
    parts = max(1, -(-pairs // (PART * MOST_PROGRAMS)))
    return max(1, -(-pairs // (PART * parts))), parts


def route_call(ids: torch.Tensor, words: torch.Tensor, sizes: RoutingSizes, barrier: GridBarrier) -> KernelCall:
    """Return the call of the routing kernel. words: int32 buffer for the tables."""
    programs, parts = programs_of(sizes.pairs)
    bins = 1 << max(4, (sizes.experts - 1).bit_length())
    scratch = torch.empty(programs * (2 * bins + 1), dtype=torch.int32, device=ids.device)
    arguments = [
        *(ids, *tables_of(words, sizes), scratch, *barrier, sizes.pairs),
        TopkShape(sizes.top, ids.stride(0), ids.stride(1), sizes.experts, sizes.sources, sizes.shard),
        *(PART, parts, bins),
        min(1 << (programs - 1).bit_length(), max(1, MOST_COUNTS // bins)),
    ]
    return KernelCall(route_kernel, arguments, {"num_warps": 8}, programs)


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _room(shape: tuple[int, ...]) -> int:
    """Return the words that a table takes, padded to 16 bytes."""
    return -(-_count(shape) // UNIT) * UNIT
