"""`overweave`: one command per file of this folder, loaded when it is asked for.

A command is a function of its file's name, typed as typer wants it. Loading by name keeps torch out of the commands
that only read and think: show, verify and simulate start in a fraction of a second on any laptop.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from overweave.cli import loaded
from overweave.errors import InputError, OverweaveError, ScheduleError, ScheduleUndecided, package_error
from overweave.untrusted import printable

COMMANDS = {
    "doctor": "Look at this machine: versions, devices, links, memory; a cure for each check that fails.",
    "demo": "Run both operators with the real kernels on emulated or real ranks and draw what happened.",
    "show": "List the schedules, or print one.",
    "verify": "Prove a schedule file, or say why not: exit 0 proven, 1 refuted, 2 unusable, 3 undecided.",
    "simulate": "Predict how long a schedule takes on a described machine.",
    "compare": "Set two timelines beside each other: schedules, plans or trace files.",
    "explain": "Say which plan an operator would take for a shape, or which schedule a kernel, and why.",
    "tune": "Measure the candidates for a set of shapes and keep the quickest.",
    "bench": "Measure an operator against the library, torch's fused operators and the roofs.",
    "compile": "Fuse an annotated Triton kernel with a schedule; write the source.",
    "calibrate": "Measure this GPU and write a machine file that predictions can be made on.",
    "characterize": "Tell what cutting and overlapping matmuls and transfers lose, measured or predicted.",
    "trace": "Record when each tile and chunk ran, beside what was simulated.",
}
OF_KERNELS = {"explain": "explain_kernel"}  # where it is asked of FILE.py:KERNEL
_KERNEL = re.compile(r".+\.py:\w+", re.DOTALL)
# Of what ends a command; the first kind that fits.
EXIT_CODES = {ScheduleUndecided: 3, InputError: 2, ScheduleError: 2, OverweaveError: 1}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SIGNALLED = 128  # and the signal's number, as shells say it


class _Later(TyperCommand):
    """A command known by its name and help; its file is loaded when its arguments are read."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        single = typer.Typer(add_completion=False)
        is_of_kernel = any(_KERNEL.fullmatch(arg) for arg in args)
        home = OF_KERNELS.get(str(self.name), self.name) if is_of_kernel else self.name
        try:
            function = resolve_name(f"overweave.cli.commands.{home}:{home}")
        except ModuleNotFoundError as error:
            raise package_error(f"load the command {self.name}", error) from error
        single.command(self.name, help=self.help)(function)
        return get_command(single).make_context(info_name, args, parent=parent, **extra)


class _Commands(TyperGroup):
    """Every command of the table whose file is there; our own errors end it without a traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in COMMANDS if find_spec(f"overweave.cli.commands.{name}")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        known = cmd_name in self.list_commands(ctx)
        return _Later(name=cmd_name, help=COMMANDS[cmd_name], callback=_nothing) if known else None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OverweaveError as error:
            typer.echo(printable(f"overweave: {error}"), err=True)
            code = next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))
            raise typer.Exit(code) from None


def _nothing() -> None:
    """Stands in for a command's function until its file is loaded."""


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"overweave {sys.modules['overweave'].__version__}")
        raise typer.Exit


@app.callback()
def overweave(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    load: Annotated[
        list[Path] | None,
        typer.Option(help="Run this Python file first, such as one that registers an operator or a schedule of yours."),
    ] = None,
) -> None:
    """Communication woven into computation: prove, predict, run and measure schedules."""
    for file in load or ():
        loaded.load(file)


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(SIGNALLED + number)


def main() -> None:
    """The console script. A process that is told to end takes its ranks and private files with it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # pictures and file names where a terminal knows no more than ASCII
    if "RANK" not in os.environ:  # a rank has none, and ends at once
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # and not ignored, as behind nohup
                signal.signal(number, _leave)
    try:
        app(prog_name="overweave")
    except OSError as error:
        if error.errno not in FULL:
            raise
        # What is left of the output is dropped: the interpreter would try to write it once more, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        cure = "Free room there, or send the output elsewhere"
        print(f"overweave: write the output: {error.strerror}. {cure}.", file=sys.stderr)
        sys.exit(EXIT_CODES[InputError])


if __name__ == "__main__":
    main()
