"""What the tuner answers: the plan that is taken, where the answer comes from, and what was not taken and why."""

from __future__ import annotations

from msgspec import Struct

from overweave.ir.problem import Problem
from overweave.tuner.model.weigh import Weighed
from overweave.tuner.space.space import Candidate, full_options
from overweave.tuner.space.target import Target
from overweave.tuner.store.table import Source


class Choice(Struct, frozen=True):
    """A schedule of the catalog with its options, or one of torch's; why it was taken, and what was not taken and why.

    source: where the answer comes from. text: the choice as the operators' `plan=` takes it. weights: all candidates,
    where `explain` has weighed them.
    """

    plan: str
    options: dict[str, str | int]
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    source: Source = "rule"
    text: str = ""
    weights: tuple[Weighed[str], ...] = ()

    def __str__(self) -> str:
        options = " ".join(f"-o {name}={value}" for name, value in self.options.items())
        lines = [f"{self.plan} {options}".rstrip(), f"  because {self.reason}", f"  source: {SOURCES[self.source]}"]
        if self.weights:
            width = max(len(weight.candidate) for weight in self.weights)
            lines += [f"  {'->' if self._is(each) else '  '} {each.line(width)}" for each in self.weights]
        told = {weight.candidate for weight in self.weights}
        return "\n".join([*lines, *(f"  not {name}: {why}" for name, why in self.rejected if name not in told)])

    def _is(self, weight: Weighed[str]) -> bool:
        """Whether it is what was taken, and not what cannot be of the same text."""
        return weight.candidate == self.text and not weight.obstacle


SOURCES: dict[Source, str] = {
    "cache": "measured on this machine",
    "table": "measured for the package on such a machine",
    "nearest": "measured on the nearest known problem",
    "model": "simulated, nothing was measured",
    "rule": "a rule, nothing was measured or simulated",
    "asked": "the caller",
}


def chosen(
    problem: Problem,
    target: Target,
    what: Candidate,
    because: tuple[Source, str],
    rejected: tuple[tuple[str, str], ...] = (),
) -> Choice:
    """A candidate as the answer, for a source and a reason."""
    source, reason = because
    options = full_options(problem, target, what)
    return Choice(what.schedule(problem.operator), options, reason, rejected, source, str(what))
