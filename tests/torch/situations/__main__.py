"""Runs every cell of the table, and prints what became of them."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.torch.situations.table import RANKS, cells, judged
from tests.torch.situations.ways import WAYS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", default="", help="only ways whose names contain this")
    parser.add_argument("--left", action="store_true", help="name every cell of which something was left to torch")
    asked = parser.parse_args()
    found = []
    for way in WAYS:
        if asked.way in way:
            began, verdicts = time.monotonic(), judged(list(cells(way)))
            print(f"{way}: {len(verdicts) // RANKS} cells, {time.monotonic() - began:.1f} s", flush=True)
            found += verdicts
    wrong, left = ({each.cell: each for each in found if getattr(each, name)} for name in ("wrong", "left"))
    for verdict in wrong.values():
        print(f"WRONG {verdict.cell}: {verdict.wrong}")
    for verdict in left.values() if asked.left else ():
        print(f"left to torch: {verdict.cell}: {', '.join(verdict.left)}")
    print(f"{len(found) // RANKS} cells, {len(wrong)} wrong; of {len(left)} something was left to torch:")
    for reason, count in Counter(reason for verdict in left.values() for reason in verdict.left).most_common():
        print(f"    {count} cells: {reason}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
