"""Megatron-Core's `BackendSpecProvider` in plain torch: what a transformer layer is made of without Transformer Engine.

Linear layers and MLPs are Megatron-Core's own; norms and core attention come from this package.
"""

from functools import partial
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP

from megatron_ext.platform.attention import TorchCoreAttention
from megatron_ext.platform.norm import TorchNorm


class TorchSpecProvider(LocalSpecProvider):
    """Runs on every device, under TP, SP, PP, VPP and CP."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        """One builder for all: it reads the kind of norm from the config."""
        return TorchNorm

    def core_attention(self) -> type:
        """Scaled-dot-product attention of torch, with grouped queries, packing and context parallelism."""
        return TorchCoreAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        """Experts one after the other; grouped GEMMs need Transformer Engine."""
        submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        return partial(SequentialMLP, submodules=submodules)
