"""Whether the files and directories a configuration names are there, of the right kind, readable or writable.
It only looks: nothing is opened, made or changed."""

import os
from pathlib import Path

from megatron_ext.config.schema import Config

_LONGEST_NAME = 255  # bytes, on the file systems of Linux
_LONGEST_PATH = 3840  # bytes; the system takes 4095, and files are named below the directories given here
_SPECIAL = "a device, pipe or socket"


def file_problems(config: Config) -> list[str]:
    """Paths that are missing, of the wrong kind, or not readable or writable."""
    data, checkpoint = config.data, config.checkpoint
    model = config.model
    problems = _model_problems("model.hf_path", model.hf_path, needs_weights=not model.random_init)
    problems += _tokenizer_problems("model.tokenizer_path", model.tokenizer_path, config.tokenizer_path, "hf_path")
    problems += _teacher_problems(config)
    if config.model.chat_template is not None:
        problems += _file_problem("model.chat_template", config.model.chat_template, "a jinja file")
    evaluates = config.evaluation.eval_only
    if data.train_data_path is not None and not evaluates:
        problems += _file_problem("data.train_data_path", data.train_data_path, "a JSONL file")
    for name, path in config.evaluation_sets.items():
        field = "data.valid_data_path" if isinstance(data.valid_data_path, str) else f"data.valid_data_path.{name}"
        problems += _file_problem(field, path, "a JSONL file")
    if checkpoint.load is not None:
        problems += _directory_problem("checkpoint.load", checkpoint.load, "a directory of checkpoints")
    if evaluates:
        problems += _output_problem("logging.log_dir", str(config.log_directory))
        return problems + _token_file_problems(config)
    if checkpoint.save is not None:
        problems += _output_problem("checkpoint.save", checkpoint.save)
    if checkpoint.save_hf is not None:
        problems += _output_problem("checkpoint.save_hf", checkpoint.save_hf, must_be_new=True)
    if checkpoint.save is None or config.log_directory != Path(checkpoint.save):
        problems += _output_problem("logging.log_dir", str(config.log_directory))
    return problems


def why_no_path(path: str | Path) -> str | None:
    """Why the system can have nothing under this name, in words that follow it; None when it can."""
    try:
        encoded = os.fsencode(path)
        if b"\0" in encoded:
            return "holds a NUL character, which no path can"
        if max(map(len, encoded.split(b"/"))) > _LONGEST_NAME:
            return f"has a name of more than {_LONGEST_NAME} bytes, which is too long"
        if len(os.path.abspath(encoded)) > _LONGEST_PATH:
            return f"is longer than {_LONGEST_PATH} bytes, which is too long"
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"cannot be reached ({error.strerror})"
    except ValueError:
        return "holds half of a surrogate pair, which is not text"
    return None


def path_in_words(path: str | Path) -> str:
    """A path as the user wrote it, unless that cannot be printed on a line."""
    text = str(path) if str(path).isprintable() else repr(str(path))
    return text if len(text) <= 300 else text[:297] + "..."


def why_no_file(path: str | Path) -> str | None:
    """Why there is no regular file at this path, in words that follow it; None when there is one."""
    unusable, path = why_no_path(path), Path(path)
    if unusable is not None:
        return unusable
    if path.is_file():
        return None
    if path.is_dir():
        return "is a directory"
    return f"is {_SPECIAL}, not a regular file" if path.exists() else "does not exist"


def _teacher_problems(config: Config) -> list[str]:
    teacher, problems = config.teacher, []
    if teacher.teacher_path is not None:
        tokenizer = config.teacher_tokenizer_path
        assert tokenizer is not None
        problems += _model_problems(
            "teacher.teacher_path",
            teacher.teacher_path,
            needs_weights=teacher.teacher_load is None,
            otherwise="set teacher_load to a checkpoint with its weights",
        )
        problems += _tokenizer_problems(
            "teacher.teacher_tokenizer_path", teacher.teacher_tokenizer_path, tokenizer, "teacher_path"
        )
    if teacher.teacher_load is not None:
        problems += _directory_problem("teacher.teacher_load", teacher.teacher_load, "a directory of checkpoints")
    if teacher.teacher_cache is not None:
        problems += _directory_problem(
            "teacher.teacher_cache", teacher.teacher_cache, "a directory written by scripts/cache_teacher.py"
        )
    return problems


