"""Files and directories a configuration names: each wrong one is refused in given words, nothing is touched."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config import Config, ConfigError, check_files
from megatron_ext.config.paths import file_problems
from megatron_ext.config.settings import settings


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with one of each thing a configuration may name."""
    monkeypatch.chdir(tmp_path)
    for directory in ("hf", "only_config", "bare", "checkpoints", "exported", "dir"):
        Path(directory).mkdir()
    for file in (
        "hf/config.json",
        "hf/tokenizer.json",
        "hf/model.safetensors",
        "only_config/config.json",
        "exported/config.json",
        "model.gguf",
        "weights.bin",
        "rows.jsonl",
        "chat.jinja",
    ):
        Path(file).write_text("x")
    return tmp_path


def problems_of(**leaves: Any) -> list[str]:
    values: dict[str, dict[str, Any]] = {"model": {"hf_path": "hf"}}
    for name, value in leaves.items():
        values.setdefault(settings(Config)[name].section, {})[name] = value
    config = Config.from_dict(values)
    before = sorted(Path().rglob("*"))
    problems = file_problems(config)
    assert sorted(Path().rglob("*")) == before
    return problems


GOOD = [
    {},
    {"hf_path": "model.gguf"},
    {"hf_path": "only_config", "random_init": True, "tokenizer_path": "hf"},
    {"hf_path": "hf/config.json", "random_init": True},
    {"tokenizer_path": "model.gguf", "chat_template": "chat.jinja"},
    {"train_data_path": "rows.jsonl", "valid_data_path": "rows.jsonl"},
    {"valid_data_path": {"a": "rows.jsonl", "b": "rows.jsonl"}},
    {"load": "checkpoints", "save": "checkpoints"},
    {"save": "new/nested", "save_hf": "dir", "log_dir": "dir"},
    {"eval_only": True, "train_data_path": "gone", "save": "rows.jsonl", "save_hf": "exported"},  # not of its concern
    {"eval_only": True, "per_token_outputs": "new/out.parquet", "log_dir": "dir"},
    {"eval_only": True, "per_token_outputs": "weights.bin", "overwrite": True},
    {"teacher_path": "hf"},
    {"teacher_path": "model.gguf", "teacher_tokenizer_path": "hf"},
    {"teacher_path": "only_config", "teacher_load": "checkpoints", "teacher_tokenizer_path": "hf"},
    {"teacher_path": "hf/config.json", "teacher_load": "checkpoints"},
    {"teacher_cache": "dir"},
    {"save_hf": "new/export", "log_dir": "dir/deeper/still"},
]


@pytest.mark.parametrize("leaves", GOOD)
def test_paths_that_are_there_pass(leaves: dict[str, Any]) -> None:
    assert problems_of(**leaves) == []


