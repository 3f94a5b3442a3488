"""The element types that plans know, by torch's names, and their sizes."""

from __future__ import annotations

from typing import Literal

Dtype = Literal["bfloat16", "float16", "float32", "float8_e4m3fn"]
MovedDtype = Literal[Dtype, "float8_e5m2", "int8", "uint8", "int32"]  # of rows that are moved, not computed with
FLOAT8: Dtype = "float8_e4m3fn"
SUM_DTYPE: Dtype = "float32"  # of all accumulators
ITEMSIZE_BYTES: dict[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    FLOAT8: 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
}
