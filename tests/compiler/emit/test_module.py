"""What of an author's file the fused module takes over, and nothing else of it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from overweave.compiler.emit.emit import load_generated
from overweave.errors import InputError
from tests.compiler.annotated import SCALE, fused, refusal

GATHER = "all_gather.push"
USES = ("tl.store(y_ptr + at, x)", "tl.store(y_ptr + at, x * FACTOR)")


@pytest.mark.slow
@pytest.mark.parametrize(
    "defined",
    [
        "FACTOR = tl.constexpr(3)",
        "if True:\n    FACTOR = tl.constexpr(3)\nelse:\n    FACTOR = tl.constexpr(4)",
        "try:\n    from nowhere import FACTOR\nexcept ImportError:\n    FACTOR = tl.constexpr(3)",
        "TWO = 1\nTWO += 1\nclass Numbers:\n    THREE = TWO + 1\nFACTOR = tl.constexpr(Numbers.THREE)",
        "from math import *\nFACTOR = tl.constexpr(int(pi))",
    ],
)
def test_constants_come_along_however_they_are_defined(tmp_path: Path, defined: str):
    text = fused(
        tmp_path, SCALE, GATHER, ("import triton\n", f"import triton\nimport triton.language as tl\n{defined}\n"), USES
    )
    module = load_generated(tmp_path, "scale", text.source())
    assert module.__globals__["FACTOR"].value == 3


def test_what_the_kernel_does_not_mean_stays_behind(tmp_path: Path):
    """Its own variables may be called as something of the file is; so may those of a script's last lines."""
    other = "\nx = open('absent')\nat: object = 1 / 0\nif __name__ == '__main__':\n    rows = FACTOR = 1\n"
    text = fused(tmp_path, SCALE + other, GATHER).source()
    assert "absent" not in text
    assert "1 / 0" not in text
    assert "__main__" not in text
    load_generated(tmp_path, "scale", text)


def test_names_of_annotations_alone_need_not_exist(tmp_path: Path):
    text = "from __future__ import annotations\nfrom typing import TYPE_CHECKING\n" + SCALE
    absent = ("import triton\n", "import triton\nif TYPE_CHECKING:\n    import absent\n")
    typed = ("x_ptr, y_ptr", "x_ptr: absent.Tensor, y_ptr")
    written = fused(tmp_path, text, GATHER, absent, typed).source()
    assert ast.parse(written).body[1].lineno < written.splitlines().index("import triton") + 1
    load_generated(tmp_path, "scale", written)


@pytest.mark.slow
def test_relative_imports_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "outer_package" / "inner"
    folder.mkdir(parents=True)
    for one in (folder, folder.parent):
        (one / "__init__.py").touch()
        (one / "constants.py").write_text("import triton.language as tl\nFACTOR = tl.constexpr(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for dots in (".", ".."):
        imported = ("import triton\n", f"import triton\nfrom {dots}constants import FACTOR\n")
        written = fused(folder, SCALE, GATHER, imported, USES).source()
        assert f"from outer_package{'.inner' if dots == '.' else ''}.constants import FACTOR" in written
        load_generated(tmp_path / "out", "scale", written)
    assert "leads to no package" in _source_refused(folder, "...constants")
    assert "outer_package.constants" in sys.modules


def _source_refused(folder: Path, module: str) -> str:
    imported = ("import triton\n", f"import triton\nfrom {module} import FACTOR\n")
    with pytest.raises(InputError) as caught:
        fused(folder, SCALE, GATHER, imported, USES).source()
    return str(caught.value)


def test_a_module_that_cannot_be_imported_is_a_typed_error(tmp_path: Path):
    with pytest.raises(InputError, match="ZeroDivisionError"):
        load_generated(tmp_path, "scale", "scale = 1 / 0\n")


def test_a_decorator_that_runs_around_the_kernel_is_named(tmp_path: Path):
    said = refusal(
        tmp_path, SCALE, GATHER, ("@triton.jit\ndef scale", "@triton.heuristics({})\n@triton.jit\ndef scale")
    )
    assert "'heuristics'" in said
    assert "calls name the constants" in said
