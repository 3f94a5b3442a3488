"""What one GPU computes of bf16, fp16, fp8 and int8: every operation on every pair of dtypes, casts, reductions, dots.

    python -m campaigns.gpu_arithmetic [--write FILE] [--since FILE]

Holds the GPU against the table that is kept for the Triton at hand (`table.KEPT`), to which the interpreter is held too
(tests/runtime/interpreted_bits.py), and prints how many results differ; exit code 1 if any does. With --write the
GPU's own table goes to a file instead, with --since those operations of it that differ from another file's table. Not a
number is one number, whatever its bits.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import triton

from campaigns.bits.operations import launches
from campaigns.bits.table import differences, kept_with, read, run_all, write
from campaigns.gpu_ranks import need_gpus
from campaigns.shown import shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="where the table of this GPU goes")
    parser.add_argument("--since", type=Path, help="a table of another Triton: write what is not as there")
    asked = parser.parse_args()
    need_gpus()
    every = list(launches())
    found = run_all(shown(every, "kernels", len(every)), torch.device("cuda"))
    count = sum(len(row.bits) for row in found.values())
    source = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"
    if asked.write:
        if asked.since:
            changed = {line.split(":")[0] for line in differences(found, read(asked.since)[1])}
            found = {name: row for name, row in found.items() if name in changed}
        write(asked.write, found, source)
        print(f"{len(found)} operations, {count} results of {source}: {asked.write.stat().st_size} bytes")
        return 0
    told = kept_with(triton.__version__)
    if told is None:
        sys.exit(f"no table is kept for Triton {triton.__version__}: write one with --write")
    kept_of, kept = told
    wrong = differences(found, kept)
    for line in wrong[:40]:
        print(line)
    print(f"{len(found)} operations, {count} results of {source} beside {kept_of}: {len(wrong)} operations differ")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
