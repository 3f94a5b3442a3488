"""`overweave doctor`: checks of this machine, with a cure for each that fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from overweave.errors import PACKAGES as CURES
from overweave.runtime.finding import Check, DeviceFinding, installed
from overweave.tuner.caches import cache_folders

try:
    from overweave.memory.cuda.card import current_gpu
    from overweave.runtime.diagnosis import CHECKS, has_gpu
    from overweave.tuner.space.target import machine_of
except ModuleNotFoundError as error:  # `doctor` must run with missing packages, too
    _missing = str(error.name).partition(".")[0]

    def _missing_package() -> DeviceFinding:
        return DeviceFinding(
            "failed", f"{_missing} is not installed, and no more can be looked at", CURES.get(_missing, "")
        )

    def has_gpu() -> bool:
        """Return False: without the package it is unknown."""
        return False

    CHECKS = (Check(_missing, _missing_package),)

SIGNS = {"ok": "[green]ok[/green]", "note": "[yellow]note[/yellow]", "failed": "[red]failed[/red]"}
PACKAGES = ("overweave", "msgspec", "typer", "rich", "platformdirs", "numpy", "matplotlib")


class CheckResult(msgspec.Struct, frozen=True):
    """One check and its result, as `--json` prints it."""

    name: str
    status: str
    found: str
    cure: str


def _packages() -> DeviceFinding:
    return DeviceFinding("ok", ", ".join(f"{name} {installed(name) or 'missing'}" for name in PACKAGES))


def cache_finding(folders: dict[str, Path]) -> DeviceFinding:
    """Check that we can write every cache and that others cannot: its contents are executed."""
    for name, folder in folders.items():
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        if not os.access(nearest, os.W_OK):
            return DeviceFinding("failed", f"{name}: {nearest} cannot be written", f"chmod u+w {nearest}, or set HOME")
        if folder.exists() and folder.stat().st_mode & 0o022:
            return DeviceFinding("failed", f"{name}: others may write {folder}", f"chmod go-w {folder}")
    return DeviceFinding("ok", ", ".join(map(str, folders.values())))


def _caches() -> DeviceFinding:
    return cache_finding(cache_folders())


def _machine() -> DeviceFinding:
    found = machine_of(current_gpu())
    if found.is_sure:
        return DeviceFinding("ok", str(found))
    return DeviceFinding("note", str(found), "" if found.basis == "measured" else "overweave calibrate")


ALL_CHECKS = (
    Check("packages", _packages),
    *CHECKS,
    Check("machine", _machine, needs_gpu=True),
    Check("caches", _caches),
)


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False) -> None:
    """Check versions, devices, links, memory, caches and, under torchrun, islands. Exits with 1 if a check failed.

    Of torchrun's ranks one on each host prints.
    """
    lines = examine(ALL_CHECKS)
    failed = any(line.status == "failed" for line in lines)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        raise typer.Exit(int(failed))
    if as_json:
        typer.echo(msgspec.json.encode({"healthy": not failed, "checks": lines}).decode())
    else:
        _print(lines)
    raise typer.Exit(int(failed))


def examine(checks: tuple[Check, ...]) -> list[CheckResult]:
    """Run every check that applies here."""
    findings = [(check.name, check.run()) for check in checks if not check.needs_gpu or has_gpu()]
    return [CheckResult(name, finding.status, finding.found, finding.cure) for name, finding in findings]


def _print(lines: list[CheckResult]) -> None:
    """Print the checks with their cures as a table."""
    table = Table(box=None, pad_edge=False)
    for column in ("check", "", "found"):
        table.add_column(column, overflow="fold")
    for line in lines:
        table.add_row(line.name, SIGNS[line.status], line.found)
        if line.cure:
            table.add_row("", "cure", line.cure, style="bold")
    Console().print(table)
