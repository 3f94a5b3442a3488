"""Kernels as public ones are written, with directives alone: they are believed, and touch what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from overweave.compiler.emit.fuse import kernel_of
from overweave.compiler.emit.kernel import Kernel
from overweave.compiler.frontend.rectangles import check_places
from overweave.ops.author import trial
from overweave.ops.author.arguments import constants_of
from overweave.ops.author.trial import CHECKED, check_footprint
from tests.clock import slowness
from tests.compiler.untruths.public_forms import FORMS
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


@pytest.mark.parametrize("form", FORMS, ids=[form.name for form in FORMS])
def test_a_true_kernel_is_believed(tmp_path: Path, form: Form):
    check_places(read(tmp_path, form), constants_of(given(form)))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=[form.name for form in FORMS])
def test_a_true_kernel_touches_what_it_says(tmp_path: Path, form: Form, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial, "LONGEST_S", 60.0 * slowness())
    assert check_footprint(read(tmp_path, form), given(form)) == CHECKED
