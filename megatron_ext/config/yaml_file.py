"""Reads one YAML file strictly (one document, one mapping, no key twice) with the line of every key, and
writes a configuration as YAML. It does not know which keys exist."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from megatron_ext.config.messages import ConfigError, dotted

KeyPath = tuple[str | int, ...]

# libyaml's parser where PyYAML was built with it: same results, about ten times as fast.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Dumper(yaml.SafeDumper):
    """Quotes text that holds any kind of line break: PyYAML folds some so that they do not read back."""

    def represent_text(self, text: str) -> yaml.Node:
        broken = text.splitlines() != [text]
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if broken else None)


_Dumper.add_representer(str, _Dumper.represent_text)


@dataclass(frozen=True)
class ConfigFile:
    """What a file says, where it says it, and which keys it repeats."""

    path: str
    values: dict[Any, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)  # counted from 1
    problems: list[str] = field(default_factory=list)

    def place(self, path: KeyPath) -> str | None:
        """'sft.yaml, line 12' for a path the file sets itself, or None."""
        line = self.lines.get(path)
        return None if line is None else f"{self.path}, line {line}"


def read_config_file(path: str) -> ConfigFile:
    """Raises ConfigError when the file cannot be read as one mapping; repeated keys go to `problems`."""
    text = _read_text(path)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise ConfigError([f"{path}: the file is empty; a run needs at least model: {{hf_path: ...}}"])
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                [
                    f"{path}:{node.start_mark.line + 1}: the file is {_kind(node)}, not a map of sections; "
                    "start it with model: {hf_path: ...}"
                ]
            )
        file = ConfigFile(path, {})
        _index(node, (), file)
        file.values.update(loader.construct_document(node))
        return file
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark is not None else path
        context = f" ({error.context})" if error.context else ""
        raise ConfigError(
            [f"{where}: this is not YAML: {error.problem or 'syntax error'}{context}; correct that line"]
        ) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = " ".join(str(error).split()) or "it nests too deeply"
        raise ConfigError([f"{path}: this is not YAML: {reason}; correct the file"]) from None


def config_to_yaml(config: BaseModel) -> str:
    """The whole configuration, defaults included; reading it back gives an equal configuration."""
    return yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        reason = "no such file; check the path (relative paths start at the current directory)"
    except IsADirectoryError:
        reason = "this is a directory; name a YAML file in it"
    except UnicodeDecodeError as error:
        reason = f"not text in UTF-8 (byte {error.start}); save the file as UTF-8"
    except OSError as error:
        reason = f"cannot be read ({error.strerror}); check the file and its permissions"
    except ValueError as error:  # an embedded NUL, half of a surrogate pair
        path, reason = repr(path), f"cannot be the name of a file ({error}); check the path"
    raise ConfigError([f"--config {path}: {reason}"])


def _index(node: yaml.Node, path: KeyPath, file: ConfigFile) -> None:
    """Notes the line of every key below a node, and the keys that are given twice."""
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            file.lines[(*path, number)] = item.start_mark.line + 1
            _index(item, (*path, number), file)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        line = key.start_mark.line + 1
        here = (*path, key.value if isinstance(key, yaml.ScalarNode) else str(key.tag))
        if here in file.lines and key.tag != "tag:yaml.org,2002:merge":
            file.problems.append(
                f"{dotted(here)} is given twice ({file.path}, lines {file.lines[here]} and {line}); keep one"
            )
            for inner in [known for known in file.lines if known[: len(here)] == here]:
                del file.lines[inner]  # the last one counts; what is in both is not given twice once more
        file.lines[here] = line
        _index(value, here, file)


def _kind(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
