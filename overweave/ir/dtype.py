"""The element types that plans know, by torch's names, and their sizes."""

from __future__ import annotations

from typing import Literal

Dtype = Literal["bfloat16", "float16", "float32", "float8_e4m3fn"]
FLOAT8: Dtype = "float8_e4m3fn"
SUM_DTYPE: Dtype = "float32"  # in which everything is added
ITEMSIZE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, FLOAT8: 1}
