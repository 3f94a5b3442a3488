"""Fused kernels as files, named after the digest of their text, and imported from there.

Triton reads a kernel's source from its file, so a fused kernel must have one. A file with any other text than
the one just emitted is overwritten.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from overweave.errors import InputError, MachineError

_LOADED: dict[Path, Any] = {}  # file -> module


def generated_path(folder: Path, name: str, text: str) -> Path:
    """Return the file of the fused kernel `name`, by the digest of its text."""
    return folder / f"{name}_{blake2b(text.encode(), digest_size=8).hexdigest()}.py"


def write_generated(folder: Path, name: str, text: str) -> Path:
    """Write the file atomically, unless it exists with this text. Return its path. Raises MachineError."""
    path = generated_path(folder, name, text)
    try:
        if not path.is_file() or path.read_bytes() != text.encode():
            folder.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{os.getpid()}.draft")
            draft.write_bytes(text.encode())
            draft.replace(path)
    except OSError as error:
        cure = "Set OVERWEAVE_CACHE_DIR to a folder that can be written"
        raise MachineError(f"write the fused kernel {path.name}", str(error), cure) from error
    return path


def load_generated(folder: Path, name: str, text: str) -> Any:
    """Import the fused kernel `name` from its file, once. Raises MachineError, and InputError if the import fails."""
    path = write_generated(folder, name, text)
    if path not in _LOADED:
        spec = spec_from_file_location(f"overweave_generated_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise MachineError(f"import {path.name}", "Python has no loader for it", "Report this")
        module = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            cure = "Let the file define or import, at its top level, all that the kernel uses"
            raise InputError(
                f"import the fused kernel {name}", f"{type(error).__name__}: {error}"[:200], cure
            ) from error
        _LOADED[path] = module
    return getattr(_LOADED[path], name)
