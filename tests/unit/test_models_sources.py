"""Reading tensors: whole and in part, from every kind of source, and what is said about broken files."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file
from torch import Tensor

from megatron_ext.models.families.base import HFConfig
from megatron_ext.models.hf_config import hf_config_from_dict, load_hf_config
from megatron_ext.models.sources import GGUFSource, RandomSource, SafetensorsSource, check_source, open_source

LAYERS, HIDDEN, FFN, VOCAB, HEADS, GROUPS = 2, 64, 96, 40, 4, 2
RAW = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "initializer_range": 0.05,
}


def make_tensors(tied: bool = False) -> dict[str, Tensor]:
    """A checkpoint's tensors, names and shapes written out by hand."""
    generator = torch.Generator().manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            prefix + "self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
            prefix + "self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "mlp.gate_proj.weight": (FFN, HIDDEN),
            prefix + "mlp.up_proj.weight": (FFN, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, FFN),
        }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_model(directory: Path, tensors: dict[str, Tensor], num_files: int = 1, **changes: object) -> HFConfig:
    (directory / "config.json").write_text(json.dumps({**RAW, **changes}))
    names = list(tensors)
    if num_files == 1:
        save_file(tensors, directory / "model.safetensors")
    else:
        weight_map = {}
        for number in range(num_files):
            file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
            part = {name: tensors[name] for name in names[number::num_files]}
            save_file(part, directory / file)
            weight_map |= dict.fromkeys(part, file)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return load_hf_config(directory)


@pytest.mark.parametrize("num_files", [1, 3])
def test_safetensors_are_read_whole_and_in_part(tmp_path: Path, num_files: int) -> None:
    tensors = make_tensors()
    source = open_source(write_model(tmp_path, tensors, num_files), random_init=False, seed=0)
    assert set(source.keys()) == set(tensors)
    for name, tensor in tensors.items():
        assert source.shape(name) == tuple(tensor.shape)
        assert torch.equal(source.read(name), tensor)
    down = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(source.read(down, (slice(8, 16),)), tensors[down][8:16])
    assert torch.equal(source.read(down, (slice(None), slice(48, 96))), tensors[down][:, 48:])


def test_stored_dtype_is_kept(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in make_tensors().items()}
    source = open_source(write_model(tmp_path, tensors), random_init=False, seed=0)
    assert source.read("lm_head.weight").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.int32, "I32"),
        (torch.int64, "I64"),
        (torch.bool, "BOOL"),
        (torch.float8_e4m3fn, "F8_E4M3"),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_quantised_tensors_are_refused_without_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, name: str, tied: bool
) -> None:
    tensors = make_tensors()
    tensors["lm_head.weight"] = torch.zeros(VOCAB, HIDDEN).to(dtype)
    hf = write_model(tmp_path, tensors, tie_word_embeddings=tied)
    monkeypatch.delattr(SafetensorsSource, "read")
    with pytest.raises(ValueError) as caught:
        open_source(hf, random_init=False, seed=0)
    reason = f"tensors cannot be trained: lm_head.weight has dtype {name}; use the unquantised model"
    assert str(caught.value) == f"{tmp_path}: {reason}"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floating_point_tensors_are_taken(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in make_tensors().items()}
    open_source(write_model(tmp_path, tensors), random_init=False, seed=0)


@pytest.mark.parametrize("num_files", [1, 2])
def test_truncated_files_are_named(tmp_path: Path, num_files: int) -> None:
    hf = write_model(tmp_path, make_tensors(), num_files)
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - 100)
    with pytest.raises(ValueError, match=f"{last.name} is truncated or not a safetensors file"):
        open_source(hf, random_init=False, seed=0)


def test_corrupt_files_are_named(tmp_path: Path) -> None:
    hf = write_model(tmp_path, make_tensors())
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or not a safetensors file"):
        open_source(hf, random_init=False, seed=0)


