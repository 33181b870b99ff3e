"""The parts of an export that need no ranks: files, configs, tokenizers, and what is never overwritten."""

import json
from pathlib import Path

import pytest
import torch

from megatron_ext.models.export import (
    check_export_directory,
    export_config,
    generation_config,
    plan_shards,
    write_tokenizer,
)
from megatron_ext.models.hf_config import hf_config_from_dict, load_hf_config

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": None,
    "rope_theta": 5000.0,
    "torch_dtype": "float16",
    "some_note": "kept",
}


def test_shards_hold_consecutive_tensors_up_to_the_limit() -> None:
    shapes = {"a": (10,), "b": (5, 2), "c": (1,), "huge": (100,), "d": (20,)}
    assert plan_shards(shapes, itemsize=4, max_bytes=84) == [["a", "b", "c"], ["huge"], ["d"]]
    assert plan_shards(shapes, itemsize=2, max_bytes=10_000) == [["a", "b", "c", "huge", "d"]]


def test_exported_config_is_the_imported_one_with_the_new_dtype() -> None:
    exported = export_config(hf_config_from_dict(RAW, "model"), torch.bfloat16)
    assert exported == {**RAW, "dtype": "bfloat16", "torch_dtype": "bfloat16"}


def test_a_config_without_architectures_gets_them() -> None:
    raw = {key: value for key, value in RAW.items() if key not in ("architectures", "torch_dtype")}
    exported = export_config(hf_config_from_dict(raw, "model"), torch.float32)
    assert exported["architectures"] == ["LlamaForCausalLM"]
    assert "torch_dtype" not in exported


def test_generation_config_is_copied_or_made(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    made = generation_config(load_hf_config(tmp_path))
    assert made == {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": [2, 3]}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    assert generation_config(load_hf_config(tmp_path)) == {"temperature": 0.5}


def test_tokenizer_files_are_copied_and_the_template_replaced(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "README.md",
        "model.safetensors",
    ):
        (source / name).write_text(name)
    write_tokenizer(source, target)
    assert sorted(path.name for path in target.iterdir()) == [
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (target / "chat_template.jinja").read_text() == "chat_template.jinja"
    (tmp_path / "mine.jinja").write_text("mine")
    write_tokenizer(source, target, tmp_path / "mine.jinja")
    assert (target / "chat_template.jinja").read_text() == "mine"


def test_only_new_or_empty_directories_are_written(tmp_path: Path) -> None:
    check_export_directory(tmp_path / "new" / "deep")
    check_export_directory(tmp_path)
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match="exists and is not an empty directory"):
            check_export_directory(path)
