"""What a check of a machine is and finds: what `overweave doctor` needs where not even torch is there.

A check is data: a name and a probe. A probe returns a Finding; one that raises has failed with what it raised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from msgspec import Struct

Status = Literal["ok", "note", "failed"]


class DeviceFinding(Struct, frozen=True):
    """What a probe saw. `note`: it works, but you should know. cure: what to do, empty where nothing need be done."""

    status: Status
    found: str
    cure: str = ""


class Check(Struct, frozen=True):
    """A question to the machine. needs_gpu: not asked where torch sees none."""

    name: str
    probe: Callable[[], DeviceFinding]
    needs_gpu: bool = False

    def run(self) -> DeviceFinding:
        """The finding; whatever the probe raises is one too."""
        try:
            return self.probe()
        except Exception as error:  # noqa: BLE001 - a machine that surprises us is what a doctor is for
            return DeviceFinding(
                "failed", f"{type(error).__name__}: {error}", "Mend what it names, then run this again"
            )


def installed(package: str) -> str:
    """The version of a package that is installed, or was loaded from its tree; else an empty string."""
    try:
        return version(package)
    except PackageNotFoundError:
        return str(getattr(sys.modules.get(package), "__version__", ""))
