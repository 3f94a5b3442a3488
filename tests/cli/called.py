"""A command in this process: what it printed."""

from __future__ import annotations

from typer.testing import CliRunner

from overweave.cli.main import app


def called(*words: str, exit_code: int = 0) -> str:
    """What `overweave WORDS` prints; of a command that fails, in one line."""
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == exit_code, f"{result.output}{result.exception!r}"
    return " ".join(result.output.split()) if exit_code else result.output
