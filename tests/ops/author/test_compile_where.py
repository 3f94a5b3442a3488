"""Which function of which file is compiled: the one that is passed, or none."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from overweave.errors import InputError
from overweave.ops.author.arguments import kernel_location
from overweave.ops.author.compile import compile
from tests.compiler.annotated import SCALE

NESTED = """
def make():
    def scale(x):
        return x

    return scale


class Kernels:
    def scale(self):
        return self
"""


def imported(path: Path, text: str) -> ModuleType:
    path.write_text(text)
    spec = spec_from_file_location("kernels_to_find", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_function_inside_another_is_not_taken_for_one_of_the_file(tmp_path: Path):
    module = imported(tmp_path / "kernels.py", SCALE + NESTED)
    assert kernel_location(module.scale) == (tmp_path / "kernels.py", "scale", module.scale.fn.__code__.co_firstlineno)
    for function in (module.make(), module.Kernels.scale):
        with pytest.raises(InputError, match="stands inside another function, or a class"):
            compile(function, "all_gather.push")


@pytest.mark.parametrize("other", [sys, Path, len, 3, None, NESTED.strip])
def test_what_is_no_function_of_a_file_is_refused(other: object):
    with pytest.raises(InputError, match="no source file"):
        compile(other, "all_gather.push")


def test_another_definition_of_the_same_name_is_not_taken(tmp_path: Path):
    """At the top level stands one, and Python has another."""
    again = SCALE.split("language as tl\n")[1].replace(
        "@triton.jit\ndef scale", "if True:\n    @triton.jit\n    def scale"
    )
    head, body = again.split("    def scale")
    below = "\n".join(f"    {line}" for line in body.split("\n")[1:])
    module = imported(tmp_path / "kernels.py", f"{SCALE}\n{head}    def scale{body.splitlines()[0]}\n{below}")
    with pytest.raises(InputError, match="the one that is meant began in line"):
        compile(module.scale, "all_gather.push")


def test_a_file_that_has_grown_since_is_refused(tmp_path: Path):
    module = imported(tmp_path / "kernels.py", SCALE)
    compile(module.scale, "all_gather.push")
    (tmp_path / "kernels.py").write_text("\n" * 100 + SCALE)
    with pytest.raises(InputError, match="import it again"):
        compile(module.scale, "all_gather.push")
