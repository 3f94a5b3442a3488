"""Files of the user's that a command runs first: they register operators and schedules of his own."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from overweave.errors import InputError

_FILES: list[Path] = []


def load(file: Path) -> None:
    """Runs a Python file as a module of its name. Raises InputError for none, and whatever the file raises."""
    spec = spec_from_file_location(file.stem, file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise InputError(f"load {file}", "it is no Python file", "Name a file that registers what it adds")
    module = sys.modules[file.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    _FILES.append(file.resolve())


def words() -> list[str]:
    """What starts another process with the same files."""
    return [f"--load={file}" for file in _FILES]
