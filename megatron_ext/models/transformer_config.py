"""Translates a model's config and the run's config into Megatron-Core's TransformerConfig. Owns every
setting of it; the hooks that a training step installs later (gradient scaling, no_sync, finalize) belong to
the model wrapper.
"""

import importlib.util

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ext.config import Config
from megatron_ext.models.families.base import HFConfig
from megatron_ext.platform import Platform


def padded_vocab_size(hf: HFConfig, config: Config) -> int:
    """The vocabulary rounded up to a multiple of make_vocab_size_divisible_by x TP (Megatron's rule)."""
    multiple = config.model.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
    return -(-hf.vocab_size // multiple) * multiple


def uses_transformer_engine(config: Config, platform: Platform) -> bool:
    """Whether layers are Transformer Engine's.

    Raises:
        ValueError: they were asked for and cannot be used here.
    """
    wanted = config.model.transformer_impl
    if wanted == "transformer_engine" and not platform.has_transformer_engine:
        reason = "on a CPU" if platform.device_type == "cpu" else "here: it is not installed, or broken"
        raise ValueError(f"transformer_impl transformer_engine cannot be used {reason}; use auto or torch")
    return wanted != "torch" and platform.has_transformer_engine


def build_transformer_config(hf: HFConfig, config: Config, platform: Platform) -> TransformerConfig:
    """The TransformerConfig of the model under this run's layout, precision and device."""
    dtype = torch.bfloat16 if config.training.bf16 else torch.float32
    return TransformerConfig(
        **_sizes(hf),
        **hf.family.transformer_fields(hf),
        **_parallelism(config),
        **_fusions(config, platform),
        **_recomputation(config),
        attention_dropout=config.model.attention_dropout,
        hidden_dropout=config.model.hidden_dropout,
        bf16=config.training.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # every weight is assigned from a source, so initial values would be computed for nothing
        perform_initialization=False,
        use_cpu_initialization=platform.device_type == "cpu",
        # losses are normalised by the global token count, in one place, not per micro-batch by the schedule
        calculate_per_token_loss=True,
        # all micro-batches of a step have one length
        variable_seq_lengths=False,
        deallocate_pipeline_outputs=True,
    )


def _sizes(hf: HFConfig) -> dict:
    return {
        "num_layers": hf.num_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.ffn_hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_query_groups,
        "kv_channels": hf.head_dim,
        "layernorm_epsilon": hf.layernorm_epsilon,
        "init_method_std": hf.initializer_range,
    }


def _parallelism(config: Config) -> dict:
    parallel = config.parallel
    interleaved = parallel.virtual_pipeline_model_parallel_size is not None
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "sequence_parallel": parallel.sequence_parallel,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline_model_parallel_size,
        "num_layers_in_first_pipeline_stage": parallel.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": parallel.num_layers_in_last_pipeline_stage,
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        # Batched p2p mixes up two chunks' messages between the same two ranks (PP 2, Megatron-Core 0.19.2).
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def _fusions(config: Config, platform: Platform) -> dict:
    """Fused kernels, where the packages and the device for them are there."""
    on_gpu = platform.device_type == "cuda"
    has_fused_wgrad = on_gpu and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    return {
        # The output layer is Megatron-Core's own linear layer, which needs Apex's kernel for this.
        "gradient_accumulation_fusion": has_fused_wgrad,
        "bias_activation_fusion": on_gpu,
        "bias_dropout_fusion": on_gpu,
        "apply_rope_fusion": uses_transformer_engine(config, platform),
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "tp_comm_overlap": False,
        "cuda_graph_modules": [],  # no CUDA graphs; the default means the same, and warns
    }


def _recomputation(config: Config) -> dict:
    model = config.model
    return {
        "recompute_granularity": model.recompute_granularity,
        "recompute_method": model.recompute_method,
        "recompute_num_layers": model.recompute_num_layers,
        "recompute_modules": None if model.recompute_modules is None else list(model.recompute_modules),
        "distribute_saved_activations": model.distribute_saved_activations,
    }
