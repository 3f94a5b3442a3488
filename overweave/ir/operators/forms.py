"""Forms: what a call may ask of an operator beyond its bare product (bias, gate, norm, scales ...), as records.

Keywords of operators, their schemas in torch's dispatcher, checks of arguments and results of calls derive from these
records. The arithmetic of built-in epilogues: ir/epilogue.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from overweave.errors import InputError

BIAS, RESIDUAL, GATE = "bias", "residual", "gate"
NORM, NORM_WEIGHT, Z = "norm", "norm_weight", "z"
NORM_EPS = 1e-5  # the default
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
    """Something that a call may ask of an operator beyond its bare product.

    allowed_by: the field of an operator's `Forms` that allows it. inputs: tensors that callers pass. options: other
    arguments, name -> its declaration in a schema. keyword: one keyword for all of it; empty: the names of inputs and
    options. makes: names of the results beside the products.

    Fields of a registered epilogue, which is applied last, to each element of the product or of the sum over ranks:
    name; numbers: float arguments, name -> a value to try it with. reference: `reference(y, beside)` in plain torch,
    where beside are the inputs, then the numbers. device: the same on fp32 in triton.language, a plain function that is
    compiled into the kernels. Gradients follow from the reference.
    """

    allowed_by: str = "epilogue"
    inputs: tuple[Input, ...] = ()
    options: dict[str, str] = {}
    keyword: str = ""
    makes: tuple[str, ...] = ()
    name: str = ""
    numbers: dict[str, float] = {}
    reference: Callable[[Any, tuple[Any, ...]], Any] | None = None
    device: Callable[..., Any] | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """Return the names of all its arguments in a schema. Passing the first one asks for the form."""
        return (*(each.name for each in self.inputs), *self.options, *self.numbers)

    @property
    def declared(self) -> tuple[str, ...]:
        """Return the declarations of its arguments that are no tensors."""
        return (*self.options.values(), *(f"float? {name}=None" for name in self.numbers))

    def beside(self, tensors: Mapping[str, Any], numbers: tuple[float, ...]) -> tuple[Any, ...]:
        """Return the second argument of `reference` and `device`: the inputs, then the numbers."""
        return (*(tensors[each.name] for each in self.inputs), *numbers)

    @property
    def keywords(self) -> tuple[str, ...]:
        return (self.keyword,) if self.keyword else self.words


FORMS = [
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
]


REGISTERED: dict[str, Form] = {}  # name -> epilogue, in the order in which they are applied


def register(form: Form) -> None:
    """Add an epilogue to every operator that takes epilogues; does nothing if it is registered already.

    Raises InputError for a name that is taken, or an epilogue that is not one of single elements.
    """
    if REGISTERED.get(form.name) is form:
        return
    taken = {word for each in FORMS for word in (*each.words, *each.keywords, each.name)}
    taken |= {"x", "w", "m", "plan", "counts", "most", "tokens", "group_name", "save", "gradients", "backward_plan"}
    taken |= {"place", "silu", "gelu", "gelu_tanh", "rms_norm"}
    asked, names = f"register the epilogue {form.name[:40]!r}", (form.name, *form.words)
    clash = next((name for name in names if not name.isidentifier() or name in taken), None)
    if clash is not None or not form.words:
        found = "it reads nothing" if clash is None else f"{clash!r} is taken, or no name"
        raise InputError(asked, found, "Name what it reads, and nothing as others do")
    is_beside = all(read.rows != "k" and read.cols != "of_columns" and read.dtype != "factor" for read in form.inputs)
    of_elements = is_beside and not (form.options or form.makes)
    if form.reference is None or form.device is None or form.allowed_by != "epilogue" or not of_elements:
        cure = "Give both; what it reads are inputs and numbers, and it makes nothing but the product's elements"
        raise InputError(asked, "no reference or no device function, or more than elements", cure)
    FORMS.append(form)
    REGISTERED[form.name] = form


def registered(name: str) -> Form:
    """Return a registered epilogue by its name. Raises InputError if there is none."""
    if name not in REGISTERED:
        raise InputError(f"epilogue {name[:40]!r}", "nobody has registered it", "Register its Form first")
    return REGISTERED[name]


def input_of(name: str) -> Input | None:
    """Return the record of an input of any form; None for another tensor."""
    return next((each for form in FORMS for each in form.inputs if each.name == name), None)


def lies_row_by_row(name: str) -> bool:
    """Return whether a tensor beside the product is row-major in every call: a factor is laid out as the weight."""
    read = input_of(name)
    return read is None or read.dtype != "factor"


# The argument that asks for a form -> the results that the form makes beside the products.
MADE_BY = {form.words[0]: form.makes for form in FORMS if form.makes}
