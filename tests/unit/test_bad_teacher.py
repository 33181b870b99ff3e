"""Mistakes in a teacher, a store of its words or the losses that need one, through the entry point: each ends before
any process group starts, with a message that names the setting. And what of the teacher has to agree on resume.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.data import load_run_data
from megatron_ext.teacher_cache import CacheWriter, StoreFacts
from toy_run import ROOT, ToyRun, write_toy_model, write_toy_teacher

sys.path.insert(0, str(ROOT))
import pretrain_sft

KL = {"losses.kl": "{type: forward_kl}"}
TOP_KL = {"losses.kl": "{type: forward_kl, top_k: 4, tail: bucket}"}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    toy = ToyRun(tmp_path_factory.mktemp("toy"))
    write_toy_teacher(toy.folder / "teacher")
    return toy


@pytest.fixture
def refuse(toy: ToyRun, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def run(world_size: int = 1, **changes: Any) -> str:
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("LOCAL_RANK", "0")
        assert pretrain_sft.main(toy.flags(**changes)) == 2
        out, err = capsys.readouterr()
        assert "Traceback" not in err and out == ""
        return err

    return run


def test_a_loss_without_a_teacher_and_a_teacher_without_a_loss(refuse, toy: ToyRun) -> None:
    assert "losses.kl: a loss of type forward_kl needs a teacher; set teacher.teacher_path" in refuse(**KL)
    logged = {"losses.kl": "{type: jsd, weight: 0}"}
    assert "losses.kl: a loss of type jsd needs a teacher" in refuse(**logged)
    assert "does nothing without a loss of type forward_kl" in refuse(teacher_path=toy.folder / "teacher")
    assert "teacher.teacher_path: /nowhere does not exist" in refuse(**KL, teacher_path="/nowhere")


def test_numbers_of_the_losses(refuse, toy: ToyRun) -> None:
    def loss(text: str) -> str:
        return refuse(**{"losses.kl": f"{{type: jsd, {text}}}"}, teacher_path=toy.folder / "teacher")

    assert "losses.kl.temperature: 0 is too small; use a number above 0" in loss("temperature: 0")
    assert "losses.kl.beta: 1.0 is too large; use a number above 0 and below 1" in loss("beta: 1.0")
    assert "losses.kl has top_k 4 and no tail" in loss("top_k: 4")
    message = loss("top_k: 23, tail: ignore")
    assert "losses.kl.top_k: 23 is larger than the vocabulary of 22 that model (vocab_size 22) and teacher" in message


def test_a_teacher_that_does_not_fit_the_layout(refuse, tmp_path: Path) -> None:
    teacher = write_toy_teacher(tmp_path / "teacher", num_attention_heads=3, num_key_value_heads=3, head_dim=16)
    message = refuse(**KL, teacher_path=teacher, tensor_model_parallel_size=2, world_size=2)
    assert f"teacher.teacher_path {teacher}: num_attention_heads 3 is not divisible by tensor_model_parallel" in message
    teacher = write_toy_teacher(tmp_path / "shallow", num_hidden_layers=1)
    message = refuse(**KL, teacher_path=teacher, pipeline_model_parallel_size=2, world_size=2)
    assert "num_hidden_layers 1 cannot be spread over pipeline_model_parallel_size 2 stages" in message


def test_a_teacher_with_another_tokenizer(refuse, toy: ToyRun, tmp_path: Path) -> None:
    teacher = shutil.copytree(toy.folder / "teacher", tmp_path / "teacher")
    path = teacher / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["red"], vocabulary["blue"] = vocabulary["blue"], vocabulary["red"]
    path.write_text(json.dumps(content))
    message = refuse(**KL, teacher_path=teacher)
    assert (
        f"tokenizer_path {toy.model} (22 tokens) and teacher_tokenizer_path {teacher} (22 tokens) differ in 2"
        in message
    )
    shutil.rmtree(teacher)
    write_toy_teacher(teacher, vocab_size=10)
    assert "but the model's vocab_size is 10" in refuse(**KL, teacher_path=teacher)


# --------------------------------------------------------------------------------------------------------- stores


@pytest.fixture
def store(toy: ToyRun, tmp_path: Path) -> Path:
    """Of the toy's data; what the teacher says is made up."""
    from megatron_ext.config import load_config

    data = load_run_data(load_config(toy.flags()))
    facts = StoreFacts(4, 1.0, 22, 22, {"weights": "w", "bf16": False})
    writer = CacheWriter(tmp_path / "store", facts, data.named())
    writer.create()
    for name, dataset in data.named():
        for index in range(len(dataset)):
            length = len(dataset[index])
            uniform = np.full((length, 4), -np.log(22.0)), np.full(length, np.log(18 / 22))
            writer.write(name, index, np.array(dataset[index].input_ids), np.tile(np.arange(4), (length, 1)), *uniform)
    writer.finish()
    return tmp_path / "store"


