"""Reads the schema back: the table of all settings, what each accepts in words, how a flag's text becomes a
value, and the nearest known name to a misspelt one. It checks nothing."""

import difflib
import functools
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

# What other tools call a setting of ours, so that a habit is answered with our name for it.
NAMES_ELSEWHERE = {
    "learning_rate": "lr",
    "min_learning_rate": "min_lr",
    "lr_scheduler_type": "lr_decay_style",
    "warmup_steps": "lr_warmup_iters",
    "max_grad_norm": "clip_grad",
    "adam_epsilon": "adam_eps",
    "max_steps": "train_iters",
    "num_train_steps": "train_iters",
    "num_train_epochs": "train_iters",
    "per_device_train_batch_size": "micro_batch_size",
    "train_batch_size": "global_batch_size",
    "gradient_accumulation_steps": "global_batch_size",
    "max_length": "seq_length",
    "max_seq_length": "seq_length",
    "sequence_length": "seq_length",
    "model_name_or_path": "hf_path",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "virtual_pipeline_parallel_size": "virtual_pipeline_model_parallel_size",
    "expert_parallel_size": "expert_model_parallel_size",
    "distributed_optimizer": "use_distributed_optimizer",
    "softcap": "logit_softcap",
    "final_logit_softcapping": "logit_softcap",
    "label_smoothing_factor": "label_smoothing",
    "train_file": "train_data_path",
    "validation_file": "valid_data_path",
    "output_dir": "save",
    "save_steps": "save_interval",
    "eval_steps": "eval_interval",
    "logging_steps": "log_interval",
}

