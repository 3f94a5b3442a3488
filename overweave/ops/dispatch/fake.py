"""What an op returns for tensors without memory: shapes and dtypes, of rows that may be symbols."""

from __future__ import annotations

import torch

from overweave.ir.counts import COUNTS
from overweave.ir.operators.forms import input_of, results_beside
from overweave.ir.operators.record import Operator
from overweave.ir.plan import indexed_name
from overweave.ir.shards import shard_rows
from overweave.memory.group import process_group_of
from overweave.ops.call.operands import FP8, check_operands
from overweave.ops.dispatch.schema import OperatorArguments


def results_for(operator: Operator, group_name: str, given: OperatorArguments) -> list[torch.Tensor]:
    """New tensors of the shapes, strides and dtypes that a call on this rank returns. Raises InputError."""
    xs, ws = (each if isinstance(each, list) else [each] for each in (given["x"], given["w"]))
    for x, w in zip(xs, ws if len(xs) > 1 else [ws[0]], strict=True):
        check_operands(operator.name, x, *(ws if len(xs) == 1 else [w]))
    x, products = xs[0], ws if len(xs) == 1 else ws[:1]
    rows, own_rows = _rows(operator, group_name, x.shape[0], given)
    dtype = (given.get("out_dtype") or torch.bfloat16) if x.dtype == FP8 else x.dtype
    widths = {indexed_name("y", index): w.shape[1] for index, w in enumerate(products)}
    results = []
    for name in results_beside(given, tuple(widths)):
        read = input_of(name)
        width = 1 if read and read.cols == "1" else widths.get(name, products[0].shape[1])
        own = dtype if read is None or read.dtype == "result" else getattr(torch, read.dtype)
        results.append(x.new_empty((own_rows, width), dtype=own))
    if given.get("return_gathered"):
        results.append(x.new_empty((rows, x.shape[1])))
    return results


def _rows(operator: Operator, group_name: str, own: int, given: OperatorArguments) -> tuple[int, int]:
    """All rows of the product, and those of a rank's result."""
    group, m, counts = process_group_of(group_name), given.get("m"), given.get(COUNTS)
    size, rank = group.size(), group.rank()
    if counts is not None:
        return own, sum(row[rank] for row in counts)
    if operator.has_row_shards:
        rows = own * size if m is None else m
        return rows, rows
    if not operator.scatters:
        return own, own
    if own % size == 0:  # a symbol is asked for this much only
        return own, own // size
    lo, hi = shard_rows(own, size, rank)
    return own, hi - lo
