#!/usr/bin/env bash
# The gradient of a plain sum cannot go back through torch's grouped matmul on a CPU: `F.grouped_mm(x, w, offs=offs).sum()`
# computes, and its backward raises a RuntimeError.
#
# Seen with torch 2.13.0 (and 2.15.0), Python 3.11, CPU, 2026-11-29. The gradient of a sum is one number that is expanded
# to the result's shape, with strides of nought, and the backward of the grouped matmul asks for strides that fit the
# sizes. In float32 a sum behind `.float()` raises, too, since that is no operation there; in bfloat16 it is one, whose
# own gradient is an ordinary tensor. Anything that makes the gradient ordinary, as a product with ones, is a way around.
#
# Exits with 0 while that is so, and with 1 once it is not. Needs Python 3.11 or newer and a package index; some minutes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet "torch==2.13.0" numpy
cat >"$work/gradients.py" <<'PYTHON'
import torch
import torch.nn.functional as F

ends = torch.tensor([2, 6], dtype=torch.int32)
READERS = {
    "sum": lambda y: y.sum(),
    "sum of float": lambda y: y.float().sum(),
    "sum of a product with ones": lambda y: (y * torch.ones_like(y)).sum(),
}
for dtype in (torch.float32, torch.bfloat16):
    for name, reader in READERS.items():
        x, w = torch.ones(6, 8, dtype=dtype, requires_grad=True), torch.ones(2, 8, 16, dtype=dtype, requires_grad=True)
        loss = reader(F.grouped_mm(x, w, offs=ends))
        try:
            loss.backward()
            told = f"gradient {x.grad[0, 0]:g}"
        except RuntimeError as error:
            told = f"RuntimeError: {error}"
        print(f"{str(dtype).removeprefix('torch.')}, {name}: {loss:g}, {told}")
PYTHON
"$work/env/bin/python" -W ignore "$work/gradients.py" | tee "$work/seen"
diff "$work/seen" - <<'SEEN'
float32, sum: 768, RuntimeError: Invalid strides/sizes, got [0, 0] for strides and [6, 16] for sizes
float32, sum of float: 768, RuntimeError: Invalid strides/sizes, got [0, 0] for strides and [6, 16] for sizes
float32, sum of a product with ones: 768, gradient 16
bfloat16, sum: 768, RuntimeError: Invalid strides/sizes, got [0, 0] for strides and [6, 16] for sizes
bfloat16, sum of float: 768, gradient 16
bfloat16, sum of a product with ones: 768, gradient 16
SEEN