_KINDS_IN_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_BOUNDS = {"ge": "of at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True)
class Setting:
    """One leaf of the configuration."""

    section: str
    name: str
    info: FieldInfo

    @property
    def path(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def types(self) -> tuple[Any, ...]:
        return member_types(self.info.annotation)


def member_types(annotation: Any) -> tuple[Any, ...]:
    """The plain types an annotation admits: Annotated is peeled off, unions are spread out."""
    if get_origin(annotation) is Annotated:
        return member_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(member for part in get_args(annotation) for member in member_types(part))
    return (annotation,)


def section_classes(annotation: Any) -> list[type[BaseModel]]:
    """The section classes an annotation admits: none for a value, several for a union told apart by a tag."""
    members = member_types(annotation)
    return [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]


def map_value(annotation: Any) -> Any:
    """What the values of a map annotation (dict[str, X]) are, or None when it is not a map."""
    for member in member_types(annotation):
        if get_origin(member) is dict:
            return get_args(member)[1]
    return None


def fields_of(classes: Iterable[type[BaseModel]]) -> dict[str, Any]:
    """Annotation of each key that one of the classes has; of one they share, all that any of them accepts."""
    found: dict[str, Any] = {}
    for model in classes:
        for name, info in model.model_fields.items():
            found[name] = found[name] | info.annotation if name in found else info.annotation
    return found


@functools.cache
def sections(root: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The sections with fixed keys, by name. The others (losses) are maps whose keys users choose."""
    found = {name: section_classes(info.annotation) for name, info in root.model_fields.items()}
    return {name: classes[0] for name, classes in found.items() if len(classes) == 1}


@functools.cache
def map_keys(root: type[BaseModel]) -> dict[str, str]:
    """The keys that only some kinds of entries of those maps have (label_smoothing), and the map each belongs to."""
    found: dict[str, str] = {}
    for name, info in root.model_fields.items():
        classes = section_classes(map_value(info.annotation)) if name not in sections(root) else []
        found |= {key: name for key in fields_of(classes) if not all(key in model.model_fields for model in classes)}
    return found


@functools.cache
def settings(root: type[BaseModel]) -> dict[str, Setting]:
    """Every setting by its name, which is unique over all sections."""
    table: dict[str, Setting] = {}
    for section, model in sections(root).items():
        for name, info in model.model_fields.items():
            assert name not in table, f"{name} is a setting of both {section} and {table[name].section}"
            table[name] = Setting(section, name, info)
    return table


def bounds_of(annotation: Any, info: FieldInfo) -> dict[str, Any]:
    """The bounds of a setting by pydantic's names (ge, gt, le, lt), wherever in its type they stand."""
    marks = [*info.metadata, *_marks_inside(annotation)]
    return {
        bound: getattr(mark, bound) for mark in marks for bound in _BOUNDS if getattr(mark, bound, None) is not None
    }


def _marks_inside(annotation: Any) -> list[Any]:
    """The constraints that are part of a type: those of the int in Literal["auto"] | Annotated[int, Field(ge=1)]."""
    if get_origin(annotation) in (Union, UnionType):
        return [mark for part in get_args(annotation) for mark in _marks_inside(part)]
    if get_origin(annotation) is not Annotated:
        return []
    inner, *marks = get_args(annotation)
    spread = [mark.metadata if isinstance(mark, FieldInfo) else [mark] for mark in marks]
    return [*_marks_inside(inner), *(mark for group in spread for mark in group)]


def accepted(annotation: Any, info: FieldInfo | None = None) -> str:
    """What a place in the schema accepts, in words: 'a whole number of at least 1, or null'."""
    members = member_types(annotation)
    words = [word for member in members if member is not NoneType for word in _accepted_type(member)]
    if info is not None and str in members and unit_of(info) == "path":
        words = ["a path", *(word for word in words if word != "text")]
    text = alternatives(words)
    bounds = bounds_of(annotation, info) if info is not None else {}
    if bounds:
        text += " " + " and ".join(f"{_BOUNDS[bound]} {limit}" for bound, limit in bounds.items())
    return f"{text}, or null" if NoneType in members else text


def alternatives(words: list[str]) -> str:
    """'a', 'a or b', 'a, b or c'"""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _accepted_type(member: Any) -> list[str]:
    """The alternatives of one plain type: the choices of a Literal, else one."""
    if get_origin(member) is Literal:
        return [str(choice) for choice in get_args(member)]
    if get_origin(member) is list:
        return [f"a list of {alternatives(_accepted_type(get_args(member)[0]))}"]
    if get_origin(member) is dict:
        return ["a map from name to value"]
    return [_KINDS_IN_WORDS.get(member, "a section of keys and values")]


def unit_of(info: FieldInfo) -> str:
    extra = info.json_schema_extra
    return str(extra["unit"]) if isinstance(extra, dict) else ""


def value_of_text(annotation: Any, words: list[str]) -> Any:
    """The value a flag's words stand for. Words that do not fit stay text, for validation to refuse."""
    members = member_types(annotation)
    text = " ".join(words)
    if NoneType in members and text.lower() in ("none", "null"):
        return None
    if any(get_origin(member) is list for member in members):
        return [part for word in words for part in re.split(r"[\s,\[\]]+", word) if part]
    if bool in members:
        return {"true": True, "false": False}.get(text.lower(), text)
    for number in (int, float):
        if number in members:
            try:
                return number(text)
            except ValueError:
                return text
    if map_value(annotation) is not None or section_classes(annotation):
        return _yaml_or_text(text) if text.lstrip().startswith("{") or str not in members else text
    return text


def _yaml_or_text(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def nearest(name: str, known: Iterable[str], preferred: Collection[str] = ()) -> str | None:
    """The known name that `name` most likely stands for, or None; other tools' names stand for ours, and a
    preferred name wins over one that is a little closer."""
    spelling = name.lower().replace("-", "_")
    candidates = {ours: ours for ours in known}
    candidates |= {alias: ours for alias, ours in NAMES_ELSEWHERE.items() if ours in candidates}
    likeness = {
        spelt: difflib.SequenceMatcher(None, spelling, spelt).ratio() + 0.1 * (ours in preferred)
        for spelt, ours in candidates.items()
    }
    best = max(likeness, key=likeness.__getitem__, default="")
    return candidates[best] if best and likeness[best] >= 0.75 else None
