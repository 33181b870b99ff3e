"""Builds the model: one GPTModel for each chunk of this pipeline rank, in bf16 and under Megatron-Core's
DDP where asked for. The only file that constructs a model; weights are read by `weights`.
"""

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import LayerNormBuilder
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_ext.config import Config
from megatron_ext.models.families.base import HFConfig
from megatron_ext.models.rope import inverse_frequencies
from megatron_ext.models.transformer_config import (
    build_transformer_config,
    padded_vocab_size,
    uses_transformer_engine,
)
from megatron_ext.parallel import ParallelContext
from megatron_ext.platform import setup
from megatron_ext.platform.spec_provider import TorchSpecProvider


def build_model(
    hf: HFConfig,
    config: Config,
    parallel: ParallelContext,
    *,
    wrap_with_ddp: bool = True,
    padded_vocab: int | None = None,
) -> list[MegatronModule]:
    """This rank's model chunks (several only with virtual stages), on its device, weights not yet set.

    Args:
        wrap_with_ddp: False gives bare chunks, for models that are not trained.
        padded_vocab: rows of embedding and output layer over all TP ranks; None for `padded_vocab_size`.
    """
    platform = setup(parallel.device.type)
    transformer_config = build_transformer_config(hf, config, platform)
    provider = TESpecProvider() if uses_transformer_engine(config, platform) else TorchSpecProvider()
    interleaved = config.parallel.virtual_pipeline_model_parallel_size is not None
    chunks: list[MegatronModule] = []
    for chunk_index in range(parallel.vp_size):
        model = GPTModel(
            config=transformer_config,
            transformer_layer_spec=_block_spec(
                transformer_config, provider, parallel, chunk_index if interleaved else None
            ),
            vocab_size=padded_vocab_size(hf, config) if padded_vocab is None else padded_vocab,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=parallel.is_first_stage and chunk_index == 0,
            post_process=parallel.is_last_stage and chunk_index == parallel.vp_size - 1,
            share_embeddings_and_output_weights=hf.tied,
            position_embedding_type="rope",
            rotary_base=hf.rope_parameters["rope_theta"],
            pg_collection=parallel.pg,
            vp_stage=chunk_index if interleaved else None,
        )
        # Megatron-Core knows one fixed RoPE scaling; the model's own frequencies are exact for all of them.
        model.rotary_pos_emb.inv_freq = inverse_frequencies(hf).to(parallel.device)
        for parameter in model.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        model.to(parallel.device)
        chunks.append(Float16Module(transformer_config, model) if config.training.bf16 else model)
    if not wrap_with_ddp:
        return chunks
    return [
        _wrap_with_ddp(chunk, transformer_config, config, parallel, first_chunk=index == 0)
        for index, chunk in enumerate(chunks)
    ]


def unwrap_model(chunk: MegatronModule) -> GPTModel:
    """The GPTModel inside DDP and the bf16 wrapper."""
    while isinstance(chunk, DistributedDataParallel | Float16Module):
        chunk = chunk.module
    return chunk


def finish_parameter_gathers(model_chunks: list[MegatronModule]) -> None:
    """Make the parameters of every rank current; call it before reading them for anything but a forward pass.

    With overlap_param_gather a step's new parameters are otherwise gathered only in the next forward.
    """
    for chunk in model_chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            with torch.no_grad():
                chunk.start_param_sync(force_sync=True)


def _block_spec(
    transformer_config: TransformerConfig,
    provider: BackendSpecProvider,
    parallel: ParallelContext,
    vp_stage: int | None,
) -> TransformerBlockSubmodules:
    num_layers = get_num_layers_to_build(transformer_config, vp_stage=vp_stage, pp_rank=parallel.pp_rank)
    return TransformerBlockSubmodules(
        layer_specs=[_layer_spec(transformer_config, provider)] * num_layers,
        layer_norm=_norm(transformer_config, provider),
    )


def _norm(transformer_config: TransformerConfig, provider: BackendSpecProvider) -> LayerNormBuilder:
    return provider.layer_norm(rms_norm=transformer_config.normalization == "RMSNorm")


def _layer_spec(transformer_config: TransformerConfig, provider: BackendSpecProvider) -> ModuleSpec:
    """A decoder layer of the provider's modules, with norms of its own unless linear layers include them."""
    fused = provider.fuse_layernorm_and_linear()
    norm = IdentityOp if fused else _norm(transformer_config, provider)
    qk_norm = (
        provider.layer_norm(rms_norm=transformer_config.normalization == "RMSNorm", for_qk=True)
        if transformer_config.qk_layernorm
        else IdentityOp
    )
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=(provider.column_parallel_layer_norm_linear() if fused else provider.column_parallel_linear()),
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    # Checkpoints use the fused names, so that one written with either provider is read by both.
    fused_names = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=get_mlp_module_spec_for_backend(backend=provider),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={} if fused else fused_names,
        ),
    )


def _wrap_with_ddp(
    chunk: MegatronModule,
    transformer_config: TransformerConfig,
    config: Config,
    parallel: ParallelContext,
    *,
    first_chunk: bool,
) -> DistributedDataParallel:
    """Megatron-Core's DDP with Megatron's own bucket sizes: one bucket, unless the reduction overlaps the
    backward of the first stage's first chunk, the only place where it is on the critical path.
    """
    overlap = config.parallel.overlap_grad_reduce
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=config.parallel.overlap_param_gather,
        use_distributed_optimizer=config.optimizer.use_distributed_optimizer,
        bucket_size=max(40_000_000, 1_000_000 * parallel.pg.dp_cp.size()) if overlap else None,
        average_in_collective=False,  # the loss is normalised by tokens, not by ranks
        check_for_nan_in_grad=False,
    )
    layout = None
    if ddp_config.use_distributed_optimizer:
        layout = DistributedOptimizer.compute_full_param_layout(
            [parameter for parameter in chunk.parameters() if parameter.requires_grad],
            ddp_config.bucket_size if first_chunk and parallel.is_first_stage else None,
            parallel.pg.intra_dp_cp.size(),
            ddp_config,
            expert_data_parallel_world_size=parallel.pg.intra_expt_dp.size(),
        )
    return DistributedDataParallel(
        config=transformer_config,
        ddp_config=ddp_config,
        module=chunk,
        disable_bucketing=not first_chunk,
        pg_collection=parallel.pg,
        full_param_layout=layout,
    )
