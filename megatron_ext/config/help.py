"""The text of --help, made from the schema."""

import argparse
import shutil
from copy import copy
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatron_ext.config.messages import shown
from megatron_ext.config.schema import Config
from megatron_ext.config.settings import (
    accepted,
    fields_of,
    map_value,
    member_types,
    section_classes,
    sections,
    settings,
    unit_of,
)

EPILOG = """\
values:
  A flag wins over the file; of a flag given twice, the last wins. --no-NAME is --NAME false. A setting that
  may be null takes "none". Each flag may be spelt with underscores (--seq_length) or with its section
  (--data.seq_length).
  Entries of a map have dotted flags, which add to the map or change it:
    --losses.lm_loss.weight 0.5     --losses.aux '{type: cross_entropy, weight: 0}'
    --valid-data-path heldout.jsonl --data.valid_data_path.hard hard.jsonl
  Relative paths start at the current directory.

examples:
  torchrun --nproc-per-node 2 pretrain_sft.py --config examples/sft_smollm2.yaml
  torchrun --nproc-per-node 2 pretrain_sft.py --config examples/sft_smollm2.yaml --train-iters 50 --lr 1e-5
  torchrun --nproc-per-node 2 pretrain_sft.py --config examples/sft_tiny.yaml --eval-only --load runs/sft_tiny
"""


def help_text() -> str:
    """What --help prints: every setting with its flag, unit and default, by section."""
    width = min(shutil.get_terminal_size().columns, 120)
    parser = argparse.ArgumentParser(
        prog="pretrain_sft.py",
        usage="%(prog)s --config FILE [--SETTING VALUE ...]",
        description="Fine-tunes a language model on Megatron-Core, as a YAML file, flags or both say.",
        epilog=EPILOG,
        add_help=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=44, width=width),
    )
    general = parser.add_argument_group("general")
    general.add_argument("--config", metavar="FILE", help="YAML file of the settings below, by section")
    general.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    general.add_argument("--help", "-h", action="store_true", help="print this and stop")
    for section, info in Config.model_fields.items():
        classes = section_classes(info.annotation)
        if section in sections(Config):
            group = parser.add_argument_group(section, classes[0].__doc__)
            for name in classes[0].model_fields:
                _add_help(group, settings(Config)[name].flag, classes[0].model_fields[name])
            continue
        group = parser.add_argument_group(section, info.description)
        _add_entries(group, section, section_classes(map_value(info.annotation)))
    return parser.format_help().rstrip()


def _add_entries(group: argparse._ArgumentGroup, section: str, classes: list[type[BaseModel]]) -> None:
    """The keys of a map's entries: what all types of entry share, then what only some have."""
    annotations = fields_of(classes)
    owners = {name: [model for model in classes if name in model.model_fields] for name in annotations}
    for name in sorted(annotations, key=lambda name: len(owners[name]) < len(classes)):
        info = copy(owners[name][0].model_fields[name])
        info.annotation = annotations[name]
        if name == "type" and len(classes) > 1:
            info.description = f"{info.description} ({'; '.join(map(_type_and_meaning, classes))})"
        elif len(owners[name]) < len(classes):
            info.description = f"of {' and '.join(map(_type_of, owners[name]))}: {info.description}"
        _add_help(group, f"--{section}.NAME.{name}", info)


def _type_of(model: type[BaseModel]) -> str:
    return accepted(model.model_fields["type"].annotation)


def _type_and_meaning(model: type[BaseModel]) -> str:
    meaning = (model.__doc__ or "").removesuffix(".")
    return f"{_type_of(model)}: {meaning[:1].lower()}{meaning[1:]}"


def _add_help(group: argparse._ArgumentGroup, flag: str, info: FieldInfo) -> None:
    members = member_types(info.annotation)
    notes = [unit_of(info)] if unit_of(info) not in ("", "path") else []
    if info.is_required():
        notes.append("required")
    elif info.default is not None:
        notes.append(f"default {info.default if isinstance(info.default, str) else shown(info.default)}")
    elif "null:" not in str(info.description):
        notes.append("default none")
    text = f"{info.description}{f' [{"; ".join(notes)}]' if notes else ''}".replace("%", "%%")
    if bool in members:
        switch = flag if flag.startswith("--no-") else flag.replace("--", "--[no-]", 1)
        group.add_argument(switch, action="store_true", help=text)
    else:
        group.add_argument(flag, metavar=_metavar(info), help=text)


def _metavar(info: FieldInfo) -> str:
    members = member_types(info.annotation)
    if any(get_origin(member) is list for member in members):
        return "NAME[,NAME...]"
    choices = [choice for member in members if get_origin(member) is Literal for choice in get_args(member)]
    plain = "PATH" if unit_of(info) == "path" else "N" if int in members else "X" if float in members else "TEXT"
    if choices:
        return "{" + ",".join([*choices, *([plain] if plain != "TEXT" else [])]) + "}"
    return plain
