"""What every section of the configuration is made of: the base class, number types, and the makers of settings."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

# The largest number of each unit: what is beyond it is a slip, and would end in an overflow or an endless loop.
LARGEST = {
    "iterations": 10**9,
    "sequences": 10**9,
    "tokens": 10**8,
    "ranks": 10**6,
    "chunks": 10**6,
    "layers": 10**6,
}

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


def _number_from_text(value: Any) -> Any:
    """YAML 1.1 reads 1e-4 (no dot) as text; a number field takes it for the number it is."""
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value.strip()) else value


Real = Annotated[float, BeforeValidator(_number_from_text)]


def _number_or_word(value: Any) -> str:
    return "number" if isinstance(value, int) and not isinstance(value, bool) else "word"


# The bounds stand at the number: at the setting they would be tried on "auto" too. Told apart by a tag, so that a
# wrong value is one mistake and not one for each alternative.
AutoOrTokens = Annotated[
    Annotated[Literal["auto"], Tag("word")] | Annotated[int, Field(ge=1, le=LARGEST["tokens"]), Tag("number")],
    Discriminator(_number_or_word),
]


def setting(default: Any, description: str, *, unit: str = "", **constraints: Any) -> Any:
    """A field with its meaning, unit and bounds; whole numbers of a known unit have an upper bound by themselves
    (le=None: the type has its own)."""
    largest = {"le": LARGEST[unit]} if unit in LARGEST else {}
    return Field(default, description=description, json_schema_extra={"unit": unit}, **(largest | constraints))


def path_setting(default: Any, description: str) -> Any:
    return setting(default, description, unit="path", min_length=1)


def name_setting(default: Any, description: str) -> Any:
    return setting(default, description, min_length=1)


def refusal(reason: str, remedy: str) -> PydanticCustomError:
    """What a validator raises; the user reads '<setting> <reason>; <remedy>'."""
    return PydanticCustomError("refused", "{reason}; {remedy}", {"reason": reason, "remedy": remedy})


class Section(BaseModel):
    """Base of every section: immutable, and strict about names and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
