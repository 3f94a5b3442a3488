"""Types of machine checks (diagnosis.py) that do not need torch: `overweave doctor` reports a missing torch, too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from msgspec import Struct

Status = Literal["ok", "note", "failed"]


class DeviceFinding(Struct, frozen=True):
    """Result of a probe. Status `note`: it works, with a limitation. cure: what to do, empty if nothing."""

    status: Status
    found: str
    cure: str = ""


class Check(Struct, frozen=True):
    """A check of the machine. needs_gpu: skipped where torch sees none."""

    name: str
    probe: Callable[[], DeviceFinding]
    needs_gpu: bool = False

    def run(self) -> DeviceFinding:
        """Return the probe's finding; an exception becomes a failed one."""
        try:
            return self.probe()
        except Exception as error:  # noqa: BLE001 - a machine that surprises us is what a doctor is for
            return DeviceFinding(
                "failed", f"{type(error).__name__}: {error}", "Mend what it names, then run this again"
            )


def installed(package: str) -> str:
    """Return the version of a package that is installed or imported; else an empty string."""
    try:
        return version(package)
    except PackageNotFoundError:
        return str(getattr(sys.modules.get(package), "__version__", ""))
