"""Kernels as public ones are written, with directives alone: they are believed, and touch what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from overweave.compiler.emit.fuse import kernel_of
from overweave.compiler.emit.kernel import Kernel
from overweave.compiler.frontend.rectangles import check_places
from overweave.errors import DirectiveError
from overweave.ops.author import trial
from overweave.ops.author.arguments import constants_of
from overweave.ops.author.trial import CHECKED, check_footprint
from tests.clock import slowness
from tests.compiler.annotated import changed
from tests.compiler.untruths.public_forms import FORMS, INNER
from tests.compiler.untruths.public_rows import HEAD, Form


def read(folder: Path, form: Form) -> Kernel:
    path = folder / f"{form.name}.py"
    path.write_text(HEAD + form.text)
    return kernel_of(path, form.name)


def given(form: Form) -> dict[str, Any]:
    integers = {"Y_ptr"} if form.name == "cross_entropy_kernel" else set()
    shapes = {name: value for name, value in form.call.items() if isinstance(value, tuple)}
    dtypes = {name: torch.int32 if name in integers else torch.float32 for name in shapes}
    return form.call | {name: torch.zeros(shape, dtype=dtypes[name]) for name, shape in shapes.items()}


@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_a_true_kernel_is_believed(tmp_path: Path, form: Form):
    check_places(read(tmp_path, form), constants_of(given(form)))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_a_true_kernel_touches_what_it_says(tmp_path: Path, form: Form, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial, "LONGEST_S", 60.0 * slowness())
    assert check_footprint(read(tmp_path, form), given(form)) == CHECKED


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            ("        qk = tl.dot(q, k.T)", "        k += tl.load(k_ptrs)\n        qk = tl.dot(q, k.T)"),
            "at another place",
        ),
        (("# @overweave.load K=K[N_CTX", "# @overweave.stream S\n        # @overweave.load K=K[N_CTX"), "it stands in"),
        (("# @overweave.load K=K[N_CTX", "# @overweave.load K=Q[N_CTX"), "Q"),
    ],
)
def test_what_a_function_of_the_file_loads_is_held_to_its_directives(
    tmp_path: Path, change: tuple[str, str], found: str
):
    path = tmp_path / "kernel.py"
    path.write_text(HEAD + changed(INNER.text, change))
    with pytest.raises(DirectiveError, match=found):
        kernel_of(path, INNER.name)
