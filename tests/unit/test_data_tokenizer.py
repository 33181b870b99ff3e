"""Loading a tokenizer from disk and saying what is wrong when that fails."""

import json
import os

import pytest
from data_helpers import CHATML, LLAMA3, byte_level_tokenizer

from megatron_ext.data import find_pad_id, load_tokenizer


@pytest.fixture
def directory(tmp_path):
    byte_level_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_directory_with_its_template(directory):
    tokenizer = load_tokenizer(directory)
    assert tokenizer.is_fast and tokenizer.chat_template == CHATML
    assert tokenizer("The tide turns").input_ids == byte_level_tokenizer(CHATML)("The tide turns").input_ids
    assert tokenizer.eos_token == "<|im_end|>"


def test_template_file_replaces_the_template(directory, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text(LLAMA3, encoding="utf-8")
    assert load_tokenizer(str(directory), str(file)).chat_template == LLAMA3


def test_missing_and_empty_template_files_are_refused(directory, tmp_path):
    with pytest.raises(ValueError, match=r"chat_template .*none\.jinja does not exist"):
        load_tokenizer(directory, tmp_path / "none.jinja")
    (tmp_path / "empty.jinja").write_text(" \n")
    with pytest.raises(ValueError, match=r"chat_template .*empty\.jinja is empty"):
        load_tokenizer(directory, tmp_path / "empty.jinja")


def test_special_files_and_impossible_names_are_refused(directory, tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(
        ValueError, match=r"tokenizer path .*pipe\.gguf is a device, pipe or socket, not a regular file; "
    ):
        load_tokenizer(tmp_path / "pipe.gguf")
    with pytest.raises(ValueError, match="chat_template /dev/null is a device, pipe or socket, not a regular file; "):
        load_tokenizer(directory, "/dev/null")
    for name, reason in (("x" * 300, "more than 255 bytes"), ("a\0b", "'a.x00b' holds a NUL character")):
        with pytest.raises(ValueError, match=rf"tokenizer path .*{reason}.*; give"):
            load_tokenizer(name)
        with pytest.raises(ValueError, match=rf"chat_template .*{reason}.*; give"):
            load_tokenizer(directory, name)


def test_paths_that_hold_no_tokenizer_are_refused(tmp_path):
    with pytest.raises(ValueError, match="none does not exist"):
        load_tokenizer(tmp_path / "none")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match=r"no tokenizer could be loaded from .*tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json is a file but not a \.gguf file"):
        load_tokenizer(tmp_path / "config.json")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF nonsense")
    with pytest.raises(ValueError, match=r"no tokenizer could be loaded from .*broken\.gguf"):
        load_tokenizer(tmp_path / "broken.gguf")


def test_pad_id_falls_back_to_end_of_sequence_and_to_zero():
    tokenizer = byte_level_tokenizer(CHATML, pad="</s>")
    assert find_pad_id(tokenizer) == tokenizer.convert_tokens_to_ids("</s>")
    assert find_pad_id(byte_level_tokenizer(CHATML)) == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert find_pad_id(byte_level_tokenizer(CHATML, eos=None)) == 0
