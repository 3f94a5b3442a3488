"""What may be asked of an operator beyond its bare product, as records: what callers pass for it, the tensors that it
reads and makes.

Keywords of operators, their schemas in torch's dispatcher, the checks of what is passed and the results of calls follow
from these records. What is done to a product by them: ir/epilogue.py.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec import Struct

BIAS, RESIDUAL, GATE = "bias", "residual", "gate"
NORM, NORM_WEIGHT, Z = "norm", "norm_weight", "z"
NORM_EPS = 1e-5  # where nobody says another
SCALE_X, SCALE_W = "scale_x", "scale_w"
SCALE_DTYPE: Literal["float32"] = "float32"


class Input(NamedTuple):
    """A tensor of the caller's that a form reads. rows, cols: extents of a Problem (`Problem.operand`); y: the rows of
    the result. dtype: that of the `result`, of a `factor`, or its name.
    """

    name: str
    rows: Literal["1", "k", "y"] = "1"
    cols: Literal["1", "n", "of_columns"] = "n"
    dtype: str = "result"


class Form(Struct, frozen=True, kw_only=True):
    """Something that may be asked of an operator beyond its bare product.

    allowed_by: the field of an operator's `Forms` that says whether. options: what is passed beside tensors, as a
    schema declares it. keyword: what callers pass for all of it; empty: the names of inputs and options. makes: results
    beside the products.
    """

    allowed_by: str = "epilogue"
    inputs: tuple[Input, ...] = ()
    options: dict[str, str] = {}
    keyword: str = ""
    makes: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """All that is passed for it, in the words of a schema. The first one asks for the form."""
        return (*(each.name for each in self.inputs), *self.options)

    @property
    def keywords(self) -> tuple[str, ...]:
        """What a caller passes by name."""
        return (self.keyword,) if self.keyword else self.words


FORMS = (
    Form(inputs=(Input(BIAS),)),
    Form(options={"activation": "str? activation=None"}),
    Form(inputs=(Input(RESIDUAL, "y"),)),
    Form(inputs=(Input(GATE, "k", dtype="factor"),), allowed_by=GATE),
    Form(
        inputs=(Input(NORM_WEIGHT),),
        options={"norm_eps": f"float norm_eps={NORM_EPS}"},
        allowed_by=NORM,
        keyword=NORM,
        makes=(Z,),
    ),
    Form(
        inputs=(Input(SCALE_X, cols="1", dtype=SCALE_DTYPE), Input(SCALE_W, cols="of_columns", dtype=SCALE_DTYPE)),
        options={"out_dtype": "ScalarType? out_dtype=None"},
        allowed_by="scaling",
    ),
    Form(options={"return_gathered": "bool return_gathered=False"}, allowed_by="returns_gathered"),
)


def input_of(name: str) -> Input | None:
    """The record of a tensor that a form reads; None of any other tensor."""
    return next((each for form in FORMS for each in form.inputs if each.name == name), None)


def lies_row_by_row(name: str) -> bool:
    """Whether a tensor beside the product is row-major in every call: a factor lies as the weight does."""
    read = input_of(name)
    return read is None or read.dtype != "factor"


# The results beside the products, by what is passed, in the words of schemas, to ask for them.
MADE_BY = {form.words[0]: form.makes for form in FORMS if form.makes}
