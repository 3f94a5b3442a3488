"""The reference page of the commands, from the command line itself."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup
from typer.main import get_command

from overweave.cli.main import COMMANDS, app

HEAD = """# Commands

Every command ends with 0 where all is well, 2 where an argument cannot be used, and 1 or 3 as its own text says.
`overweave COMMAND --help` prints what stands here.
"""


def commands_page() -> str:
    """One section a command: what the command does, its arguments and its options."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    context = group.make_context("overweave", [], resilient_parsing=True)
    return "\n".join([HEAD, *(_section(group, context, name) for name in COMMANDS)])


def _section(group: TyperGroup, context: Any, name: str) -> str:
    command = group.get_command(context, name)
    assert command is not None
    # The command's file is loaded as its context is made.
    inner = command.make_context(name, [], parent=context, resilient_parsing=True)
    rows = [_row(parameter, inner) for parameter in inner.command.params]
    usage = inner.command.collect_usage_pieces(inner)
    lines = [f"## overweave {name}", "", COMMANDS[name], "", f"    overweave {name} {' '.join(usage)}", ""]
    if rows:
        lines += ["| argument or option | default | meaning |", "| --- | --- | --- |", *rows, ""]
    return "\n".join(lines)


def _row(parameter: Any, context: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    default = parameter.get_default(context, call=False)
    shown = "" if default in (None, (), False) or callable(default) else f"`{getattr(default, 'value', default)}`"
    meaning = getattr(parameter, "help", "") or ""
    return f"| {names} | {shown} | {meaning.replace('|', ', ')} |"
