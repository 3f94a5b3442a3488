"""How many rows each rank sends to each other one in a call: what a caller passes as `counts`, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from overweave.errors import InputError
from overweave.ir.operators.record import Operator
from overweave.memory.group import Group


class RowCounts(NamedTuple):
    """The counts of a call on one rank. matrix: int64 `[W, W]` on the CPU, rows that a rank sends, by target.

    most: rows of a block, at most, in all calls that one plan is to serve. received: rows of this rank's result.
    """

    matrix: torch.Tensor
    most: int
    sent: int
    received: int
    words: bytes


def with_counts(operator: Operator, group: Group, given: dict[str, Any]) -> dict[str, Any]:
    """What the caller passed, its counts checked. Raises InputError for counts that are none, or do not fit x."""
    rows = _rows(operator.name, given["counts"], group.world_size)
    largest, most = max(map(max, rows)), given.get("most")
    if most is None:
        most = 1 << max(0, largest - 1).bit_length() if largest else 0
    elif type(most) is not int or most < largest:
        found = f"most={str(most)[:40]}, and a rank sends {largest} rows to another one"
        raise InputError(f"{operator.name}: most, an upper bound of all counts", found, "Pass a larger int, or None")
    words = b" counts=" + ";".join(",".join(map(str, row)) for row in rows).encode()
    counts = RowCounts(
        matrix=torch.tensor(rows, dtype=torch.int64),
        most=most,
        sent=sum(rows[group.rank]),
        received=sum(row[group.rank] for row in rows),
        words=words,
    )
    x = given["x"]
    if isinstance(x, torch.Tensor) and x.dim() == 2 and x.shape[0] != counts.sent:
        found = f"x of rank {group.rank} has {x.shape[0]} rows, and its counts are {list(rows[group.rank])}"
        raise InputError(f"{operator.name}: x of {counts.sent} rows", found, "Pass the rows for rank 0 first, then on")
    return {**given, "counts": counts}


def _rows(operator: str, counts: object, ranks: int) -> list[list[int]]:
    """As lists. Raises InputError."""
    asked, cure = f"{operator}: counts [{ranks}, {ranks}]", "Pass counts[source][target], ints >= 0, alike on all ranks"
    if isinstance(counts, torch.Tensor):
        if counts.device.type != "cpu" or counts.dtype not in (torch.int32, torch.int64):
            raise InputError(asked, f"got {counts.dtype} on {counts.device}", f"{cure}, on the CPU")
        counts = counts.tolist()
    is_listed = isinstance(counts, Sequence) and all(isinstance(row, Sequence) for row in counts)
    if not is_listed or [len(row) for row in counts] != [ranks] * ranks:  # type: ignore[attr-defined]
        raise InputError(asked, f"got {counts!r}"[:80], cure)
    rows = [list(row) for row in counts]  # type: ignore[attr-defined]
    wrong = [each for row in rows for each in row if type(each) is not int or each < 0]
    if wrong:
        raise InputError(asked, f"{str(wrong[0])[:40]!r} is among them", cure)
    return rows
