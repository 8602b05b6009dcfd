"""Declare the options of the config beside what they configure, and compare a config with them.

A group is a pydantic model; the options of a class or function are its parameters:

    class Recipe(Options):            # tasks/options.py
        lr: Amount

    def window(window: Size = 5):     # layers/patterns.py: `pattern=window pattern.window=3`
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from speechformer.errors import UserError, pick, unknown

T = TypeVar("T")
Whole = Annotated[int, Field(ge=0, lt=2**32)]
Count = Annotated[int, Field(ge=1, lt=2**32)]
Size = Annotated[int, Field(ge=1, le=2**20)]
Few = Annotated[int, Field(ge=1, le=500)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0, le=1e6)]
Positive = Annotated[float, Field(gt=0, le=1e12)]
RULES = {  # what a value must be, by pydantic's type of error; for others, pydantic's own words
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "value_error": "{error}",
}


class Options(BaseModel):
    """A group of keys: all of them and no others, with values of exactly their types, and with finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


class Named(Options):
    """A choice of a group."""

    name: str


M = TypeVar("M", bound=Options)


def check(model: type[M], options: Mapping[str, Any], place: str = "") -> M:
    """Return options, which are plain data, as the model that declares them.

    Args:
        place: their key in the config; "" for the whole config.

    Raises:
        UserError: with the key, what its value must be, and the value.
    """
    try:
        return model.model_validate(options)
    except ValidationError as error:
        errors: list[Any] = error.errors()
    first, value, path = errors[0], options, list[str]()
    for name in first["loc"]:  # a key, the index of an item, or at the end the type of a union
        try:
            value = value[name]
        except (KeyError, TypeError):
            break
        path.append(str(name))
    if isinstance(cause := first.get("ctx", {}).get("error"), UserError):
        raise cause
    key = ".".join(filter(None, (place, *path)))
    if first["type"] == "missing":
        raise UserError(f"{key or 'the config'} lacks {first['loc'][-1]}; every key of its yaml file is required.")
    if first["type"] == "extra_forbidden":
        raise unknown(place or "the config", "key", ".".join(path), model.model_fields)
    rules = [
        RULES.get(each["type"], each["msg"].removeprefix("Input should be ")).format(**each.get("ctx", {}))
        for each in errors
        if each["loc"][: len(path)] == first["loc"][: len(path)]
    ]
    raise UserError(f"{key} must be {' or '.join(rules)}, not {value!r}.")


@functools.cache
def options_of(function: Callable[..., Any], *common: str) -> type[Options]:
    """Declare the parameters of a function, or of a class's constructor, but for the `common` ones, as options.

    A constructor that takes `**options` passes those of its base class on.

    Raises:
        UserError: a parameter has no type.
    """
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    fields: Any = {}
    for p in parameters:
        if p.name not in common and p.kind is not p.VAR_KEYWORD:
            if p.annotation is p.empty:
                raise UserError(f"{function.__name__}: {p.name} needs a type, for example {p.name}: Positive = 2.0.")
            fields[p.name] = p.annotation, ... if p.default is p.empty else p.default
    takes_more = isinstance(function, type) and any(p.kind is p.VAR_KEYWORD for p in parameters)
    base = options_of(function.__base__, *common) if takes_more else Options  # type: ignore[attr-defined]
    return create_model(function.__name__, __base__=base, **fields)


def build(kinds: Mapping[str, Callable[..., T]], spec: Mapping[str, Any], group: str, **common: Any) -> T:
    """Call `kinds[spec["name"]]` with the other entries of `spec` and with `common`.

    Args:
        spec: a config group as plain data, for example `{"name": "window", "window": 5}`.
        group: name of that group, for error messages.

    Raises:
        UserError: the name or an option is unknown, or a value is invalid.
    """
    function = pick(kinds, spec["name"], f"{group}.name")
    options = {key: value for key, value in spec.items() if key != "name"}
    check(options_of(function, *common), options, group)
    return function(**options, **common)
