"""`overweave`: one command per file of `commands`, imported when it is called.

A command is a function of its file's name, typed for typer. Lazy imports keep torch out of the commands that only read
and compute: show, verify and simulate start in a fraction of a second on any laptop.
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

from overweave.cli import user_files
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
KERNEL_COMMANDS = {"explain": "explain_kernel"}  # command -> its file if an argument is FILE.py:KERNEL
_KERNEL = re.compile(r".+\.py:\w+", re.DOTALL)
# Error -> exit code of the command; the first class that fits.
EXIT_CODES = {ScheduleUndecided: 3, InputError: 2, ScheduleError: 2, OverweaveError: 1}
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SIGNALLED = 128  # exit code of a signal, plus its number, as of shells


class _Later(TyperCommand):
    """A command known by its name and help; its file is imported when its arguments are parsed."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Import the command's file and parse the arguments with its function."""
        single = typer.Typer(add_completion=False)
        is_of_kernel = any(_KERNEL.fullmatch(arg) for arg in args)
        home = KERNEL_COMMANDS.get(str(self.name), self.name) if is_of_kernel else self.name
        try:
            function = resolve_name(f"overweave.cli.commands.{home}:{home}")
        except ModuleNotFoundError as error:
            raise package_error(f"load the command {self.name}", error) from error
        single.command(self.name, help=self.help)(function)
        return get_command(single).make_context(info_name, args, parent=parent, **extra)


class _Commands(TyperGroup):
    """Every command of the table whose file exists; our own errors end it without a traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in COMMANDS if find_spec(f"overweave.cli.commands.{name}")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        known = cmd_name in self.list_commands(ctx)
        return _Later(name=cmd_name, help=COMMANDS[cmd_name], callback=_placeholder) if known else None

    def invoke(self, ctx: Any) -> Any:
        """Run the command; print our own errors and exit with their code."""
        try:
            return super().invoke(ctx)
        except OverweaveError as error:
            typer.echo(printable(f"overweave: {error}"), err=True)
            code = next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))
            raise typer.Exit(code) from None


def _placeholder() -> None:
    """Stand in for a command's function until its file is imported."""


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
        user_files.load(file)


def _exit_by_signal(number: int, _frame: FrameType | None) -> None:
    """End the process with the exit status of a signal; exit handlers end its ranks and delete its temporary files."""
    sys.exit(SIGNALLED + number)


def main() -> None:
    """Run the console script. If the process is told to end, its ranks and temporary files go with it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # pictures and file names in a terminal with ASCII only
    if "RANK" not in os.environ:  # a rank has no ranks of its own, and may end at once
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # not if ignored, as by nohup
                signal.signal(number, _exit_by_signal)
    try:
        app(prog_name="overweave")
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        # Drop the buffered output: the interpreter would try to write it again at exit, and fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        cure = "Free room there, or send the output elsewhere"
        print(f"overweave: write the output: {error.strerror}. {cure}.", file=sys.stderr)
        sys.exit(EXIT_CODES[InputError])


if __name__ == "__main__":
    main()