def test_missing_files_are_named(tmp_path: Path) -> None:
    hf = write_model(tmp_path, make_tensors(), num_files=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_source(hf, random_init=False, seed=0)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match=r"index\.json is not a safetensors index"):
        open_source(hf, random_init=False, seed=0)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor"):
        open_source(hf, random_init=False, seed=0)


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    hf = write_model(tmp_path, make_tensors(), num_files=2)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["model.norm.weight"] = weight_map["model.embed_tokens.weight"]
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"model-00001-of-00002\.safetensors lacks model\.norm\.weight"):
        open_source(hf, random_init=False, seed=0)


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    tensors = make_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(FFN, HIDDEN)
    tensors["model.norm.weight"] = torch.zeros(HIDDEN + 1)
    hf = write_model(tmp_path, tensors)
    with pytest.raises(ValueError) as caught:
        open_source(hf, random_init=False, seed=0)
    missing, unexpected, misshapen = str(caught.value).splitlines()
    assert missing.endswith("tensors are missing: model.layers.1.mlp.up_proj.weight")
    assert unexpected.endswith("not part of LlamaForCausalLM: model.layers.2.mlp.up_proj.weight")
    assert misshapen.endswith("shapes do not match the config: model.norm.weight is [65] and not [64]")


def test_untied_models_need_an_output_layer(tmp_path: Path) -> None:
    hf = write_model(tmp_path, make_tensors(tied=True), tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
        open_source(hf, random_init=False, seed=0)


def test_tied_models_may_store_a_copy_and_old_ones_their_rope_cache(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    check_source(write_model(tmp_path, tensors, tie_word_embeddings=True), SafetensorsSource(tmp_path))


def test_a_config_alone_has_no_weights(tmp_path: Path) -> None:
    write_model(tmp_path, make_tensors())
    hf = load_hf_config(tmp_path / "config.json")
    with pytest.raises(ValueError, match="config without weights"):
        open_source(hf, random_init=False, seed=0)
    open_source(hf, random_init=True, seed=0)


def test_random_values_depend_on_seed_and_name_only() -> None:
    small = RandomSource(hf_config_from_dict(RAW, "model"), seed=5)
    deep = RandomSource(hf_config_from_dict({**RAW, "num_hidden_layers": 7}, "model"), seed=5)
    other = RandomSource(hf_config_from_dict(RAW, "model"), seed=6)
    gate, up = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"
    torch.manual_seed(0)
    first = small.read(gate)
    torch.manual_seed(1)  # the global generator has no part in it
    assert torch.equal(first, small.read(gate))
    assert torch.equal(first, deep.read(gate))
    assert not torch.equal(first, small.read(up))
    assert not torch.equal(first, other.read(gate))
    assert torch.equal(small.read(gate, (slice(10, 20),)), first[10:20])
    assert torch.equal(small.read(gate, (slice(None), slice(3, 5))), first[:, 3:5])


def test_random_weights_have_the_configured_spread() -> None:
    source = RandomSource(hf_config_from_dict(RAW, "model"), seed=5)
    values = torch.cat([source.read(name).flatten() for name in source.keys() if "norm" not in name])  # noqa: SIM118
    assert abs(values.mean().item()) < 0.001
    assert abs(values.std().item() - 0.05) < 0.001
    assert torch.equal(source.read("model.norm.weight"), torch.ones(HIDDEN))


def permute_as_llama_cpp(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row i of a head's first half goes to its row 2i, row i of the second half to row 2i + 1."""
    permuted = np.empty_like(weight)
    size = len(weight) // heads
    for head in range(heads):
        for i in range(size // 2):
            permuted[head * size + 2 * i] = weight[head * size + i]
            permuted[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
    return permuted


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    tensors: dict[str, Tensor],
    kind: GGMLQuantizationType,
    extra: dict[str, np.ndarray] | None = None,
) -> dict[str, Tensor]:
    """Write a llama.cpp file of the model; returns what a reader should get, rounded by quantisation."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"token {i}" for i in range(VOCAB)])
    writer.add_eos_token_id(7)
    expected = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[1] == "layers":
            gguf_name = f"blk.{parts[2]}.{GGUF_NAMES['.'.join(parts[3:-1])]}.weight"
        else:
            gguf_name = GGUF_NAMES[name]
        heads = HEADS if "q_proj" in name else GROUPS if "k_proj" in name else 0
        values = tensor.numpy()
        stored_as = kind if tensor.dim() == 2 else GGMLQuantizationType.F32
        packed = quantize(permute_as_llama_cpp(values, heads) if heads else values, stored_as)
        writer.add_tensor(gguf_name, packed, raw_dtype=stored_as)
        # rows are quantised one by one: their order does not matter
        expected[name] = torch.from_numpy(np.array(dequantize(quantize(values, stored_as), stored_as)))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0])
def test_gguf_tensors_are_dequantised_and_in_transformers_order(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    path = tmp_path / "model.gguf"
    expected = write_gguf(path, make_tensors(), kind)
    source = open_source(load_hf_config(path), random_init=False, seed=0)
    assert isinstance(source, GGUFSource) and set(source.keys()) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(source.read(name), tensor.float()), name
    key = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(source.read(key, (slice(16, 32),)), expected[key].float()[16:32])


def test_gguf_metadata_becomes_a_config(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, make_tensors(tied=True), GGMLQuantizationType.F32)
    hf = load_hf_config(path)
    assert (hf.kind, hf.tied, hf.vocab_size, hf.num_layers) == ("gguf", True, VOCAB, LAYERS)
    assert (hf.hidden_size, hf.ffn_hidden_size, hf.num_attention_heads, hf.num_query_groups) == (64, 96, 4, 2)
    assert (hf.head_dim, hf.max_position_embeddings, hf.raw["eos_token_id"]) == (16, 128, 7)
    assert hf.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}


def test_gguf_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = tmp_path / "model.gguf"
    write_gguf(path, make_tensors(), GGMLQuantizationType.Q8_0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    hf = load_hf_config(path)
    source = open_source(hf, random_init=False, seed=0)
    assert {name: source.shape(name) for name in source.keys()} == {  # noqa: SIM118
        name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()
    }
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(source.read(name), tensor), name
    ours = type(theirs.config)(**hf.raw)
    for key in (
        "rope_parameters",
        "rms_norm_eps",
        "head_dim",
        "max_position_embeddings",
        "tie_word_embeddings",
    ):
        assert getattr(ours, key) == getattr(theirs.config, key), key


@pytest.mark.parametrize("tensor", ["rope_freqs.weight", "blk.0.attn_q.bias"])
def test_gguf_contents_that_would_be_lost_are_refused(tmp_path: Path, tensor: str) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, make_tensors(), GGMLQuantizationType.F32, {tensor: np.zeros(8, np.float32)})
    with pytest.raises(ValueError, match=r"scales RoPE|not part of LlamaForCausalLM: blk\.0\.attn_q\.bias"):
        open_source(load_hf_config(path), random_init=False, seed=0)


def test_broken_gguf_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, make_tensors(), GGMLQuantizationType.F32)
    for size in (2, 500, path.stat().st_size - 64):  # in the magic number, the metadata, the last tensor
        short = tmp_path / f"short{size}.gguf"
        short.write_bytes(path.read_bytes()[:size])
        with pytest.raises(ValueError, match=f"{short.name} is not a readable GGUF file"):
            load_hf_config(short)
    (tmp_path / "text.gguf").write_text("no such thing as a model in here")
    with pytest.raises(ValueError, match=r"text\.gguf is not a readable GGUF file"):
        load_hf_config(tmp_path / "text.gguf")


def test_other_gguf_architectures_are_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "other.gguf", "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="GGUF architecture 'gpt2' is not supported; supported: llama"):
        load_hf_config(tmp_path / "other.gguf")