BAD = [  # settings, the one problem with {here} for the current directory
    (
        {"hf_path": "nope"},
        "model.hf_path: nope does not exist in {here}; give a Hugging Face directory or a .gguf file",
    ),
    (
        {"hf_path": "org/name"},
        "model.hf_path: org/name does not exist in {here}; give a Hugging Face directory or a .gguf file "
        "(`hf download org/name --local-dir DIRECTORY` fetches a model of the hub)",
    ),
    (
        {"hf_path": "~/name"},
        "model.hf_path: ~/name does not exist (~ and $NAME are not expanded); write the path in full",
    ),
    (
        {"hf_path": "/nope", "random_init": True},
        "model.hf_path: /nope does not exist; give a directory with config.json",
    ),
    ({"hf_path": "bare", "tokenizer_path": "hf"}, "model.hf_path: bare has no config.json; give "),
    (
        {"hf_path": "only_config", "tokenizer_path": "hf"},
        "model.hf_path: only_config has no *.safetensors file; give a directory that has some, or set random_init",
    ),
    (
        {"hf_path": "weights.bin", "tokenizer_path": "hf"},
        "model.hf_path: weights.bin is not a model file that can be read; give a .gguf file or a directory",
    ),
    (
        {"hf_path": "hf/config.json"},
        "model.hf_path: hf/config.json is not a model file that can be read; give a .gguf file or a directory, "
        "or set random_init true for random weights",
    ),
    (
        {"hf_path": "only_config", "random_init": True},
        "model.tokenizer_path is not set, and hf_path: only_config has no tokenizer.json; give a directory",
    ),
    ({"tokenizer_path": "nope"}, "model.tokenizer_path: nope does not exist in {here}; give a Hugging Face"),
    ({"tokenizer_path": "rows.jsonl"}, "model.tokenizer_path: rows.jsonl is a file; give the directory that"),
    (
        {"tokenizer_path": "bare"},
        "model.tokenizer_path: bare has no tokenizer.json; give a directory with one",
    ),
    (
        {"chat_template": "nope.jinja"},
        "model.chat_template: nope.jinja does not exist in {here}; give a jinja",
    ),
    (
        {"train_data_path": "x.jsonl"},
        "data.train_data_path: x.jsonl does not exist in {here}; give a JSONL file",
    ),
    ({"train_data_path": "dir"}, "data.train_data_path: dir is a directory; give a JSONL file"),
    ({"valid_data_path": "dir"}, "data.valid_data_path: dir is a directory; give a JSONL file"),
    ({"valid_data_path": {"a": "dir"}}, "data.valid_data_path.a: dir is a directory; give a JSONL file"),
    ({"load": "nope"}, "checkpoint.load: nope does not exist in {here}; give a directory of checkpoints"),
    ({"load": "rows.jsonl"}, "checkpoint.load: rows.jsonl is a file; give a directory of checkpoints"),
    (
        {"save": "rows.jsonl"},
        "checkpoint.save: rows.jsonl cannot be a directory, because rows.jsonl is a file",
    ),
    (
        {"save_hf": "rows.jsonl/x"},
        "checkpoint.save_hf: rows.jsonl/x cannot be a directory, because {here}/rows.jsonl is a file; give another",
    ),
    (
        {"save_hf": "exported"},
        "checkpoint.save_hf: exported already holds files, which are never overwritten; give a new directory",
    ),
    (
        {"teacher_path": "nope"},
        "teacher.teacher_path: nope does not exist in {here}; give a Hugging Face directory or a .gguf file",
    ),
    (
        {"teacher_path": "only_config", "teacher_tokenizer_path": "hf"},
        "teacher.teacher_path: only_config has no *.safetensors file; give a directory that has some, or set "
        "teacher_load to a checkpoint with its weights",
    ),
    (
        {"teacher_path": "only_config", "teacher_load": "checkpoints"},
        "teacher.teacher_tokenizer_path is not set, and teacher_path: only_config has no tokenizer.json; give",
    ),
    (
        {"teacher_path": "hf", "teacher_tokenizer_path": "nope"},
        "teacher.teacher_tokenizer_path: nope does not exist in {here}; give a Hugging Face",
    ),
    (
        {"teacher_path": "hf", "teacher_load": "rows.jsonl"},
        "teacher.teacher_load: rows.jsonl is a file; give a directory of checkpoints",
    ),
    (
        {"teacher_cache": "nope"},
        "teacher.teacher_cache: nope does not exist in {here}; give a directory written by scripts/cache_teacher.py",
    ),
    (
        {"eval_only": True, "per_token_outputs": "weights.bin"},
        "evaluation.per_token_outputs: weights.bin exists already; give another path, or replace it with --overwrite",
    ),
    (
        {"eval_only": True, "per_token_outputs": "dir", "overwrite": True},
        "evaluation.per_token_outputs: dir is a directory; give the path of a new file",
    ),
    (
        {
            "eval_only": True,
            "valid_data_path": "rows.jsonl",
            "per_token_outputs": "dir/../rows.jsonl",
            "overwrite": True,
        },
        "evaluation.per_token_outputs: dir/../rows.jsonl is the evaluation set validation itself; give",
    ),
    (
        {"eval_only": True, "per_token_outputs": "rows.jsonl/x.jsonl"},
        "evaluation.per_token_outputs: rows.jsonl cannot be a directory, because rows.jsonl is a file; give another",
    ),
    (
        {"log_dir": "rows.jsonl"},
        "logging.log_dir: rows.jsonl cannot be a directory, because rows.jsonl is a file",
    ),
]


