"""The table of bits: all operations run, on a GPU or interpreted, kept in a file, and compared with others."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl

from campaigns.bits import values
from campaigns.bits.kernels import binary_kernel, cast_kernel, dot_kernel, reduction_kernel, unary_kernel
from campaigns.bits.operations import APPROXIMATE, OF_FIRST_LANE, Launch

PATH = Path(__file__).with_name("bits_of_one_gpu.xz")
# By the Triton that computed it: 3.7 computes all as 3.6 does. A later file holds what its Triton computes otherwise.
KEPT = {"3.6": (PATH,), "3.7": (PATH,), "3.9": (PATH, PATH.with_name("bits_since_3_9.xz"))}


class Row(NamedTuple):
    """The results of one operation: their dtype, and their bits."""

    dtype: str
    bits: values.Bits


Table = dict[str, Row]


def operands(launch: Launch, device: torch.device) -> list[torch.Tensor]:
    """What a kernel reads."""
    if launch.kind == "binary":
        left, right = launch.dtypes
        chosen = [values.paired(left, right), values.paired(right, left)]
    elif launch.kind == "dot":
        chosen = [values.matrix(dtype, seed) for seed, dtype in enumerate(launch.dtypes)]
    else:
        chosen = [{"unary": values.few, "cast": values.many, "reduction": values.rows}[launch.kind](launch.dtypes[0])]
    return [_tensor(bits, dtype, device) for bits, dtype in zip(chosen, launch.dtypes, strict=True)]


def arguments(launch: Launch, inputs: list[torch.Tensor], out: torch.Tensor, codes: torch.Tensor) -> dict[str, Any]:
    """How the kernel of a launch is called, beside its grid."""
    if launch.kind == "dot":
        kind = tl.int32 if launch.dtypes[0] == "int8" else tl.float32
        sizes = {"SIDE": values.SIDE, "DEPTH": values.DEPTH, "OUT": kind}
        return {"left": inputs[0], "right": inputs[1], "out": out, "codes": codes, **sizes}
    given: dict[str, Any] = {"out": out, "codes": codes, "CHOSEN": launch.mask}
    if launch.kind == "binary":
        return given | {"left": inputs[0], "right": inputs[1], "ROWS": len(inputs[0])}
    given["source"] = inputs[0]
    if launch.kind == "reduction":
        return given | {"LANES": values.LANES, "ROWS": values.ROWS}
    given["COUNT"] = len(inputs[0])
    return given | ({"ROUNDING": launch.rounding} if launch.kind == "cast" else {})


KERNELS: dict[str, Any] = {
    "binary": binary_kernel,
    "unary": unary_kernel,
    "cast": cast_kernel,
    "reduction": reduction_kernel,
    "dot": dot_kernel,
}


def run(launch: Launch, device: torch.device) -> Table:
    """The rows of one launch. A reduction is one warp's, so that each lane has one element."""
    inputs = operands(launch, device)
    count = results(launch, inputs)
    out = torch.zeros(len(launch.every) * count, dtype=torch.int64, device=device)
    codes = torch.zeros(len(launch.every), dtype=torch.int32, device=device)
    is_reduction = launch.kind == "reduction"
    grid = (values.ROWS if is_reduction else 1,)
    KERNELS[launch.kind][grid](**arguments(launch, inputs, out, codes), num_warps=1 if is_reduction else 4)
    found, kinds = out.cpu().numpy().reshape(-1, count), codes.cpu().numpy()
    rows: Table = {}
    for name in launch.chosen:
        slot = launch.every.index(name)
        dtype = values.dtype_of(int(kinds[slot]))
        rows[launch.name(name)] = Row(dtype, found[slot].astype(np.uint64).astype(values.unsigned(dtype)))
    return rows


def results(launch: Launch, inputs: list[torch.Tensor]) -> int:
    """How many an operation has."""
    if launch.kind == "dot":
        return values.SIDE**2
    return len(inputs[0]) ** 2 if launch.kind == "binary" else inputs[0].numel()


def run_all(launches: Iterable[Launch], device: torch.device) -> Table:
    """The whole table."""
    return {name: row for launch in launches for name, row in run(launch, device).items()}


def write(path: Path, table: Table, source: str) -> None:
    """A line of JSON that says where the table is from and what is in it, and all bits behind it, packed."""
    head = {"source": source, "rows": {name: [row.dtype, len(row.bits)] for name, row in table.items()}}
    body = b"".join(row.bits.tobytes() for row in table.values())
    path.write_bytes(lzma.compress(json.dumps(head).encode() + b"\n" + body, preset=9 | lzma.PRESET_EXTREME))


def read(path: Path) -> tuple[str, Table]:
    """Where the table of a file is from, and the table."""
    line, _, body = lzma.decompress(path.read_bytes()).partition(b"\n")
    head, at, table = json.loads(line), 0, {}
    for name, (dtype, count) in head["rows"].items():
        kind = values.unsigned(dtype)
        table[name] = Row(dtype, np.frombuffer(body, kind, count, at))
        at += count * kind.itemsize
    return head["source"], table


def kept_with(version: str) -> tuple[str, Table] | None:
    """What a GPU computes with a version of Triton, and which GPU; None where none has been asked."""
    paths = KEPT.get(version.rpartition(".")[0])
    if paths is None:
        return None
    told = [read(path) for path in paths]
    return " and ".join(source for source, _ in told), {name: row for _, table in told for name, row in table.items()}


def _tensor(bits: values.Bits, dtype: str, device: torch.device) -> torch.Tensor:
    if bits.dtype != values.unsigned(dtype):
        raise ValueError(f"bits of {dtype} are {bits.dtype}")
    held = torch.from_numpy(bits.view(f"int{bits.itemsize * 8}").copy()).to(device)
    return held.view(values.torch_dtype(dtype))


# Two tables of bits beside each other.

_BEYOND_FP32 = 2.0**128  # one unit above the largest number: infinity, where that is as good an answer
_UNITS = 2  # in the last place, where the hardware itself is an approximation


def differences(found: Table, kept: Table) -> list[str]:
    """A line for each operation that is not in both, or whose results differ: how many, and the first of them."""
    lines = [f"{name}: in one table alone" for name in found.keys() ^ kept.keys()]
    for name in found.keys() & kept.keys():
        wrong = _differing(name, found[name], kept[name])
        if wrong.size:
            first = int(wrong[0])
            bits = [f"{int(row.bits[first]):#x}" for row in (found[name], kept[name])]
            lines.append(
                f"{name}: {wrong.size} of {len(kept[name].bits)}, the first at {first}: {bits[0]}, kept {bits[1]}"
            )
    return sorted(lines)


def _differing(name: str, found: Row, kept: Row) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Where results differ; everywhere, if their dtypes do."""
    if found.dtype != kept.dtype:
        return np.arange(len(kept.bits))
    same = found.bits == kept.bits
    if kept.dtype in values.FORMATS:
        one, other = (values.numbers_of(row.bits, row.dtype) for row in (found, kept))
        same |= np.isnan(one) & np.isnan(other)
        if name.split()[-1] in APPROXIMATE:
            with np.errstate(invalid="ignore"):
                one, other = (np.clip(each, -_BEYOND_FP32, _BEYOND_FP32) for each in (one, other))
                unit = np.maximum(np.abs(other) * 2.0 ** -values.FORMATS[kept.dtype][1], 2.0**-149)
                same |= np.abs(one - other) <= _UNITS * unit
    if name.startswith("reduction") and name.split(" ", 2)[2] in OF_FIRST_LANE:
        same |= np.arange(len(same)) % values.LANES != 0
    return np.flatnonzero(~same)
