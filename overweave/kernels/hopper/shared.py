"""What the partitions of the Hopper matmul share: a tuple for each subject, None where a kernel has none of it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Claim(NamedTuple):
    """Where the first claim of a program is passed on (start.py), and the mbarrier that says so."""

    place: Any
    passed: Any


class Ring(NamedTuple):
    """Which row of the table is next (ring.py): messages, and mbarriers that say which are full and empty."""

    messages: Any
    full: Any
    empty: Any


class Stages(NamedTuple):
    """Tiles of the operands in shared memory, and mbarriers that say which stages are full and empty."""

    a: Any
    b: Any
    full: Any
    empty: Any


class StagedResults(NamedTuple):
    """What consumers leave to the storer, and mbarriers that say which of the two halves are full and empty."""

    tiles: Any
    full: Any
    empty: Any


class ReductionArgs(NamedTuple):
    """What tiles add (received.py): a table of addends, or the tensor map of single ones; the storer's verdict
    on them, and its mbarrier.
    """

    addends: Any
    tiles: Any
    verdicts: Any
    received: Any


class SplitKArgs(NamedTuple):
    """Of tiles that are dealt out along k (shares.py): their memory, and what the storer is told of each half."""

    memory: Any
    told: Any


class TileArgs(NamedTuple):
    """What all partitions but the producer need. products, ends, peers, experts, queue: kernels/arguments.py."""

    products: Any
    ends: Any
    sums: ReductionArgs
    shares: SplitKArgs
    peers: Any
    experts: Any
    queue: Any
    k: Any