def test_stores_that_are_none_or_of_something_else(refuse, toy: ToyRun, store: Path, tmp_path: Path) -> None:
    assert "teacher_cache" in refuse(**TOP_KL, teacher_cache=tmp_path / "nowhere")
    assert "has no header.json, so it is no store" in refuse(**TOP_KL, teacher_cache=toy.model)
    assert "losses.kl.top_k is not set, but teacher.teacher_cache holds" in refuse(**KL, teacher_cache=store)
    both = refuse(**TOP_KL, teacher_cache=store, teacher_path=toy.folder / "teacher")
    assert "takes the place of a teacher, but teacher_path" in both
    warm = {"losses.kl": "{type: reverse_kl, temperature: 2, top_k: 4, tail: bucket}"}
    assert "losses.kl.temperature: 2.0 is not the temperature 1.0 that" in refuse(**warm, teacher_cache=store)
    many = {"losses.kl": "{type: reverse_kl, top_k: 5, tail: bucket}"}
    assert "losses.kl.top_k: 5 is not the top_k 4 that" in refuse(**many, teacher_cache=store)


def test_a_store_made_for_other_tokens(refuse, toy: ToyRun, store: Path, tmp_path: Path) -> None:
    message = refuse(**TOP_KL, teacher_cache=store, seq_length=6)  # rows are cut
    assert "was made for other tokens: " in message and "of train" in message and "seq_length" in message
    line = {"messages": [{"role": "user", "content": "ten ten ten"}, {"role": "assistant", "content": "one"}]}
    (tmp_path / "other.jsonl").write_text(json.dumps(line) + "\n")
    message = refuse(**TOP_KL, teacher_cache=store, valid_data_path=tmp_path / "other.jsonl")
    assert "1 of 1 samples of validation" in message and "the first is sample 0" in message
    model = write_toy_model(tmp_path / "smaller", vocab_size=21)
    message = refuse(**TOP_KL, teacher_cache=store, hf_path=model)
    assert "was written for 22 token ids, but the model and the teacher (vocab_size 22) share 21" in message


def test_a_store_that_is_cut_or_altered(refuse, store: Path) -> None:
    path = store / "log_probabilities.bin"
    path.write_bytes(path.read_bytes()[:-4])
    assert "is truncated: log_probabilities.bin has" in refuse(**TOP_KL, teacher_cache=store)
    header = store / "header.json"
    header.write_text(header.read_text().replace('"top_k": 4', '"top_k": 3'))
    assert "is damaged: header.json was altered" in refuse(**TOP_KL, teacher_cache=store)


# --------------------------------------------------------------------------------------------------------- resume


def test_a_run_goes_on_with_its_own_teacher_only(toy: ToyRun, store: Path, tmp_path: Path) -> None:
    from megatron_ext.config import load_config
    from megatron_ext.run_folder import training_settings

    def settings(**changes: Any) -> dict[str, Any]:
        return training_settings(load_config(toy.flags(**changes)))

    own = settings(**TOP_KL, teacher_path=toy.folder / "teacher")
    moved = shutil.copytree(toy.folder / "teacher", tmp_path / "moved")
    assert settings(**TOP_KL, teacher_path=moved) == own, "where it is does not matter"
    other = write_toy_teacher(tmp_path / "other", seed=2)
    changed = settings(**TOP_KL, teacher_path=other)
    assert {name for name in own if own[name] != changed[name]} == {"teacher.weights"}
    precise = settings(**TOP_KL, teacher_path=moved, teacher_bf16="true")
    assert {name for name in own if own[name] != precise[name]} == {"teacher.bf16"}
    assert settings(**TOP_KL, teacher_cache=store)["teacher.weights"] == "w", "a store stands for its teacher"
    assert not any(name.startswith("teacher") for name in settings()), "older checkpoints have no teacher"
