"""Compiles every kernel in every configuration ahead of time for Hopper and lints the PTX. No GPU is needed.

    python -m campaigns.lint_all [--only TEXT]

Prints one line per kernel and configuration, then every finding, but for spills that the Triton at hand is allowed
(campaigns/lint/spills.py). Exit code 1 if there is one.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator

import triton
from msgspec import Struct

from campaigns.lint.lint_case import Case
from campaigns.lint.lint_cases import cases
from campaigns.lint.spills import beyond
from campaigns.shown import shown
from tools.aot import Resources, compile_kernel
from tools.ptx_lint.contract import Finding
from tools.ptx_lint.lint import lint

COLUMNS = f"{'kernel':<21} {'configuration':<44} {'registers':>9} {'spills':>7} {'shared':>8} {'findings':>8}"


class Linted(Struct, frozen=True):
    """A case, what it occupies and what was found. Spills and shared memory in bytes."""

    kernel: str
    config: str
    resources: Resources
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        used = self.resources
        numbers = f"{used.registers:>9} {used.spill_bytes:>7} {used.shared_bytes:>8} {len(self.findings):>8}"
        return f"{self.kernel:<21} {self.config:<44} {numbers}"


def lint_cases(chosen: Iterable[Case]) -> Iterator[Linted]:
    """Compiles and lints one case after another. Raises MachineError where a kernel does not compile."""
    for source, contract in shown(chosen, "kernels", name=lambda case: f"{case.source.name} {case.source.config}"):
        compiled = compile_kernel(source)
        found = beyond(compiled, lint(compiled, contract))
        yield Linted(source.name, source.config, compiled.resources, found)


def report(chosen: Iterable[Case]) -> int:
    """Prints a line for each case as it is linted, then every finding. 1 if there is one."""
    print(COLUMNS)
    findings: list[Finding] = []
    count = spilling = 0
    for linted in lint_cases(chosen):
        print(linted, flush=True)
        findings += linted.findings
        count += 1
        spilling += linted.resources.spill_bytes > 0 and not linted.findings
    for finding in findings:
        print(finding)
    with_triton = f"with Triton {triton.__version__}"
    print(f"{count} kernels compiled for sm_90a {with_triton}, {len(findings)} findings, {spilling} spill as allowed")
    return 1 if findings else 0


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m campaigns.lint_all", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose kernel and configuration contain this text")
    only = parser.parse_args(arguments).only
    return report(case for case in cases() if only in f"{case.source.name} {case.source.config}")


if __name__ == "__main__":
    sys.exit(main())
