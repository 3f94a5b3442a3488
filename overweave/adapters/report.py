"""Counts, for this process, which calls overweave ran for its adapters, which torch ran, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Site:
    """Counts of calls of an operator, or of collectives in compiled graphs. by_torch: reason -> count."""

    by_overweave: int = 0
    by_torch: Counter[str] = field(default_factory=Counter)


@dataclass
class Report:
    """The counts by name. replaced: operator -> where a kernel that overrides overweave's was registered.

    settings: what `ow.settings` says, where something is set.
    """

    is_installed: bool = False
    operators: dict[str, Site] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)
    settings: str = ""

    def __str__(self) -> str:
        lines = ["overweave is installed" if self.is_installed else "overweave is not installed"]
        lines += [f"settings: {self.settings}"] if self.settings else []
        for name, site in self.operators.items():
            lines.append(f"{name}: {site.by_overweave} by overweave, {site.by_torch.total()} by torch")
            lines += [f"    {count} by torch: {reason}" for reason, count in site.by_torch.most_common()]
        lines += [f"{name}: answered by a kernel {where}" for name, where in self.replaced.items()]
        return "\n".join(lines)


SITES: dict[str, Site] = {}


def site(name: str) -> Site:
    """Return the counts of an operator or adapter, created on first use; `uninstall` keeps them."""
    return SITES.setdefault(name, Site())
