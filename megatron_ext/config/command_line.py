"""The command line: --config FILE plus one flag per setting, made from the schema. It parses and merges; what
is valid is the schema's business, and what goes together is checks.py's."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from megatron_ext.config.checks import combination_problems, purpose_problems
from megatron_ext.config.help import help_text
from megatron_ext.config.messages import ConfigError, Problem, explain, suggest
from megatron_ext.config.schema import DEFAULT_EVALUATION_SET, DEFAULT_RUN_NAME, EVALUATION_SUFFIX, Config
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
    value_of_text,
)
from megatron_ext.config.yaml_file import ConfigFile, read_config_file


@dataclass(frozen=True)
class Command:
    """What the command line asks for: to run a configuration, or only to print it."""

    config: Config
    print_config: bool


@dataclass(frozen=True)
class _Flag:
    """One flag as given: the words after it, and the place in the configuration it sets."""

    spelling: str
    path: tuple[str, ...]
    annotation: Any
    words: tuple[str, ...]


def load_config(argv: Sequence[str]) -> Config:
    """The configuration of a command line (without the program's name).

    Raises ConfigError naming every problem. Exits after --help; a caller that offers --print-config uses
    parse_command_line."""
    return parse_command_line(argv).config


def parse_command_line(argv: Sequence[str]) -> Command:
    """As load_config, and tells whether --print-config was given."""
    if not argv:
        raise ConfigError(["no settings were given; start with --config FILE (--help lists every setting)"])
    flags, options, problems = _read_flags(argv)
    file = None
    if options.config is not None:
        try:
            file = read_config_file(options.config)
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from None
        problems += file.problems
    values = _merged(file.values if file is not None else {}, flags)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems += [_with_source(problem, file, flags) for problem in explain(error, Config)]
        raise ConfigError(problems) from None
    problems += purpose_problems(config) + combination_problems(config)
    if problems:
        raise ConfigError(problems)
    return Command(_with_log_dir(config, options.config), options.print_config)


def _with_log_dir(config: Config, config_path: str | None) -> Config:
    """Settles the log folder, so that the written config.yaml says by itself where its run logs."""
    evaluates = config.evaluation.eval_only
    if config.logging.log_dir is not None or (config.checkpoint.save is not None and not evaluates):
        return config
    file = Path(config_path or f"{DEFAULT_RUN_NAME}.yaml")
    # the config.yaml of a run says nothing about the run, its folder does
    name = file.absolute().parent.name if evaluates and file.name == "config.yaml" else file.stem
    logging = config.logging.model_copy(update={"log_dir": f"runs/{name}{EVALUATION_SUFFIX if evaluates else ''}"})
    return config.model_copy(update={"logging": logging})


def _read_flags(argv: Sequence[str]) -> tuple[list[_Flag], "_Options", list[str]]:
    """All flags with all mistakes. (argparse stops at the first mistake, and cannot know the flags of map
    entries, whose names users choose; here it only lays out the help.)"""
    options, flags, problems = _Options(), [], []
    for spelling, words in _groups(argv):
        name = spelling.removeprefix("--")
        if spelling in ("-h", "--help"):
            print(help_text())
            raise SystemExit(0)
        if spelling == "":
            problems += [f"{word!r} does not follow a flag; write --NAME VALUE, as in --lr 1e-5" for word in words]
        elif name.replace("_", "-") == "print-config":
            options.print_config = True
            problems += _stray(spelling, words)
        elif name == "config":
            options.config = words[0] if words else None
            problems += _stray(spelling, words[1:]) if words else [f"{spelling} needs a value; name a YAML file"]
        else:
            flag = _flag(spelling, words)
            if isinstance(flag, _Flag):
                flags.append(flag)
            else:
                problems += flag
    return flags, options, problems


@dataclass
class _Options:
    config: str | None = None
    print_config: bool = False


def _groups(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each flag with the words after it; words before the first flag come under ''."""
    groups: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--") or word == "-h":
            spelling, equals, value = word.partition("=")
            groups.append((spelling, [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            groups.append(("", [word]))
    return groups


def _stray(spelling: str, words: Sequence[str]) -> list[str]:
    if not words:
        return []
    return [f"{spelling}: {' '.join(words)!r} is one value too many; quote a value that has spaces in it"]


def _flag(spelling: str, words: list[str]) -> _Flag | list[str]:
    """The flag, or why there is no such flag or it has the wrong number of values."""
    place = _resolve(spelling.removeprefix("--"))
    if place is None and re.match(r"--no[-_]", spelling):
        positive = _resolve(spelling[len("--no-") :])
        if positive is not None and bool in member_types(positive[1]):
            return _stray(spelling, words) or _Flag(spelling, *positive, ("false",))
    if place is None:
        return [_unknown_flag(spelling)]
    members = member_types(place[1])
    if not words and bool in members:
        words = ["true"]
    if not words:
        return [f"{spelling} needs a value; use {accepted(place[1])}"]
    several = any(get_origin(member) is list for member in members)
    stray = [] if several else _stray(spelling, words[1:])
    return stray or _Flag(spelling, *place, tuple(words))


def _resolve(name: str) -> tuple[tuple[str, ...], Any] | None:
    """The path and annotation a flag's name stands for: a setting (lr), a full path (optimizer.lr), an entry
    of a map (losses.lm_loss.weight, valid_data_path.hard)."""
    head, *rest = name.split(".")
    table, head = settings(Config), head.replace("-", "_")
    if head in table and (head not in sections(Config) or not rest):
        rest = [table[head].section, head, *rest]
    else:
        rest = [head, *rest]
    path, annotation = (), Config
    while rest:
        classes = section_classes(annotation)
        if classes:
            key = rest.pop(0).replace("-", "_")
            fields = fields_of(classes)
            if key not in fields:
                return None
            annotation = fields[key]
        else:
            annotation = map_value(annotation)
            if annotation is None:
                return None
            # The file of an evaluation set: all that is left is its name, dots included.
            key = rest.pop(0) if section_classes(annotation) else ".".join(rest)
            rest = rest if section_classes(annotation) else []
        path = (*path, key)
    if len(path) == 1 and path[0] in sections(Config):
        return None
    return path, annotation


def _unknown_flag(spelling: str) -> str:
    name = spelling.removeprefix("--").removeprefix("no-").replace("-", "_")
    prefix, _, leaf = name.rpartition(".")
    table = settings(Config)
    if name in sections(Config):
        keys = list(sections(Config)[name].model_fields)
        return f"{spelling} is a section; set its settings one by one, as in {table[keys[0]].flag}"
    if leaf in table:
        home = table[leaf]
        return f"{spelling} is not a flag; {leaf} belongs to the section {home.section}: use {home.flag}"
    if leaf in map_keys(Config):
        home = map_keys(Config)[leaf]
        return f"{spelling} is not a flag; {leaf} belongs to an entry of {home}: use --{home}.NAME.{leaf}"
    within = _resolve(prefix) if prefix else None
    siblings = [n for model in section_classes(within[1]) for n in model.model_fields] if within else []
    found = suggest(leaf, siblings, prefix, Config) or nearest(leaf, ["config", "print_config", "help"])
    if found is None or found in sections(Config):
        return f"{spelling} is not a flag; --help lists all of them"
    flag = table[found.partition(".")[2]].flag if found.partition(".")[2] in table else f"--{found}"
    return f"{spelling} is not a flag; did you mean {flag.replace('_', '-') if '.' not in flag else flag}?"


def _merged(values: dict[Any, Any], flags: list[_Flag]) -> dict[Any, Any]:
    """The file's values with the flags' in their places; those for a whole map come before its entries'."""
    merged = _copied(values)
    for flag in sorted(flags, key=lambda flag: len(flag.path)):
        inner = merged
        for depth, key in enumerate(flag.path[:-1]):
            here = flag.path[: depth + 1]
            if key not in inner or (inner[key] is None and depth > 0):
                inner[key] = _default_map(here)
            elif isinstance(inner[key], str) and here == ("data", "valid_data_path"):
                inner[key] = {DEFAULT_EVALUATION_SET: inner[key]}
            inner = inner[key]
            if not isinstance(inner, dict):
                break  # the file has something else here, which validation refuses
        else:
            inner[flag.path[-1]] = value_of_text(flag.annotation, list(flag.words))
    return merged


def _copied(value: Any) -> Any:
    """A copy that shares nothing: a flag for one entry leaves alone what shares its YAML anchor."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _default_map(path: tuple[str, ...]) -> dict[str, Any]:
    """What a map holds before a flag adds to it: the default losses, and otherwise nothing."""
    info = Config.model_fields[path[0]]
    if len(path) > 1 or path[0] in sections(Config):
        return {}
    # Without their defaults: a flag that gives an entry another type gives it that type's defaults.
    return {name: entry.model_dump(exclude_defaults=True) for name, entry in info.default.items()}


def _with_source(problem: Problem, file: ConfigFile | None, flags: list[_Flag]) -> str:
    """The problem's sentence, and the flag or the line of the file that it comes from."""
    given = [flag.spelling for flag in flags if problem.path[: len(flag.path)] == flag.path]
    source = given[-1] if given else file.place(problem.path) if file is not None else None
    return problem.text if source is None else f"{problem.text} ({source})"
