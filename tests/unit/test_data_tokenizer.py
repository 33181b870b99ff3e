"""Loading a tokenizer from disk and saying what is wrong when that fails."""

import json
import os

import pytest
from data_helpers import CHATML, LLAMA3, byte_level_tokenizer

from megatron_ext.data import check_same_tokenizer, find_pad_id, load_tokenizer


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


def test_tokenizers_are_compared_id_by_id(directory, tmp_path):
    """A teacher's has to give the student's ids the same meaning; it may know more tokens, or fewer."""
    check_same_tokenizer(directory, directory)
    other = tmp_path / "other"
    larger = byte_level_tokenizer(CHATML)
    larger.add_tokens(["<one more>"])
    larger.save_pretrained(other)
    check_same_tokenizer(directory, other)
    check_same_tokenizer(other, directory)

    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content))
    own, theirs = len(load_tokenizer(directory)), len(load_tokenizer(directory)) + 1
    with pytest.raises(ValueError) as error:
        check_same_tokenizer(directory, other)
    message = str(error.value)
    assert f"tokenizer_path {directory} ({own} tokens) and teacher_tokenizer_path {other} ({theirs} tokens)" in message
    assert f"differ in 2 of them: {first!r} is 0 and 1, {second!r} is 1 and 0; give a teacher with" in message


def test_an_id_with_another_token_is_a_difference(directory, tmp_path):
    renamed = tmp_path / "renamed"
    byte_level_tokenizer(CHATML).save_pretrained(renamed)
    text = (renamed / "tokenizer.json").read_text()
    (renamed / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|eot|>"))
    config = (renamed / "tokenizer_config.json").read_text()
    (renamed / "tokenizer_config.json").write_text(config.replace("<|im_end|>", "<|eot|>"))
    with pytest.raises(ValueError, match=r"differ in 1 of them: \d+ is '<\|im_end\|>' and '<\|eot\|>'; give a teacher"):
        check_same_tokenizer(directory, renamed)


def test_a_teachers_tokenizer_that_cannot_be_loaded_is_named(directory, tmp_path):
    with pytest.raises(ValueError, match=r"teacher_tokenizer_path: tokenizer path .*none does not exist"):
        check_same_tokenizer(directory, tmp_path / "none")
