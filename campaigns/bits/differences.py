"""Two tables of bits beside each other."""

from __future__ import annotations

import numpy as np

from campaigns.bits import values
from campaigns.bits.operations import APPROXIMATE, OF_FIRST_LANE
from campaigns.bits.table import Row, Table

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
