"""Options of words: keys of `--kv-policy-config`, one pydantic model per word.

The keys of the server itself are `config_keys.SERVER_OPTIONS`.

A field is one key and the only place that defines its type, range, default and
description. Validation, error messages and docs/support.md come from it. A model holds
plain data: strings are files, choices are `Literal`, None stands for a default that a
file or the model names.
"""

from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
)
from pydantic.fields import FieldInfo

from vllm_kvpolicy.config_keys import shown

# Above any context and any depth of a model, and far from where 64 bits end.
MOST_TOKENS = 2**24
MOST_LAYERS = 4096


class BaseOptions(BaseModel):
    """The options of a word that has none; others add fields.

    Raises:
        ValueError: the first wrong value, as "key: got value, expected range".
    """

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=True,
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ValueError(self._sentence(error)) from None

    @classmethod
    def _sentence(cls, error: ValidationError) -> str:
        first, fields = error.errors()[0], cls.model_fields
        key, is_missing = str(first["loc"][0]), first["type"] == "missing"
        if key not in fields:
            return f"{key}: unknown, expected one of {', '.join(fields) or 'none'}"
        value = None if is_missing else first["input"]
        return f"{key}: got {shown(value)}, expected {valid_range(fields[key])}"


@dataclass(frozen=True)
class AtLeast:
    """A validator: the value reaches that of an earlier field, `key`."""

    key: str

    def __call__(self, value: int, info: ValidationInfo) -> int:
        if value < info.data.get(self.key, value):
            raise ValueError
        return value


def _odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError
    return value


# Kinds of options that several words have.
Queries = Annotated[int, Field(ge=1, le=1024)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Width = Annotated[int, Field(ge=1, le=255), AfterValidator(_odd)]
Share = Annotated[float, Field(ge=0, le=1)]
Layer = Annotated[int, Field(ge=-1, le=MOST_LAYERS)]  # -1 leaves the choice open
IS_PATH = "names a file or a folder"
FilePath = Annotated[str, Field(min_length=1), IS_PATH]


class WindowOptions(BaseOptions):
    """The query window, shared by the words that measure attention over it."""

    window: Queries = Field(
        32, description="number of newest queries whose attention is used"
    )


class PoolOptions(WindowOptions):
    """The query window, with attention smoothed over neighbouring tokens."""

    pool_kernel: Width = Field(
        5, description="width of the average pooling over tokens"
    )


class ExactOptions(BaseOptions):
    """The choice of admissions that can decide while tokens are computed."""

    exact: bool = Field(
        False,
        description="mask a dropped token as soon as it leaves the window instead "
        "of at the next event; uses slower attention kernels",
    )


def names_file(field: FieldInfo) -> bool:
    """Return whether the values of a field name a file or a folder."""
    parts = get_args(field.annotation)  # of `FilePath | None`
    found = [field.metadata, *(getattr(part, "__metadata__", ()) for part in parts)]
    return any(IS_PATH in metadata for metadata in found)


def valid_range(field: FieldInfo) -> str:
    """Describe the valid values of a field, for errors and docs.

    For example "an integer in [1, 1024]", "a number in [0, 1)", "one of max, mean".
    """
    kind = kind_of(field)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    if kind is bool:
        return "true or false"
    if kind is str:
        return f"a file: {field.description}" if names_file(field) else "a text"
    rules = field.metadata
    checks = [rule.func for rule in rules if isinstance(rule, AfterValidator)]
    noun = "an integer" if kind is int else "a number"
    noun = "an odd integer" if _odd in checks else noun
    low, high, end = (bound_of(rules, name) for name in ("ge", "le", "lt"))
    if high is None and end is None:
        words = noun if low is None else f"{noun} >= {low}"
    else:
        words = f"{noun} in [{low}, " + (f"{high}]" if end is None else f"{end})")
    keys = [check.key for check in checks if isinstance(check, AtLeast)]
    return words + "".join(f", at least {key}" for key in keys)


def kind_of(field: FieldInfo) -> Any:
    """Return a field's type, without None and what `Annotated` adds."""
    kind, members = field.annotation, get_args(field.annotation)
    if NoneType in members:
        kind = next(member for member in members if member is not NoneType)
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def bound_of(rules: list[Any], name: str) -> float | None:
    """Return a limit among a field's rules: "ge", "le" or "lt"."""
    found = (getattr(rule, name, None) for rule in rules)
    return next((limit for limit in found if limit is not None), None)
