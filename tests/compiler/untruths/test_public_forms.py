"""Kernels as public ones are written, with directives alone, are believed; authored_forms.py tries them."""

from __future__ import annotations

from pathlib import Path

import pytest

from overweave.compiler.emit.fuse import kernel_of
from overweave.compiler.frontend.rectangles import check_addresses
from overweave.errors import DirectiveError
from overweave.ops.author.arguments import constants_of
from tests.compiler.annotated import changed
from tests.compiler.untruths.public_forms import FORMS, INNER
from tests.compiler.untruths.public_rows import HEAD, Form


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_a_true_kernel_is_believed(tmp_path: Path, form: Form):
    check_addresses(form.read(tmp_path), constants_of(form.given()))


@pytest.mark.slow
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
