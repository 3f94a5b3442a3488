"""Forms: what a call may ask of an operator beyond its bare product (bias, gate, norm, scales ...), as records.

Keywords of operators, their schemas in torch's dispatcher, checks of arguments and results of calls derive from these
records. The arithmetic of built-in epilogues: ir/epilogue.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from msgspec import Struct

from overweave.errors import InputError

BIAS, RESIDUAL, GATE = "bias", "residual", "gate"
Activation = Literal["silu", "gelu", "gelu_tanh"]
Scaling = Literal["tensor", "rows"]
NORM, NORM_WEIGHT, Z = "norm", "norm_weight", "z"
NORM_EPS = 1e-5  # the default
SCALE_X, SCALE_W = "scale_x", "scale_w"
SCALE_DTYPE: Literal["float32"] = "float32"
MADE_DTYPES = ("result", "float32", "bfloat16", "float16", "float8_e4m3fn")
# product: of a result that is no sum. part: of each rank's product, before it is added. sum: of the sum of all ranks'
# products. row: of a whole row of that sum.
Place = Literal["product", "part", "sum", "row"]


class Input(NamedTuple):
    """A tensor that a form reads, or makes. rows, cols: extents of a Problem (`Problem.operand`); y: the rows of the
    result, x: those of the factor, k: of a further weight, whose product is read; of_columns, products: n
    or one for each weight. dtype: that of the `result`, of a `factor`, or its name.
    """

    name: str
    rows: Literal["1", "k", "x", "y"] = "1"
    cols: Literal["1", "n", "of_columns", "products"] = "n"
    dtype: str = "result"


class OfRow(Struct, frozen=True, kw_only=True):
    """The one number of a whole row that its elements are stored by, as functions of triton.language on fp32.

    of_element: what each element counts for, never less than zero, and zero of zero. combine: how those of a row are
    joined. number: `number(joined, n, numbers)`, of the n columns and the form's numbers.
    """

    of_element: Callable[..., Any]
    number: Callable[..., Any]
    combine: Literal["sum", "max"] = "sum"


class Form(Struct, frozen=True, kw_only=True):
    """Something that a call may ask of an operator beyond its bare product.

    allowed_by: the field of an operator's `Forms` that allows it. inputs: tensors that callers pass. options: other
    arguments, name -> its declaration in a schema. keyword: one keyword for all of it; empty: the names of inputs and
    options. makes: the results beside the products.

    Fields of a registered epilogue: name; numbers: float arguments, name -> a value to try it with. where: what it may
    be done to. Elements of products and sums are done last, those of parts next to their scales: what is done to parts
    is linear, and the same on all ranks. A form of parts and of sums is done to sums. reference: `reference(y, beside)`
    in plain torch, where beside are the inputs, then the numbers; it may change y. device: the same on fp32 in
    triton.language, a plain function that is compiled into the kernels. Gradients follow from the reference.

    of_row: of a form of whole rows, which makes elements of y's shape, and beside them the rows' numbers `[m, 1]` or
    nothing; a call returns these in place of y. reference returns both. device: `device(y, number, beside)`.
    """

    allowed_by: str = "epilogue"
    inputs: tuple[Input, ...] = ()
    options: dict[str, str] = {}
    keyword: str = ""
    makes: tuple[Input, ...] = ()
    name: str = ""
    numbers: dict[str, float] = {}
    where: tuple[Place, ...] = ("product", "sum")
    reference: Callable[[Any, tuple[Any, ...]], Any] | None = None
    device: Callable[..., Any] | None = None
    of_row: OfRow | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """Return the names of all its arguments in a schema. Passing the first one asks for the form."""
        return (*(each.name for each in self.inputs), *self.options, *self.numbers)

    @property
    def declared(self) -> tuple[str, ...]:
        """Return the declarations of its arguments that are no tensors."""
        return (*self.options.values(), *(f"float? {name}=None" for name in self.numbers))

    @property
    def keywords(self) -> tuple[str, ...]:
        return (self.keyword,) if self.keyword else self.words


# In torch and on the device, so without types.
def _plus(y, beside):  # type: ignore[no-untyped-def]
    y += beside[0]
    return y


def _more(y, beside):  # type: ignore[no-untyped-def]
    return y + beside[0]


def _times(y, beside):  # type: ignore[no-untyped-def]
    return y * beside[0]


def _scaled(y, beside):  # type: ignore[no-untyped-def]
    return y * (beside[0] * beside[1])


_ONE_SCALE, _SCALE_W = Input(SCALE_X, cols="1", dtype=SCALE_DTYPE), Input(SCALE_W, cols="of_columns", dtype=SCALE_DTYPE)
# What epilogues are made of (`Epilogue.steps`), by name. What has no functions here has them by its name where torch is
# known, and where the device's language is. Biases and scales of both products of a gate lie one behind the other.
BUILT_IN = {
    BIAS: Form(inputs=(Input(BIAS),), reference=_plus, device=_plus),
    RESIDUAL: Form(inputs=(Input(RESIDUAL, "y"),), reference=_plus, device=_plus),
    GATE: Form(inputs=(Input(GATE, "k", dtype="factor"),), allowed_by=GATE, reference=_times, device=_times),
    "bias of both": Form(inputs=(Input(BIAS, cols="of_columns"),), reference=_plus, device=_plus),
    "tensor": Form(inputs=(_ONE_SCALE, _SCALE_W._replace(cols="products")), device=_scaled),
    "rows": Form(inputs=(_ONE_SCALE._replace(rows="x"), _SCALE_W), device=_scaled),
    "plus": Form(numbers={"addend": 0.0}, reference=_more, device=_more),
    "times": Form(numbers={"factor": 1.0}, reference=_times, device=_times),
    **{name: Form(name=name, numbers={"limit": 1.0}) for name in ("at most", "within")},
    **{name: Form(name=name) for name in get_args(Activation)},
}
FORMS = [
    BUILT_IN[BIAS],
    Form(options={"activation": "str? activation=None"}),
    BUILT_IN[RESIDUAL],
    BUILT_IN[GATE],
    Form(
        inputs=(Input(NORM_WEIGHT),),
        options={"norm_eps": f"float norm_eps={NORM_EPS}"},
        allowed_by=NORM,
        keyword=NORM,
        makes=(Input(Z, "y"),),
    ),
    Form(
        inputs=(_ONE_SCALE, _SCALE_W),
        options={"out_dtype": "ScalarType? out_dtype=None"},
        allowed_by="scaling",
    ),
    Form(options={"return_gathered": "bool return_gathered=False"}, allowed_by="returns_gathered"),
]


REGISTERED: dict[str, Form] = {}  # name -> epilogue, in the order in which they are applied


def register(form: Form) -> bool:
    """Add an epilogue to every operator that takes such; return False, and do nothing, if it is registered already.

    Raises InputError for a name that is taken, or an epilogue that nothing could do where it says.
    """
    if REGISTERED.get(form.name) is form:
        return False
    names = (form.name, *form.words, *(each.name for each in form.makes))
    taken = {word for each in FORMS for word in (*each.words, *each.keywords, each.name)} | {Z}
    taken |= {"x", "w", "y", "m", "plan", "counts", "most", "tokens", "group_name", "save", "gradients"}
    taken |= {"rows", "rows_of_all", "gathered_out", "backward_plan", "place", "rms_norm", *BUILT_IN}
    taken |= {made.name for each in FORMS for made in each.makes}
    asked = f"register the epilogue {form.name[:40]!r}"
    clash = next((name for name in names if not name.isidentifier() or name in taken), None)
    if clash is not None or not form.words:
        found = "it reads nothing" if clash is None else f"{clash!r} is taken, or no name"
        raise InputError(asked, found, "Name what it reads, and nothing as others do")
    if found := _obstacle(form):
        raise InputError(asked, found, "See Form in overweave/ir/operators/forms.py")
    FORMS.append(form)
    REGISTERED[form.name] = form
    return True


def _obstacle(form: Form) -> str:
    """Return why nothing could do what a registered epilogue says; "" if something can."""
    if form.reference is None or form.device is None:
        return "no reference or no device function"
    if any(read.rows in "kx" or read.cols not in ("1", "n") or read.dtype == "factor" for read in form.inputs):
        return "an input has other rows or columns than the result"
    if form.options or form.allowed_by != "epilogue" or not {*form.where} <= {*get_args(Place)} or not form.where:
        return "options, another keyword, or no place where it is done"
    if "part" in form.where and any(read.rows == "y" for read in form.inputs):
        return "an input has the rows of the result, which parts do not have"
    if ("row" in form.where) != (form.of_row is not None) or (form.of_row and form.where != ("row",)):
        return "of_row is for whole rows, and these are the only place of such a form"
    made = [(each.rows, each.cols) for each in form.makes]
    if made not in ([("y", "n")], [("y", "n"), ("y", "1")]) if form.of_row else made:
        return "whole rows make elements, and then numbers of rows; nothing else makes anything"
    unknown = [each.dtype for each in form.makes if each.dtype not in MADE_DTYPES]
    return f"it makes {unknown[0]}, which is none of {', '.join(MADE_DTYPES)}" if unknown else ""


def registered(name: str) -> Form:
    """Return an epilogue by its name, built in or registered. Raises InputError if there is none."""
    form = BUILT_IN.get(name) or REGISTERED.get(name)
    if form is None:
        raise InputError(f"epilogue {name[:40]!r}", "nobody has registered it", "Register its Form first")
    return form


def input_of(name: str) -> Input | None:
    """Return the record of an input of any form, or of what it makes; None for another tensor."""
    return next((each for form in FORMS for each in (*form.inputs, *form.makes) if each.name == name), None)


def results_beside(given: Mapping[str, Any], products: Sequence[str]) -> tuple[str, ...]:
    """Return the names of what a call returns but for what it gathered. given: its arguments, in the words of forms.

    products: the names of its products. Whole rows that a registered form makes stand in their place.
    """
    asked = [form for form in FORMS if form.makes and given.get(form.words[0]) is not None]
    made = tuple(each.name for form in asked for each in form.makes)
    return made if any(form.of_row for form in asked) else (*products, *made)
