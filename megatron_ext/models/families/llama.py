"""The Llama family (Llama 2 and 3.x, SmolLM2, others of architecture LlamaForCausalLM): its table, both
ways.
"""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from megatron_ext.models.families.base import Family, GGUFTable, HFConfig
from megatron_ext.models.mapping import GatedMLP, GroupedQKV, Replicated, Sharded, VocabRows

_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."

RULES = (
    VocabRows("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Replicated(_LAYER + "input_layernorm.weight", (_HF_LAYER + "input_layernorm.weight",), ("hidden_size",)),
    GroupedQKV(
        _LAYER + "self_attention.linear_qkv.weight",
        tuple(_HF_LAYER + f"self_attn.{part}_proj.weight" for part in "qkv"),
    ),
    Sharded(
        _LAYER + "self_attention.linear_proj.weight",
        (_HF_LAYER + "self_attn.o_proj.weight",),
        ("hidden_size", "q_size"),
        dim=1,
    ),
    Replicated(
        _LAYER + "pre_mlp_layernorm.weight",
        (_HF_LAYER + "post_attention_layernorm.weight",),
        ("hidden_size",),
    ),
    GatedMLP(
        _LAYER + "mlp.linear_fc1.weight",
        (_HF_LAYER + "mlp.gate_proj.weight", _HF_LAYER + "mlp.up_proj.weight"),
    ),
    Sharded(
        _LAYER + "mlp.linear_fc2.weight",
        (_HF_LAYER + "mlp.down_proj.weight",),
        ("hidden_size", "ffn_hidden_size"),
        dim=1,
    ),
    Replicated("decoder.final_layernorm.weight", ("model.norm.weight",), ("hidden_size",)),
    VocabRows("output_layer.weight", ("lm_head.weight",)),
)

DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}

GGUF = GGUFTable(
    architecture="llama",
    fields={
        "context_length": "max_position_embeddings",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "embedding_length": "hidden_size",
        "rope.dimension_count": "head_dim",
        "attention.key_length": "head_dim",
        "rope.freq_base": "rope_theta",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "vocab_size": "vocab_size",
    },
    constants={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "initializer_range": 0.02},
    tensors={
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.{layer}.attn_norm.weight": _HF_LAYER + "input_layernorm.weight",
        "blk.{layer}.attn_q.weight": _HF_LAYER + "self_attn.q_proj.weight",
        "blk.{layer}.attn_k.weight": _HF_LAYER + "self_attn.k_proj.weight",
        "blk.{layer}.attn_v.weight": _HF_LAYER + "self_attn.v_proj.weight",
        "blk.{layer}.attn_output.weight": _HF_LAYER + "self_attn.o_proj.weight",
        "blk.{layer}.ffn_norm.weight": _HF_LAYER + "post_attention_layernorm.weight",
        "blk.{layer}.ffn_gate.weight": _HF_LAYER + "mlp.gate_proj.weight",
        "blk.{layer}.ffn_up.weight": _HF_LAYER + "mlp.up_proj.weight",
        "blk.{layer}.ffn_down.weight": _HF_LAYER + "mlp.down_proj.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    },
    permuted={
        _HF_LAYER + "self_attn.q_proj.weight": "num_attention_heads",
        _HF_LAYER + "self_attn.k_proj.weight": "num_query_groups",
    },
)


def problems(raw: Mapping[str, Any]) -> list[str]:
    """What a Llama config may ask for and this implementation does not have."""
    found = []
    if raw["hidden_act"] not in ("silu", "swish"):
        found.append(f"hidden_act {raw['hidden_act']!r} is not supported; only silu is")
    for bias in ("attention_bias", "mlp_bias"):
        if raw[bias]:
            found.append(f"{bias} true is not supported for Llama models; use a model without these biases")
    return found


def transformer_fields(hf: HFConfig) -> dict[str, Any]:
    """RMSNorm before each block, SwiGLU, no biases."""
    return {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
    }


LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    defaults=DEFAULTS,
    rules=RULES,
    problems=problems,
    transformer_fields=transformer_fields,
    ignored_suffixes=(".rotary_emb.inv_freq",),
    gguf=GGUF,
)
