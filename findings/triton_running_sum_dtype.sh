#!/usr/bin/env bash
# A running sum of bfloat16 in a Triton kernel is kept in float32 by Triton 3.6 and in bfloat16 by Triton 3.9.
#
# Seen with triton 3.6.0 and 3.9.0, Python 3.11, 2026-11-28; no GPU is needed, since a kernel's types are known when it is
# compiled. The same source, `tl.cumsum(x, 0)` of bfloat16, has a result of float32 in one and of bfloat16 in the other,
# so the newer one rounds every partial sum to 8 bits. tl.cumprod and the larger of two (tl.maximum) change alike, and
# tl.cumprod of int8 changes the other way, from int8, which wraps, to int32. tl.sum has the type of what it adds in both.
# Who means float32 should write tl.cumsum(x.to(tl.float32), 0).
#
# Exits with 0 while that is so, and with 1 once it is not. Needs Python 3.11 or newer and a package index; a minute.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/types.py" <<'PYTHON'
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def types(floats, integers):
    at = tl.arange(0, 64)
    x, n = tl.load(floats + at), tl.load(integers + at)
    tl.static_print("sum", tl.sum(x, 0).dtype)
    tl.static_print("cumsum", tl.cumsum(x, 0).dtype)
    tl.static_print("cumprod", tl.cumprod(x, 0).dtype)
    tl.static_print("maximum", tl.maximum(x, x).dtype)
    tl.static_print("cumprod of int8", tl.cumprod(n, 0).dtype)


signature = {"floats": "*bf16", "integers": "*i8"}
triton.compile(ASTSource(types, signature, {}), GPUTarget("cuda", 90, 32), {"enable_fp_fusion": True})
PYTHON
for version in 3.6.0 3.9.0; do
  python3 -m pip install --quiet --no-deps --target "$work/$version" "triton==$version"
  echo "triton $version"
  PYTHONPATH="$work/$version" TRITON_CACHE_DIR="$work/cache-$version" python3 "$work/types.py" 2>"$work/errors" ||
    { tail -5 "$work/errors" >&2; exit 1; }
done | tee "$work/seen"
diff "$work/seen" - <<'SEEN'
triton 3.6.0
sum bf16
cumsum fp32
cumprod fp32
maximum fp32
cumprod of int8 int8
triton 3.9.0
sum bf16
cumsum bf16
cumprod bf16
maximum bf16
cumprod of int8 int32
SEEN
echo "as described"
