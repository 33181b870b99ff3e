"""Damaged and edited models: whatever is wrong with a config, an index or a GGUF header, it is said in a
sentence that names the file, the key, its value and what to do.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from test_models_config import LLAMA_31_8B
from test_models_sources import HIDDEN, make_tensors, write_gguf, write_model

from megatron_ext.models.gguf_file import open_gguf
from megatron_ext.models.hf_config import hf_config_from_dict, load_hf_config
from megatron_ext.models.sources import open_source

LLAMA3 = LLAMA_31_8B["rope_scaling"]
LLAMA3_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
NAN, INFINITY = float("nan"), float("inf")


def refusal(changes: dict, path: str = "model") -> str:
    with pytest.raises(ValueError, match=f"^{path}: ") as caught:
        hf_config_from_dict({**LLAMA_31_8B, **changes}, path)
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize("value", [[["x"]], [None], ["LlamaForCausalLM", 1], "LlamaForCausalLM", {}, 0, False])
def test_architectures_are_a_list_of_names(value: object) -> None:
    line = refusal({"architectures": value})
    assert f"architectures {value!r} is not a list of names; use the model's own config.json" in line


@pytest.mark.parametrize("architectures", [[], None, ["LlamaForCausalLM"]])
@pytest.mark.parametrize("value", [["llama"], {}, 1, False])
def test_the_model_type_is_a_name(architectures: list | None, value: object) -> None:
    line = refusal({"architectures": architectures, "model_type": value})
    assert f"model_type {value!r} is not a name; use the model's own config.json" in line


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", [[], ["llama3"], [1], "", "llama3", 0, 4.0, False, True])
def test_rope_parameters_are_an_object(key: str, value: object) -> None:
    assert f"{key} {value!r} is not an object; use the model's own config.json" in refusal({key: value})


@pytest.mark.parametrize("value", [0, 0.0, -1e4, NAN, INFINITY, 1e300, 10**400, 1e-300, "a", True, None, [1e4], {}])
@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ({"rope_type": "default"}, "rope_theta"),
        ({"rope_type": "linear", "factor": 2.0}, "rope_theta"),
        ({"rope_type": "linear"}, "factor"),
        *((LLAMA3, key) for key in (*LLAMA3_NUMBERS, "rope_theta")),
    ],
)
def test_rope_numbers_are_finite_and_positive(rope: dict, key: str, value: object) -> None:
    line = refusal({"rope_scaling": {**rope, key: value}})
    assert line.startswith(f"model: {key} ") and str(value)[:5] in line
    assert "is not a finite positive number (1e-06 to 1e+15); use the model's own config.json" in line


@pytest.mark.parametrize("value", [0, NAN, "a", [1]])
def test_rope_theta_is_checked_outside_of_the_rope_parameters_too(value: object) -> None:
    assert f"rope_theta {value!r} is not a finite positive number" in refusal({"rope_theta": value})


@pytest.mark.parametrize("key", LLAMA3_NUMBERS)
def test_llama3_needs_all_of_its_numbers(key: str) -> None:
    rope = {name: value for name, value in LLAMA3.items() if name != key}
    assert f"rope_type 'llama3' lacks {key}; complete the model's config.json" in refusal({"rope_scaling": rope})


@pytest.mark.parametrize("low", [4.0, 5.0])
def test_llama3_factors_are_in_order(low: float) -> None:
    line = refusal({"rope_scaling": {**LLAMA3, "low_freq_factor": low}})
    assert f"low_freq_factor {low} is not below high_freq_factor 4.0; use the model's own config.json" in line


@pytest.mark.parametrize("key", ["rms_norm_eps", "initializer_range"])
@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY, -1e-5, 10**400, "1e-5", True, [1e-5]])
def test_other_numbers_are_finite_and_not_negative(key: str, value: object) -> None:
    line = refusal({key: value})
    assert line.startswith(f"model: {key} ") and str(value)[:5] in line
    assert line.endswith("is not a number of at least 0; use the model's own config.json")


@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias", "mlp_bias"])
@pytest.mark.parametrize("value", ["false", "true", "", 0, 1, 0.0, [], {}])
def test_flags_are_true_or_false(key: str, value: object) -> None:
    assert refusal({key: value}) == f"model: {key} {value!r} is not true or false; use the model's own config.json"


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", [10**9 + 1, 2**63, 10**400])
def test_sizes_are_plausible(key: str, value: int) -> None:
    line = refusal({key: value})
    assert line.startswith(f"model: {key} {str(value)[:5]}") and "is not plausible (more than 10" in line
    assert line.endswith("; use the model's own config.json") and len(line) < 200


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "is not a safetensors index (it has no weight_map)"),
        ("{}", "is not a safetensors index (it has no weight_map)"),
        ("[" * 100_000, "is not a safetensors index (it is nested too deeply)"),
        ("1" * 5000, "is not a safetensors index ("),
        ('{"weight_map": ["a"]}', "weight_map ['a'] is not an object"),
        ('{"weight_map": "model.safetensors"}', "weight_map 'model.safetensors' is not an object"),
        ('{"weight_map": null}', "weight_map None is not an object"),
        ('{"weight_map": {"a.weight": 1}}', "weight_map places a.weight in 1, which is not a file name"),
        ('{"weight_map": {"a.weight": ["b"]}}', "weight_map places a.weight in ['b'], which is not a file name"),
        ('{"weight_map": {"a.weight": null}}', "weight_map places a.weight in None, which is not a file name"),
    ],
)
def test_malformed_indexes_are_named(tmp_path: Path, content: str, message: str) -> None:
    hf = write_model(tmp_path, make_tensors(), num_files=2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    with pytest.raises(ValueError) as caught:
        open_source(hf, random_init=False, seed=0)
    assert str(caught.value).startswith(str(index)) and message in str(caught.value)
    assert str(caught.value).endswith("; download it again")


@pytest.mark.parametrize("file", ["", "..", "none.safetensors", "x" * 300, "a\0b"])
def test_indexes_name_files_that_are_there(tmp_path: Path, file: str) -> None:
    hf = write_model(tmp_path, make_tensors(), num_files=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": file}}))
    with pytest.raises(ValueError, match=r"is missing, but .* names it|File name too long"):
        open_source(hf, random_init=False, seed=0)


@pytest.mark.parametrize("flip", [0xFF, 0x80, 0x01])
def test_damaged_gguf_headers_end_in_a_sentence(tmp_path: Path, flip: int) -> None:
    """Every seventh byte of the header in turn; a file that is still one may open, all others are named."""
    whole = tmp_path / "model.gguf"
    write_gguf(whole, make_tensors(), GGMLQuantizationType.F32)
    content = whole.read_bytes()
    refused = 0
    for position in range(flip % 7, open_gguf(whole).data_offset, 7):
        path = tmp_path / f"{position}.gguf"
        path.write_bytes(content[:position] + bytes([content[position] ^ flip]) + content[position + 1 :])
        try:
            open_source(load_hf_config(path), random_init=False, seed=0)
        except ValueError as error:
            refused += 1
            assert str(path) in str(error), position
        path.unlink()
    assert refused > 100


@pytest.mark.parametrize("kind", [GGMLQuantizationType.I8, GGMLQuantizationType.I32])
def test_gguf_types_that_cannot_be_dequantised_are_refused(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    path = tmp_path / "model.gguf"
    tensors = make_tensors()
    del tensors["model.norm.weight"]
    values = np.zeros(HIDDEN, np.int8 if kind == GGMLQuantizationType.I8 else np.int32)
    write_gguf(path, tensors, GGMLQuantizationType.F32, {"output_norm.weight": values})
    with pytest.raises(ValueError, match=rf"model\.gguf: .*: model\.norm\.weight has dtype {kind.name}; use the unqu"):
        open_source(load_hf_config(path), random_init=False, seed=0)
