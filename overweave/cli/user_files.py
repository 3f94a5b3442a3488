"""The user's files of `--load`, which run before a command: they register operators and schedules."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from overweave.errors import InputError

_FILES: list[Path] = []


def load(file: Path) -> None:
    """Run a Python file as a module of its name. Raises InputError for any other file; errors of the file pass
    through."""
    spec = spec_from_file_location(file.stem, file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise InputError(f"load {file}", "it is no Python file", "Name a file that registers what it adds")
    module = sys.modules[file.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    _FILES.append(file.resolve())


def load_options() -> list[str]:
    """Return the options that load the same files in another process."""
    return [f"--load={file}" for file in _FILES]
