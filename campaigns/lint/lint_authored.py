"""Fuses every annotated kernel of examples/kernels in every way, compiles it for Hopper and lints the PTX. No GPU.

    python -m campaigns.lint_authored [--only TEXT]

Prints one line per kernel and schedule, then every finding. Exit code 1 if there is one.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path

from campaigns.lint.authored_cases import AUTHORS, authored_case
from campaigns.lint.lint_all import report


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m campaigns.lint_authored", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose kernel and schedules contain this text")
    only = parser.parse_args(arguments).only
    with tempfile.TemporaryDirectory(prefix="overweave-") as folder:
        wanted = [
            (file, author, exchanges)
            for file, author in AUTHORS.items()
            for exchanges in author.exchanges
            if only in f"{author.name} {' '.join(f'{tensor}={how}' for tensor, how in exchanges.items())}"
        ]
        return report(authored_case(Path(folder), *one) for one in wanted)


if __name__ == "__main__":
    sys.exit(main())
