"""Fake kernels: shapes and dtypes of an op's results, with symbolic rows too; and FLOP formulas for FlopCounterMode.

2 * rows * k * n    of each product; rows: all that a gather multiplies, or those before a sum
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from overweave.compat.torch_names import get_current_dispatch_mode_stack
from overweave.ir.counts import COUNTS
from overweave.ir.operators.forms import GATE, input_of, results_beside
from overweave.ir.operators.record import Operator
from overweave.ir.operators.registry import record_of
from overweave.ir.plan import indexed_name
from overweave.ir.shards import shard_rows
from overweave.memory.group import process_group_of
from overweave.ops.call.operands import FP8, check_operands
from overweave.ops.dispatch.schema import DEFINED, Defined, OperatorArguments

_COUNTER = "torch.utils.flop_counter"  # importing it loads triton: only used if imported already


def results_for(operator: Operator, group_name: str, arguments: OperatorArguments) -> list[torch.Tensor]:
    """Return empty tensors of the shapes, strides and dtypes that a call on this rank returns. Raises InputError."""
    xs, ws = (each if isinstance(each, list) else [each] for each in (arguments["x"], arguments["w"]))
    for x, w in zip(xs, ws if len(xs) > 1 else [ws[0]], strict=True):
        check_operands(operator.name, x, *(ws if len(xs) == 1 else [w]))
    x, products = xs[0], ws if len(xs) == 1 else ws[:1]
    rows, own_rows = _rows(operator, group_name, x.shape[0], arguments)
    dtype = (arguments.get("out_dtype") or torch.bfloat16) if x.dtype == FP8 else x.dtype
    widths = {indexed_name("y", index): w.shape[1] for index, w in enumerate(products)}
    results = []
    for name in results_beside(arguments, tuple(widths)):
        read = input_of(name)
        width = 1 if read and read.cols == "1" else widths.get(name, products[0].shape[1])
        own = dtype if read is None or read.dtype == "result" else getattr(torch, read.dtype)
        results.append(x.new_empty((own_rows, width), dtype=own))
    if arguments.get("return_gathered"):
        results.append(x.new_empty((rows, x.shape[1])))
    return results


def _rows(operator: Operator, group_name: str, own: int, arguments: OperatorArguments) -> tuple[int, int]:
    """Return (rows of the whole product, rows of this rank's result). own: rows of this rank's x."""
    group, m, counts = process_group_of(group_name), arguments.get("m"), arguments.get(COUNTS)
    size, rank = group.size(), group.rank()
    if counts is not None:
        return own, sum(row[rank] for row in counts)
    if operator.has_row_shards:
        rows = own * size if m is None else m
        return rows, rows
    if not operator.scatters:
        return own, own
    if own % size == 0:  # guards a symbolic size on divisibility only
        return own, own // size
    lo, hi = shard_rows(own, size, rank)
    return own, hi - lo


def register_flop_formulas() -> None:
    """Register the FLOP formulas of all ops with torch's flop counter, if it is imported, and with active ones."""
    counter = sys.modules.get(_COUNTER)
    if counter is None:
        return
    modes = [getattr(mode, "counter", mode) for mode in get_current_dispatch_mode_stack()]
    registries = [counter.flop_registry, *(getattr(mode, "flop_registry", None) for mode in modes)]
    for registry in filter(None, registries):
        for name, defined in DEFINED.items():
            registry.setdefault(defined.op._overloadpacket, _Formula(name, defined))


class _Formula:
    """The FLOP formula of one op."""

    def __init__(self, name: str, defined: Defined) -> None:
        self._gathers = record_of(name).gathers
        self._gate = defined.names.index(GATE) if GATE in defined.names else None

    def __call__(self, x: Any, w: Any, *named_tensors: Any, out_val: list[torch.Tensor], **options: Any) -> int:
        """Return the FLOPs of a call. x, w, named_tensors: its arguments in order; out_val: its results."""
        pairs = list(zip(x, w, strict=True)) if len(x) == len(w) else [(x[0], each) for each in w]
        if self._gate is not None and len(named_tensors) > self._gate and named_tensors[self._gate] is not None:
            pairs.append((x[0], named_tensors[self._gate]))
        flops: int = sum(2 * self._multiplied(one, out_val) * one.shape[1] * weight.shape[1] for one, weight in pairs)
        return flops

    def _multiplied(self, x: torch.Tensor, out_val: list[torch.Tensor]) -> int:
        return out_val[0].shape[0] if self._gathers else x.shape[0]