@pytest.mark.parametrize(("leaves", "start"), BAD)
def test_a_wrong_path_is_refused_in_these_words(leaves: dict[str, Any], start: str, here: Path) -> None:
    problems = problems_of(**leaves)
    assert len(problems) == 1
    assert problems[0].startswith(start.format(here=here))
    assert ";" in problems[0]


def test_what_may_not_be_read_or_written_is_refused(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    # The tests may run as root, whom no permission stops: only the answer of os.access is replaced.
    real = os.access
    closed = {("rows.jsonl", os.R_OK), ("dir", os.W_OK)}

    def access(path: str | Path, mode: int) -> bool:
        return not any(Path(path).name == name and mode & bit for name, bit in closed) and real(path, mode)

    monkeypatch.setattr(os, "access", access)
    assert problems_of(train_data_path="rows.jsonl", save="dir/new") == [
        "data.train_data_path: rows.jsonl cannot be read; change its permissions, or give another path",
        f"checkpoint.save: dir/new cannot be written ({here}/dir is not writable); give another path",
    ]


def test_all_problems_are_reported_at_once() -> None:
    values = {
        "model": {"hf_path": "nope", "chat_template": "dir"},
        "data": {"train_data_path": "x", "valid_data_path": {"a": "y", "b": "rows.jsonl"}},
        "checkpoint": {"load": "z", "save": "rows.jsonl"},
    }
    with pytest.raises(ConfigError) as error:
        check_files(Config.from_dict(values))
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "model.hf_path",
        "model.chat_template",
        "data.train_data_path",
        "data.valid_data_path.a",
        "checkpoint.load",
        "checkpoint.save",
    ]
    check_files(Config.from_dict({"model": {"hf_path": "hf"}}))


PATH_SETTINGS = [
    ("model.hf_path", "hf_path"),
    ("model.tokenizer_path", "tokenizer_path"),
    ("model.chat_template", "chat_template"),
    ("teacher.teacher_path", "teacher_path"),
    ("teacher.teacher_load", "teacher_load"),
    ("teacher.teacher_cache", "teacher_cache"),
    ("data.train_data_path", "train_data_path"),
    ("data.valid_data_path", "valid_data_path"),
    ("checkpoint.load", "load"),
    ("checkpoint.save", "save"),
    ("checkpoint.save_hf", "save_hf"),
    ("logging.log_dir", "log_dir"),
]
IMPOSSIBLE = [
    ("x" * 256, "has a name of more than 255 bytes"),
    ("new/" + "é" * 128 + "/new", "has a name of more than 255 bytes"),
    ("new/" * 1000, "is longer than 3840 bytes"),
    ("a\0b", "holds a NUL character"),
    ("loop/x", "cannot be reached (Too many levels of symbolic links)"),
]


@pytest.mark.parametrize(("path", "reason"), IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
@pytest.mark.parametrize(("setting", "leaf"), PATH_SETTINGS)
def test_a_path_that_cannot_be_is_refused(setting: str, leaf: str, path: str, reason: str) -> None:
    Path("loop").symlink_to("loop")
    (problem,) = problems_of(**{leaf: path})
    assert problem.startswith(f"{setting}: ") and f" {reason}" in problem and problem.endswith("; give another path")
    assert problem.isprintable()


@pytest.mark.parametrize("kind", ["device", "pipe.gguf", "socket"])
@pytest.mark.parametrize(("setting", "leaf"), PATH_SETTINGS)
def test_a_special_file_is_called_one(setting: str, leaf: str, kind: str) -> None:
    os.mkfifo("pipe.gguf")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        path = "/dev/null" if kind == "device" else kind
        (problem,) = problems_of(**{leaf: path})
    assert problem.startswith(f"{setting}: {path} ") and "is a device, pipe or socket" in problem
    assert "; give " in problem
