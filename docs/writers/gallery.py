"""The gallery: one page a method, from its record, a simulated timeline, and the shipped tables of measured rows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from io import BytesIO

from overweave.cli.pictures.png import save_png
from overweave.cli.trial_output import global_shape, simulate_schedule
from overweave.ir.operators.registry import OPERATORS
from overweave.ir.problem import Problem
from overweave.schedules.methods.registry import methods_for
from overweave.schedules.records.record import Method
from overweave.tuner.store.cache import decode, shipped_files

MACHINE, RANKS = "h200x4", 4
# Rows of the activation: a long prefill for methods of chunks, a step of decoding for packed messages.
LONG, SHORT = 8192, 16
COLS, INNER = 3584, 4096
NEAR = 1.02  # times the best of a row
ENGINES = {
    "copy_engine": "copy engine", "copy_kernel": "copy kernel", "library": "library", "tile_kernel": "tiles",
    "reduce_kernel": "reduction kernel", "packed_kernel": "kernel of packed messages",
}  # fmt: skip


def gallery_pages(drawn: str) -> dict[str, str | bytes]:
    """Paths below `docs/` and what they hold: an index, and for each method a page and a picture.

    drawn: `all` pictures, or `one`, which then stands on every page.
    """
    pages: dict[str, str | bytes] = {"gallery/index.md": _index()}
    one: bytes | None = None
    for operator in OPERATORS:
        for method in methods_for(operator):
            pages[f"gallery/{method.full_name}.md"] = _page(method)
            pages[f"gallery/{method.full_name}.png"] = picture = one or _picture(method)
            one = picture if drawn == "one" else None
    return pages


def _index() -> str:
    lines = [
        "# Gallery of methods", "",
        "A method is one way to overlap an operator's matmul with its communication. Each name links to a page",
        "with the method's timeline on four simulated H200s, and with what was measured.", "",
        "`--html FILE` of `show`, `simulate`, `trace` and `demo` writes a method's timeline as a page for a browser,",
        "and `overweave compare` sets two above each other ([how to read them](../how-to/reading-a-trace.md)):", "",
        "![The demo on two H100s in the browser: measured above, simulated below](../pictures/page.png)", "",
    ]  # fmt: skip
    for operator in OPERATORS:
        lines += [f"## {operator}", "", "| method | what happens | best in measured rows |", "| --- | --- | --- |"]
        for method in methods_for(operator):
            won, tried = _wins().get(method.full_name, (0, 0))
            measured = f"{won} of {tried}" if tried else "not measured"
            lines.append(f"| [{method.name}]({method.full_name}.md) | {method.summary} | {measured} |")
        lines.append("")
    return "\n".join(lines)


def _page(method: Method) -> str:
    problem = _problem(method)
    sizes, shape = f"{problem.m} x {problem.n} x {problem.k}", global_shape(problem).replace("x", ",")
    rows = [("multiplies", _engines((method.multiplies,))), ("moves", _engines(method.moves))]
    if method.adds:
        rows += [("adds", f"{_engines((method.adds.by,))}, in the order of: {method.adds.order}")]
    rows += [("options", ", ".join(f"`{option.name}`" for option in method.options) or "none")]
    rows += [("source", method.source or "the library call itself")]
    return "\n".join(
        [
            f"# {method.full_name}", "", f"{_sentence(method.summary)}", "",
            f"![{method.name} on four simulated H200s]({method.full_name}.png)", "",
            f"The picture is simulated: each of four H200s multiplies {sizes} in bf16. No GPU was used for it.", "",
            "| what | how |", "| --- | --- |", *(f"| {what} | {how} |" for what, how in rows), "",
            "## When it wins", "", _when(method), "",
            "## See it", "",
            f"    overweave show {method.full_name} --world 4",
            f"    overweave simulate {method.full_name} --shape {shape} --html page.html", "",
        ]
    )  # fmt: skip


def _engines(engines: tuple[str, ...]) -> str:
    return ", ".join(dict.fromkeys(ENGINES.get(engine, engine) for engine in engines))


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:] + "."


def _when(method: Method) -> str:
    won, tried = _wins().get(method.full_name, (0, 0))
    if method.dropped:
        return f"The tuner does not try this method, which runs by its name alone. {_sentence(method.dropped)}"
    if not tried:
        return "Nobody has timed this method beside the others: the tuner takes it only by name, or with a margin."
    return (
        f"In {won} of {tried} measured problems of the shipped tables, the best candidate of this method took at most"
        f" {NEAR} times the quickest candidate of the problem. `overweave explain {method.operator} --shape M,N,K` says"
        " for a shape which method is taken, and why."
    )


@cache
def _wins() -> Mapping[str, tuple[int, int]]:
    """For each method: in how many measured problems it was the best or near the best, and in how many it was timed."""
    found: dict[str, tuple[int, int]] = {}
    for data in shipped_files().values():
        for entry in decode(data).entries:
            best = min(time.us for time in entry.times)
            for plan in {time.plan for time in entry.times}:
                us = min(time.us for time in entry.times if time.plan == plan)
                won, tried = found.get(f"{entry.problem.operator}.{plan}", (0, 0))
                found[f"{entry.problem.operator}.{plan}"] = (won + (us <= NEAR * best), tried + 1)
    return found


def _problem(method: Method) -> Problem:
    rows = SHORT if method.has_messages else LONG
    return Problem(operator=method.operator, m=rows, n=COLS, k=INNER, world_size=RANKS, dtype="bfloat16")


def _picture(method: Method) -> bytes:
    drawn = BytesIO()
    save_png(drawn, simulate_schedule(method.full_name, _problem(method), {}, MACHINE))
    return drawn.getvalue()
