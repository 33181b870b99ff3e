"""Turns what the validator refuses into sentences for users: one a problem, naming the setting, its value,
the reason and the remedy. It decides nothing about what is valid."""

import datetime
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from megatron_ext.config.settings import (
    accepted,
    fields_of,
    map_keys,
    map_value,
    member_types,
    nearest,
    section_classes,
    sections,
    settings,
)

Path = tuple[str | int, ...]


class ConfigError(ValueError):
    """The user's mistakes, all of them; str() is one line for each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[str]]]:
        return (ConfigError, (self.problems,))  # a failed rank may send it to its parent process


@dataclass(frozen=True)
class Problem:
    """One mistake: where it is, and the sentence about it, which starts with that place."""

    path: Path
    text: str


@dataclass(frozen=True)
class _Place:
    """A place in the schema: the user's path to it, its section, what it accepts, its field if it is one."""

    path: Path
    parent: type[BaseModel]
    annotation: Any  # None: the schema has no such place
    info: FieldInfo | None


def explain(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    """Every problem of a failed validation against `root`, in the order of the schema."""
    problems = [_explain_one(details, root) for details in error.errors(include_url=False)]
    return list({(problem.path, problem.text): problem for problem in problems}.values())


def dotted(path: Path) -> str:
    """data.valid_data_path, model.recompute_modules[1]"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) and text else f".{part}" if text else str(part)
    return text


def shown(value: Any) -> str:
    """A value as a user would write it, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    try:
        text = str(value) if isinstance(value, datetime.date) else repr(value)
    except (ValueError, RecursionError):  # Python writes no whole number of thousands of digits
        return "a number of very many digits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def suggest(key: str, siblings: Collection[str], prefix: str, root: type[BaseModel]) -> str | None:
    """The dotted path of what a misspelt key most likely means: one of its siblings, or what is elsewhere."""
    table = settings(root)
    found = nearest(key, [*siblings, *table, *sections(root)], preferred=siblings)
    if found in siblings:
        return f"{prefix}.{found}" if prefix else found
    return table[found].path if found in table else found


def _place(location: Path, root: type[BaseModel]) -> _Place:
    """Walks the schema along an error's location, leaving out the tags that the validator adds to it."""
    place = _Place((), root, root, None)
    for part in location:
        classes = section_classes(place.annotation)
        if _is_choice_of_values(place.annotation):  # the part is the tag that chose one of the types
            continue
        if len(classes) > 1:  # the part is the tag that chose one of the classes
            place = _Place(place.path, place.parent, next(c for c in classes if _has_tag(c, part)), place.info)
            continue
        path = (*place.path, part)
        if classes:
            info = classes[0].model_fields.get(str(part))
            place = _Place(path, classes[0], info.annotation if info is not None else None, info)
        else:
            place = _Place(path, place.parent, _item(place.annotation), None)
    return place


def _has_tag(model: type[BaseModel], tag: Any) -> bool:
    annotations = [info.annotation for info in model.model_fields.values()]
    return any(get_origin(a) is Literal and tag in get_args(a) for a in annotations)


def _is_choice_of_values(annotation: Any) -> bool:
    """Whether several types of plain values are admitted (null apart), as in "auto" or a number."""
    members = [member for member in member_types(annotation) if member is not NoneType]
    return len(members) > 1 and all(get_origin(member) is Literal or member in (int, float, str) for member in members)


def _item(annotation: Any) -> Any:
    """What the entries of a list or map annotation are."""
    lists = [member for member in member_types(annotation) if get_origin(member) is list]
    return get_args(lists[0])[0] if lists else map_value(annotation)


def _explain_one(details: ErrorDetails, root: type[BaseModel]) -> Problem:
    location, kind, value = details["loc"], details["type"], details["input"]
    if location[-1] == "[key]" or kind == "invalid_key":
        path = location[:-1] if location[-1] == "[key]" else location
        name = dotted(tuple(str(part) for part in path))
        return Problem(path, f"{name}: the key {shown(value)} is not text; put it in quotes or use another name")
    place = _place(location, root)
    name = dotted(place.path)
    if kind == "extra_forbidden":
        return Problem(place.path, f"{name} {_unknown(place, root)}")
    if kind == "missing":
        purpose = f": {place.info.description}" if place.info is not None and place.info.description else ""
        wanted = accepted(place.annotation, place.info)
        return Problem(place.path, f"{name} is not set; use {wanted}{purpose}")
    if kind == "refused":
        return Problem(place.path, f"{name} {details['ctx']['reason']}; {details['ctx']['remedy']}")
    if kind.startswith("union_tag"):
        tag = str(details["ctx"]["discriminator"]).strip("'")
        given = f": {shown(value[tag])} is not a known choice" if tag in value else " is not set"
        wanted = accepted(fields_of(section_classes(place.annotation))[tag])
        return Problem((*place.path, tag), f"{name}.{tag}{given}; use {wanted}")
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return Problem(place.path, f"{name} {_not_a_section(value, place)}")
    return Problem(place.path, f"{name}: {_refusal(value, kind, place)}; {_remedy(value, place)}")


def _not_a_section(value: Any, place: _Place) -> str:
    got = "is empty (null)" if value is None else f"is {shown(value)}, which is not a map of keys and values"
    classes = section_classes(place.annotation)
    shared = [key for key in fields_of(classes) if all(key in model.model_fields for model in classes)]
    keys = shared[:3]
    remedy = f"give it keys such as {', '.join(keys)}" if keys else "give it entries"
    return f"{got}; {remedy}, or delete it"


def _refusal(value: Any, kind: str, place: _Place) -> str:
    if kind == "finite_number":
        return f"{shown(value)} is not finite"
    if kind == "string_too_short":
        return "the text is empty"
    if value is None:
        return "null is not a value of this setting"
    if kind.startswith("greater_than"):
        return f"{shown(value)} is too small"
    if kind.startswith("less_than"):
        return f"{shown(value)} is too large"
    if kind == "literal_error" and not _is_choice_of_values(place.annotation):
        return f"{shown(value)} is not a known choice"
    return f"{shown(value)} is not {accepted(place.annotation).removesuffix(', or null')}"


def _remedy(value: Any, place: _Place) -> str:
    if str in member_types(place.annotation) and not isinstance(value, str | None):
        return "put it in quotes if it is meant as text"
    remedy = f"use {accepted(place.annotation, place.info)}"
    default = place.info.default if place.info is not None else PydanticUndefined
    return remedy if default is PydanticUndefined or default is None else f"{remedy} (default {shown(default)})"


def _unknown(place: _Place, root: type[BaseModel]) -> str:
    key, prefix = str(place.path[-1]), dotted(place.path[:-1])
    table = settings(root)
    leaf = key.rpartition(".")[2].replace("-", "_")
    if leaf in table and leaf not in place.parent.model_fields:
        home = table[leaf].section
        return f"is not known; {leaf} belongs to the section {home} (write {home}: {{{leaf}: ...}})"
    home = map_keys(root).get(leaf)
    if home is not None and home != place.path[0] and leaf not in place.parent.model_fields:
        return f"is not known; {leaf} belongs to an entry of {home} (write {home}: {{NAME: {{{leaf}: ...}}}})"
    suggestion = suggest(leaf, place.parent.model_fields, prefix, root)
    if suggestion is not None:
        return f"is not a known key; did you mean {suggestion}?"
    what = f"the keys of {prefix}" if prefix else "the sections"
    if "type" in place.parent.model_fields:
        what += f" (a {accepted(place.parent.model_fields['type'].annotation)})"
    return f"is not a known key; {what} are {', '.join(place.parent.model_fields)}"
