"""Runs every cell of the table, and prints what became of them."""

from __future__ import annotations

import sys
import time
from collections import Counter

from tests.torch.situations.table import cells, judged
from tests.torch.situations.ways import WAYS


def main() -> int:
    total, wrong, left = 0, [], []
    for way in WAYS:
        if len(sys.argv) > 1 and sys.argv[1] not in way:
            continue
        asked = list(cells((way,)))
        began = time.monotonic()
        found = judged(asked)
        total += len(asked)
        wrong += [verdict for verdict in found if verdict.wrong]
        left += [verdict for verdict in found[: len(asked)] if verdict.left]
        print(f"{way}: {len(asked)} cells, {time.monotonic() - began:.1f} s", flush=True)
    for verdict in wrong:
        print("WRONG", verdict.cell, verdict.wrong, sep=": ")
    reasons = Counter(reason for verdict in left for reason in verdict.left)
    print(f"{total} cells, {len({verdict.cell for verdict in wrong})} wrong, {len(left)} fell back to torch:")
    for reason, count in reasons.most_common():
        print(f"    {count} cells: {reason}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
