"""PTX in which instructions are found by what they are, and changed: the same mutant of what any Triton writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from tools.ptx_lint.ptx import Instruction, parse

# What adds to memory with a result that somebody reads, and without.
ATOMICS = ("atom", "red")


class Listing:
    """The text of a module, and its instructions as the lint's parser reads them."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.items = tuple(item for function in parse(text) for item in function.instructions)
        self._spans = tuple(self._found())

    def having(self, *parts: str, roots: tuple[str, ...] = ()) -> list[Instruction]:
        """The instructions whose opcode has all of these parts, and one of these roots."""
        return [item for item in self.items if {*parts} <= {*item.parts} and (not roots or item.root in roots)]

    def between(self, first: Instruction, last: Instruction, root: str) -> list[Instruction]:
        return [item for item in self.items[first.index + 1 : last.index] if item.root == root]

    def last_before(self, item: Instruction, *parts: str) -> Instruction:
        return [one for one in self.having(*parts) if one.index < item.index][-1]

    def without(self, items: Iterable[Instruction]) -> str:
        return self.rewritten(items, lambda _: "")

    def rewritten(self, items: Iterable[Instruction], write: Callable[[str], str]) -> str:
        """The text with something else in place of some instructions; there must be some."""
        spans = [self._spans[item.index] for item in items]
        assert spans, "nothing in the kernel is such an instruction"
        return self._spliced([(start, stop, write(self.text[start:stop])) for start, stop in spans])

    def moved(self, item: Instruction, behind: Instruction) -> str:
        """The text with one instruction where it comes next after another."""
        start, stop = self._spans[item.index]
        to = self._spans[behind.index][1]
        return self._spliced([(start, stop, ""), (to, to, "\n" + self.text[start:stop])])

    def _spliced(self, changes: list[tuple[int, int, str]]) -> str:
        text = self.text
        for start, stop, replacement in sorted(changes, reverse=True):
            text = text[:start] + replacement + text[stop:]
        return text

    def _found(self) -> Iterable[tuple[int, int]]:
        """Where each instruction stands, with its predicate and its semicolon."""
        lines = [0, *(match.end() for match in re.finditer("\n", self.text))]
        at = 0
        for item in self.items:
            pattern = re.compile(rf"(?:@!?\s*[\w%$]+\s+)?{re.escape(item.opcode)}(?![\w.:])[^;]*;")
            found = pattern.search(self.text, max(at, lines[item.line - 1]))
            assert found is not None, f"line {item.line} has no {item.opcode}"
            at = found.end()
            yield found.start(), at