def _model_problems(
    name: str, value: str, *, needs_weights: bool, otherwise: str = "set random_init true for random weights"
) -> list[str]:
    """`otherwise`: what else can be done where there are no weights."""
    path = Path(value)
    wanted = "a Hugging Face directory or a .gguf file" if needs_weights else "a directory with config.json"
    if why_no_path(value):
        return _unusable(name, value)
    if not path.exists():
        hint = ""
        if not path.is_absolute() and value.count("/") == 1 and not path.parent.exists():
            hint = f" (`hf download {value} --local-dir DIRECTORY` fetches a model of the hub)"
        return [_missing(name, value, wanted) + hint]
    if path.is_file():
        if path.suffix == ".gguf" or (not needs_weights and path.suffix == ".json"):
            return _readable(name, path)
        remedy = "a .gguf file or a directory" if needs_weights else "config.json, a .gguf file or a directory"
        also = f", or {otherwise}" if path.suffix == ".json" else ""
        return [f"{name}: {value} is not a model file that can be read; give {remedy}{also}"]
    if not path.is_dir():
        return [f"{name}: {value} is {_SPECIAL}, not a regular file; give {wanted}"]
    if unreadable := _readable(name, path):
        return unreadable
    if not (path / "config.json").is_file():
        return [f"{name}: {value} has no config.json; give {wanted}"]
    if needs_weights and not any(path.glob("*.safetensors")):
        return [f"{name}: {value} has no *.safetensors file; give a directory that has some, or {otherwise}"]
    return []


def _tokenizer_problems(name: str, given: str | None, resolved: str, model_name: str) -> list[str]:
    """`given` is the setting, `resolved` where the tokenizer is looked for, by default where the model is."""
    path = Path(resolved)
    unusable = _unusable(name, str(path))
    if given is None and (unusable or not (path.is_dir() or path.is_file())):
        return []  # nothing of use is where the model is, which is reported
    if unusable:
        return unusable
    if not path.exists():
        return [_missing(name, str(path), "a Hugging Face directory or a .gguf file")]
    if path.is_file():
        if path.suffix == ".gguf":
            return _readable(name, path)
        return [f"{name}: {path} is a file; give the directory that holds tokenizer.json, or a .gguf file"]
    if not path.is_dir():
        return [
            f"{name}: {path} is {_SPECIAL}, not a regular file; give the directory that holds tokenizer.json, "
            "or a .gguf file"
        ]
    if unreadable := _readable(name, path):
        return unreadable if given is not None else []
    if not any((path / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        what = f" is not set, and {model_name}" if given is None else ""
        return [f"{name}{what}: {path} has no tokenizer.json; give a directory with one, or a .gguf file"]
    return []


def _file_problem(name: str, value: str, wanted: str) -> list[str]:
    if unusable := _unusable(name, value):
        return unusable
    if not Path(value).exists():
        return [_missing(name, value, wanted)]
    reason = why_no_file(value)
    return _readable(name, Path(value)) if reason is None else [f"{name}: {value} {reason}; give {wanted}"]


def _directory_problem(name: str, value: str, wanted: str) -> list[str]:
    if unusable := _unusable(name, value):
        return unusable
    path = Path(value)
    if not path.exists():
        return [_missing(name, value, wanted)]
    if not path.is_dir():
        return [f"{name}: {value} is {_kind(path)}; give {wanted}"]
    return _readable(name, path)


def _output_problem(name: str, value: str, must_be_new: bool = False) -> list[str]:
    """Whether a directory can be made (or written to) at `value`, without making it."""
    if unusable := _unusable(name, value):
        return unusable
    path = Path(value)
    if must_be_new and path.is_dir() and (unreadable := _readable(name, path)):
        return unreadable
    if must_be_new and path.is_dir() and any(path.iterdir()):
        return [f"{name}: {value} already holds files, which are never overwritten; give a new directory"]
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not existing.is_dir():
        return [f"{name}: {value} cannot be a directory, because {existing} is {_kind(existing)}; give another path"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"{name}: {value} cannot be written ({existing} is not writable); give another path"]
    return []


def _token_file_problems(config: Config) -> list[str]:
    """Whether the file of per-token outputs can be made, and nothing is lost by it."""
    name, value = "evaluation.per_token_outputs", config.evaluation.per_token_outputs
    if value is None:
        return []
    if unusable := _unusable(name, value):
        return unusable
    path = Path(value)
    if path.exists():
        if not path.is_file():
            return [f"{name}: {value} is {'a directory' if path.is_dir() else _SPECIAL}; give the path of a new file"]
        for set_name, rows in config.evaluation_sets.items():
            if Path(rows).exists() and path.samefile(rows):
                return [f"{name}: {value} is the evaluation set {set_name} itself; give the path of a new file"]
        if not config.evaluation.overwrite:
            return [f"{name}: {value} exists already; give another path, or replace it with --overwrite"]
    return _output_problem(name, str(path.parent))


def _unusable(name: str, value: str) -> list[str]:
    reason = why_no_path(value)
    return [] if reason is None else [f"{name}: {path_in_words(value)} {reason}; give another path"]


def _kind(path: Path) -> str:
    """What is at a path that is no directory."""
    return "a file" if path.is_file() else _SPECIAL


def _missing(name: str, value: str, wanted: str) -> str:
    if value.startswith("~") or "$" in value:
        return f"{name}: {value} does not exist (~ and $NAME are not expanded); write the path in full"
    where = "" if Path(value).is_absolute() else f" in {Path.cwd()}"
    return f"{name}: {value} does not exist{where}; give {wanted}"


def _readable(name: str, path: Path) -> list[str]:
    if os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        return []
    return [f"{name}: {path} cannot be read; change its permissions, or give another path"]
