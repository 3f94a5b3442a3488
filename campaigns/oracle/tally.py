"""What a campaign of mutants counts, class by class: what a judge and what verify say of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from msgspec import Struct, field
from rich.table import Table

from overweave.ir.verify.rules.verdict import Verdict


class Tally(Struct):
    """Mutants of one class, by what verify and a judge said. rules: why verify refused the wrong ones."""

    wrong_refused: int = 0
    right_accepted: int = 0
    wrong_accepted: list[str] = field(default_factory=list)
    right_refused: list[str] = field(default_factory=list)
    unfinished: int = 0
    disputed: list[str] = field(default_factory=list)
    rules: Counter[str] = field(default_factory=Counter)

    @property
    def mutants(self) -> int:
        return self.wrong_refused + self.right_accepted + len(self.wrong_accepted) + len(self.right_refused)

    def add(self, label: str, verdict: Verdict, kind: str, message: str) -> None:
        if kind == "unfinished":
            self.unfinished += 1
        elif kind == "right" and verdict.ok:
            self.right_accepted += 1
        elif kind == "right":
            self.right_refused.append(f"{label}: {verdict.refusals[0]}")
        elif verdict.ok:
            self.wrong_accepted.append(f"{label}: {kind}: {message}")
        else:
            self.wrong_refused += 1
            self.rules[verdict.refusals[0].rule] += 1


Tallies = Mapping[str, Tally]


def table(tallies: Tallies) -> Table:
    verdicts = ("wrong, refused", "right, accepted", "right, refused", "WRONG, ACCEPTED")
    shown = Table("mutation", "mutants", *verdicts, "refused by")
    for name, tally in tallies.items():
        rules = ", ".join(f"{rule} {count}" for rule, count in tally.rules.most_common(4))
        counts = (tally.wrong_refused, tally.right_accepted, len(tally.right_refused), len(tally.wrong_accepted))
        shown.add_row(name, str(tally.mutants), *map(str, counts), rules)
    return shown


def right_refused(tallies: Tallies) -> Iterator[str]:
    """How often verify demanded more than the judge can see, by class and rule, with an example."""
    for name, tally in tallies.items():
        by_rule: dict[str, list[str]] = {}
        for reason in tally.right_refused:
            by_rule.setdefault(reason.partition("[")[2].partition("]")[0], []).append(reason)
        for rule, reasons in by_rule.items():
            yield f"right refused, {name}: {len(reasons)} x {rule}, such as {reasons[0]}"


def holes(tallies: Tallies) -> list[str]:
    """What no campaign may end with: wrong mutants that verify accepts, and mutants that judges do not agree on."""
    found = [f"WRONG ACCEPTED {name}: {hole}" for name, tally in tallies.items() for hole in tally.wrong_accepted]
    return found + [f"DISPUTED {name}: {label}" for name, tally in tallies.items() for label in tally.disputed]
