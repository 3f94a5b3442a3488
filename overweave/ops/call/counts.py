"""Which rows each rank sends to each other one in a call: what a caller passes as `counts` and `tokens`, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from overweave.errors import InputError
from overweave.ir.counts import COUNTS
from overweave.ir.operators.record import Operator
from overweave.memory.group import Group


class RowCounts(NamedTuple):
    """The counts of a call on one rank. rows: how many a rank sends, by target. matrix: the same, int64 on the CPU.

    most: rows of a block, at most, in all calls that one plan is to serve. received: rows of this rank's result.
    """

    rows: list[list[int]]
    matrix: torch.Tensor
    most: int
    sent: int
    received: int
    words: bytes


TOKENS = "tokens"


def routed(operator: Operator, group: Group, given: dict[str, Any]) -> dict[str, Any]:
    """What the caller passed, the rows of x in the order in which they are sent, and its counts checked.

    Raises InputError for tokens that are no rows of x, or there twice, and counts that are none, or do not fit x.
    """
    if given.get(TOKENS) is not None and TOKENS in operator.keywords:
        given = {**given, "x": _in_order(operator.name, given["x"], given[TOKENS]), TOKENS: None}
    counts = given.get(COUNTS)
    return given if counts is None or isinstance(counts, RowCounts) else _with_counts(operator, group, given)


def _in_order(operator: str, x: object, tokens: object) -> object:
    """The rows of x that are named, in that order."""
    asked, cure = f"{operator}: tokens, rows of x block by block", "Name each row once: a list, or a 1-D CPU tensor"
    if not isinstance(x, torch.Tensor) or x.dim() != 2:
        return x  # refused by what checks x
    rows = torch.as_tensor(tokens) if isinstance(tokens, Sequence) else tokens
    if not isinstance(rows, torch.Tensor) or rows.dim() != 1 or rows.device.type != "cpu":
        raise InputError(asked, f"got {type(tokens).__name__}", cure)
    if rows.numel() and rows.dtype not in (torch.int32, torch.int64):
        raise InputError(asked, f"got {rows.dtype}", cure)
    rows = rows.long()
    outside = rows[(rows < 0) | (rows >= x.shape[0])]
    if outside.numel():
        raise InputError(asked, f"{int(outside[0])} is among them, and x has {x.shape[0]} rows", cure)
    twice = torch.bincount(rows, minlength=1).argmax()
    if rows.numel() and int((rows == twice).sum()) > 1:
        raise InputError(asked, f"{int(twice)} is there twice", cure)
    return x.index_select(0, rows.to(x.device))


def _with_counts(operator: Operator, group: Group, given: dict[str, Any]) -> dict[str, Any]:
    rows = _rows(operator.name, given[COUNTS], group.world_size)
    largest, most = max(map(max, rows)), given.get("most")
    if most is None:
        most = 1 << max(0, largest - 1).bit_length() if largest else 0
    elif type(most) is not int or most < largest:
        found = f"most={str(most)[:40]}, and a rank sends {largest} rows to another one"
        raise InputError(f"{operator.name}: most, an upper bound of all counts", found, "Pass a larger int, or None")
    words = b" counts=" + ";".join(",".join(map(str, row)) for row in rows).encode()
    counts = RowCounts(
        rows=rows,
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
    return {**given, COUNTS: counts}


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
