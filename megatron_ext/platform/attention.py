"""Core attention on `torch.nn.functional.scaled_dot_product_attention`, for every device without Transformer Engine.

Owns softmax(QK^T)V and what context parallelism needs around it. Projections and rotary embeddings are Megatron-Core's.
Keys and values of fewer groups than heads are never repeated. Under context parallelism keys and values are gathered in
full, queries stay where they are (in the order that `context_parallel.py` describes).
"""

import math
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from megatron_ext.context_parallel import restore_sequence_order

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


def _refuse_unsupported(config: TransformerConfig) -> None:
    unsupported = {
        "apply_query_key_layer_scaling": config.apply_query_key_layer_scaling,
        "window_size": config.window_size is not None,
        "softmax_type": config.softmax_type != "vanilla",
    }
    for field, refused in unsupported.items():
        if refused:
            raise ValueError(
                f"{field} {getattr(config, field)!r} is not supported by the torch attention; "
                "use --transformer-impl transformer_engine"
            )


class TorchCoreAttention(MegatronModule):
    """Drop-in for Megatron-Core's `DotProductAttention`; the signature is that protocol's.

    Dropout acts on the attention probabilities, in Megatron's model-parallel random stream (each TP rank has other
    heads, so other numbers).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        _refuse_unsupported(config)
        assert pg_collection is not None, "process groups are passed on explicitly"
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale if softmax_scale is not None else config.softmax_scale
        if self.softmax_scale is None:
            self.softmax_scale = 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp
        self.cp_size = pg_collection.cp.size()
        self.cp_rank = pg_collection.cp.rank()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [s, b, heads/tp, d], or [t, heads/tp, d] packed; s and t are this CP rank's share.
            key, value: the same with query groups in place of heads.
            attention_mask: must be None. The causal order is all that right-padded rows need: a real token never
                looks at the padding behind it. Packed rows say where sequences begin in `packed_seq_params`.

        Returns:
            [s, b, heads/tp * d], or [t, heads/tp, d] packed.

        Raises:
            ValueError: a mask or bias tensor was given, or the mask type is not causal or none.
        """
        mask_type = attn_mask_type or self.attn_mask_type
        if attention_mask is not None or attention_bias is not None:
            raise ValueError("attention_mask and attention_bias are not supported by the torch attention; pass None")
        if mask_type not in (*_CAUSAL, AttnMaskType.no_mask):
            raise ValueError(f"attn_mask_type {mask_type} is not supported by the torch attention; use causal")
        causal = mask_type in _CAUSAL
        if self.cp_size > 1:
            # backward is a reduce-scatter: every rank's queries contribute to every key's gradient
            key = gather_from_sequence_parallel_region(key, group=self.cp_group)
            value = gather_from_sequence_parallel_region(value, group=self.cp_group)
        if packed_seq_params is None:
            context = self._attend_sequence(query, key, value, causal)
            return context.flatten(2)
        return self._attend_packed(query, key, value, causal, packed_seq_params)

    def _attend_packed(
        self,
        query: torch.Tensor,  # [t, heads, d]
        key: torch.Tensor,  # [cp * t, groups, d], rank after rank
        value: torch.Tensor,
        causal: bool,
        packed: PackedSeqParams,
    ) -> torch.Tensor:
        starts = packed.cu_seqlens_q_padded if packed.cu_seqlens_q_padded is not None else packed.cu_seqlens_q
        # every rank holds 1/cp of each sequence, so its own boundaries are the global ones divided by cp
        bounds = [start // self.cp_size for start in starts.tolist()]
        by_rank_key = key.unflatten(0, (self.cp_size, -1))  # [cp, t, groups, d]
        by_rank_value = value.unflatten(0, (self.cp_size, -1))
        parts = []
        for start, end in pairwise(bounds):
            if start == end:
                continue
            own = slice(start, end)
            attended = self._attend_sequence(
                query[own].unsqueeze(1),
                by_rank_key[:, own].flatten(0, 1).unsqueeze(1),
                by_rank_value[:, own].flatten(0, 1).unsqueeze(1),
                causal,
            )
            parts.append(attended.squeeze(1))
        if bounds[-1] < query.size(0):  # padding behind the last sequence attends to nothing
            parts.append(query.new_zeros(query.size(0) - bounds[-1], query.size(1), value.size(-1)))
        return torch.cat(parts)

    def _attend_sequence(
        self,
        query: torch.Tensor,  # [s, b, heads, d]
        key: torch.Tensor,  # [cp * s, b, groups, d], rank after rank
        value: torch.Tensor,
        causal: bool,
    ) -> torch.Tensor:  # [s, b, heads, d]
        if self.cp_size == 1:
            return self._attend(query, key, value, is_causal=causal)
        key = restore_sequence_order(key.unflatten(0, (self.cp_size, -1)))
        value = restore_sequence_order(value.unflatten(0, (self.cp_size, -1)))
        if not causal:
            return self._attend(query, key, value)
        chunk = query.size(0) // 2
        parts = []
        for part, index in zip(query.split(chunk), (self.cp_rank, 2 * self.cp_size - 1 - self.cp_rank), strict=True):
            visible = (index + 1) * chunk
            mask = causal_lower_right(chunk, visible)
            parts.append(self._attend(part, key[:visible], value[:visible], attn_mask=mask))
        return torch.cat(parts)

    def _attend(
        self,
        query: torch.Tensor,  # [s, b, heads, d]
        key: torch.Tensor,  # [k, b, groups, d]
        value: torch.Tensor,
        is_causal: bool = False,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:  # [s, b, heads, d]
        dropout = self.dropout if self.training else 0.0

        def attend() -> torch.Tensor:
            return scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attn_mask=attn_mask,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=self.softmax_scale,
                enable_gqa=query.size(2) != key.size(2),
            )

        # under sequence parallelism Megatron-Core forks the stream around the whole block already
        if dropout > 0.0 and not self.config.sequence_parallel:
            with get_cuda_rng_tracker().fork():
                context = attend()
        else:
            context = attend()
        return context.permute(2, 0, 1, 3)
