"""Reading Hugging Face configs, what is refused, and what Megatron-Core is told."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext import platform
from megatron_ext.config import Config, ConfigError
from megatron_ext.models.hf_config import check_model_layout, hf_config_from_dict, load_hf_config
from megatron_ext.models.rope import inverse_frequencies
from megatron_ext.models.transformer_config import build_transformer_config, padded_vocab_size

LLAMA_2_7B = {  # transformers 4: no head_dim, no num_key_value_heads, rope_scaling null
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
SMOLLM2 = {  # written by transformers 5: RoPE in rope_parameters
    "architectures": ["LlamaForCausalLM"],
    "dtype": "float32",
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def make_config(**sections: dict[str, Any]) -> Config:
    return Config.from_dict({"model": {"hf_path": "model"}, **sections})


def layout_problem(raw: dict, **parallel: int) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model_layout(hf_config_from_dict(raw, "model"), make_config(parallel=parallel))
    return str(caught.value)


@pytest.mark.parametrize(
    ("raw", "groups", "head_dim", "theta", "tied"),
    [(LLAMA_2_7B, 32, 128, 1e4, False), (LLAMA_31_8B, 8, 128, 5e5, False), (SMOLLM2, 3, 64, 1e5, True)],
)
def test_translation_to_megatron(raw: dict, groups: int, head_dim: int, theta: float, tied: bool) -> None:
    hf = hf_config_from_dict(raw, "model")
    assert (hf.tied, hf.rope_parameters["rope_theta"]) == (tied, theta)
    built = build_transformer_config(hf, make_config(), platform.setup("cpu"))
    assert built.num_layers == raw["num_hidden_layers"]
    assert built.hidden_size == raw["hidden_size"]
    assert built.ffn_hidden_size == raw["intermediate_size"]
    assert built.num_attention_heads == raw["num_attention_heads"]
    assert (built.num_query_groups, built.kv_channels) == (groups, head_dim)
    assert (built.normalization, built.layernorm_epsilon) == ("RMSNorm", 1e-5)
    assert built.gated_linear_unit and built.activation_func is torch.nn.functional.silu
    assert not built.add_bias_linear and not built.add_qkv_bias
    assert (built.attention_dropout, built.hidden_dropout) == (0.0, 0.0)
    assert built.calculate_per_token_loss and not built.gradient_accumulation_fusion
    assert built.params_dtype == built.pipeline_dtype == torch.float32


def test_layout_and_precision_are_passed_on() -> None:
    config = make_config(
        model={
            "hf_path": "model",
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn", "mlp"],
        },
        parallel={
            "tensor_model_parallel_size": 3,
            "sequence_parallel": True,
            "pipeline_model_parallel_size": 3,
            "virtual_pipeline_model_parallel_size": 2,
            "context_parallel_size": 2,
        },
        training={"bf16": True},
    )
    built = build_transformer_config(hf_config_from_dict(SMOLLM2, "model"), config, platform.setup("cpu"))
    assert built.bf16 and built.params_dtype == built.pipeline_dtype == torch.bfloat16
    assert built.sequence_parallel and built.context_parallel_size == 2
    assert built.recompute_modules == ["core_attn", "mlp"]
    assert (built.overlap_p2p_comm, built.batch_p2p_comm) == (True, False)  # batched messages get mixed up


def test_padded_vocabulary_is_megatrons() -> None:
    hf = hf_config_from_dict({**SMOLLM2, "vocab_size": 49153}, "model")
    for tp, expected in ((1, 49280), (2, 49408), (3, 49536)):
        assert padded_vocab_size(hf, make_config(parallel={"tensor_model_parallel_size": tp})) == expected


LLAMA_32 = {**LLAMA_31_8B["rope_scaling"], "factor": 32.0, "rope_theta": 250000.0}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 12345.0},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA_31_8B["rope_scaling"]},
        {"rope_parameters": LLAMA_32},
        {"rope_parameters": {**LLAMA_32, "low_freq_factor": 2.0, "original_max_position_embeddings": 1024}},
    ],
)
def test_inverse_frequencies_are_those_of_transformers(rope: dict) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = {key: value for key, value in LLAMA_31_8B.items() if not key.startswith("rope")} | rope
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_dict(deepcopy(raw)))
    assert theirs.attention_scaling == 1.0
    before = deepcopy(raw)
    assert torch.equal(inverse_frequencies(hf_config_from_dict(raw, "model")), theirs.inv_freq)
    assert raw == before  # an export writes it again


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel is not supported; supported: Llama",
        ),
        ({"architectures": None, "model_type": "mamba"}, "model_type 'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"mlp_bias": True}, "mlp_bias true is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type 'linear' lacks factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "32000"}, "vocab_size '32000' is not a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0 is not a whole number of at least 1"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is not divisible by num_key_value_heads 5"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps 'small' is not a number"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_unsupported_configs_are_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match="model: ") as caught:
        hf_config_from_dict({**LLAMA_31_8B, **changes}, "model")
    assert message in str(caught.value)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        hf_config_from_dict({**LLAMA_31_8B, "hidden_act": "gelu", "mlp_bias": True, "hidden_size": -1}, "model")
    assert len(str(caught.value).splitlines()) == 3


def test_config_comes_from_a_directory_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMOLLM2))
    assert load_hf_config(tmp_path).kind == "directory"
    from_file = load_hf_config(file)
    assert from_file.kind == "config" and from_file.raw == SMOLLM2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", '{"vocab_size": ', "config.json is not valid JSON"),
        ("config.json", "[1]", "config.json is not a JSON object"),
        ("config.json", "[" * 100_000, "config.json is not valid JSON .it is nested too deeply.; download it again"),
        ("config.json", '{"a":' * 100_000, "config.json is not valid JSON .it is nested too deeply.; download it"),
        ("config.json", '{"vocab_size": 1%s}' % ("0" * 5000), "config.json is not valid JSON .*; download it again"),
        ("other.json", "{}", "has no config.json"),
    ],
)
def test_broken_config_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_hf_config(tmp_path)


def test_a_missing_gguf_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.gguf does not exist"):
        load_hf_config(tmp_path / "none.gguf")


def test_heads_that_do_not_divide_say_what_does() -> None:
    lines = layout_problem(SMOLLM2, tensor_model_parallel_size=2).splitlines()
    assert lines[0] == "num_attention_heads 9 is not divisible by tensor_model_parallel_size 2; use 1, 3 or 9"
    assert lines[1].startswith("num_key_value_heads 3 is not divisible by tensor_model_parallel_size 2; use 1 or 3 (")


def test_key_value_heads_have_to_divide_too() -> None:
    (line,) = layout_problem(LLAMA_31_8B, tensor_model_parallel_size=16).splitlines()
    assert "num_key_value_heads 8 is not divisible by tensor_model_parallel_size 16; use 1, 2, 4 or 8" in line


def test_layers_have_to_fill_the_stages_equally() -> None:
    line = layout_problem(SMOLLM2, pipeline_model_parallel_size=4)
    assert "num_hidden_layers 30 is not divisible by pipeline_model_parallel_size 4; use 1, 2, 3, 5, 6" in line


@pytest.mark.parametrize(
    ("pp", "first", "last", "vpp", "fits"),
    [
        (4, 6, None, None, True),  # 24 layers on 3 stages
        (4, 7, None, None, False),
        (4, None, 9, None, True),
        (4, 5, 5, None, True),  # 20 on 2
        (2, 14, 16, None, True),
        (2, 14, 15, None, False),  # one layer belongs to nobody
        (2, 20, None, None, True),
        (3, 15, 15, None, False),  # a stage without a layer
        (2, 31, None, None, False),
        (2, None, None, 3, True),
        (2, None, None, 2, False),  # 15 layers in 2 chunks
        (2, 14, 16, 2, True),
        (4, 6, None, 4, False),
        (1, 15, None, None, False),
    ],
)
def test_layer_placement_agrees_with_megatron(
    pp: int, first: int | None, last: int | None, vpp: int | None, fits: bool
) -> None:
    hf = hf_config_from_dict(SMOLLM2, "model")
    config = make_config(
        parallel={
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": vpp,
            "num_layers_in_first_pipeline_stage": first,
            "num_layers_in_last_pipeline_stage": last,
        }
    )
    if fits:
        check_model_layout(hf, config)
        build_transformer_config(hf, config, platform.setup("cpu"))
        return
    with pytest.raises(ConfigError):
        check_model_layout(hf, config)


def test_sequences_have_to_fit_the_positions() -> None:
    hf = hf_config_from_dict(LLAMA_2_7B, "model")
    with pytest.raises(ConfigError, match=r"seq_length 4097 is longer than .* 4096; use 4096 or less"):
        check_model_layout(hf, make_config(data={"seq_length": 4097}))
    check_model_layout(hf, make_config(data={"seq_length": 4096}))


def test_experts_need_a_mixture_of_experts() -> None:
    assert "expert_model_parallel_size 2" in layout_problem(LLAMA_2_7B, expert_model_parallel_size=2)


def test_transformer_engine_cannot_be_forced_onto_a_cpu() -> None:
    config = make_config(model={"hf_path": "model", "transformer_impl": "transformer_engine"})
    with pytest.raises(ValueError, match="transformer_impl transformer_engine cannot be used on a CPU"):
        build_transformer_config(hf_config_from_dict(SMOLLM2, "model"), config, platform.setup("cpu"))
