"""What a model family is: the facts read from its Hugging Face config, and one table that says how they and
the weights appear in Megatron-Core. Reading files belongs to `hf_config`, the rule kinds to `mapping`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megatron_ext.models.mapping import Rule, Weight, expand

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"


@dataclass(frozen=True)
class GGUFTable:
    """How llama.cpp names a family's config fields and tensors.

    Attributes:
        architecture: value of `general.architecture`; also the prefix of the metadata keys.
        fields: metadata key without the prefix -> config.json key; later keys win over earlier ones.
        constants: config.json entries that GGUF metadata does not carry.
        tensors: GGUF tensor name -> Hugging Face name, both with `{layer}`.
        permuted: Hugging Face name -> name of the HFConfig field with its head count, for matrices whose rows
            llama.cpp stores in interleaved-RoPE order.
    """

    architecture: str
    fields: Mapping[str, str]
    constants: Mapping[str, Any]
    tensors: Mapping[str, str]
    permuted: Mapping[str, str]


@dataclass(frozen=True)
class Family:
    """One architecture's table, used for import and export alike.

    Attributes:
        architecture: value of `architectures[0]` in config.json.
        defaults: config.json entries that may be left out, with the architecture's own defaults.
        rules: every weight, in the order in which an export writes them; names may contain `{layer}`.
        problems: raw config -> what this implementation cannot represent, one sentence each.
        transformer_fields: TransformerConfig fields that are not plain sizes.
        ignored_suffixes: endings of stored tensors that are not weights (caches of old checkpoints).
    """

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    rules: tuple[Rule, ...]
    problems: Callable[[Mapping[str, Any]], list[str]]
    transformer_fields: Callable[["HFConfig"], dict[str, Any]]
    ignored_suffixes: tuple[str, ...] = ()
    gguf: GGUFTable | None = None


@dataclass(frozen=True)
class HFConfig:
    """A Hugging Face model config, checked and in Megatron's names.

    Attributes:
        raw: the config as in config.json (read-only by convention).
        path: what the user named: a model directory, a config.json or a .gguf file.
        kind: which of these it is.
        rope_parameters: at least `rope_type` and `rope_theta`, whichever spelling the file uses.
    """

    raw: Mapping[str, Any] = field(repr=False)
    path: Path
    kind: Literal["directory", "config", "gguf"]
    family: Family = field(repr=False)
    vocab_size: int
    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    tied: bool
    layernorm_epsilon: float
    max_position_embeddings: int
    initializer_range: float
    rope_parameters: Mapping[str, Any]

    @property
    def q_size(self) -> int:
        """Rows of the query projection."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key (or the value) projection."""
        return self.num_query_groups * self.head_dim

    def weights(self) -> dict[str, Weight]:
        """Every parameter by its name in a GPTModel of the whole model, in the order of an export.

        With tied embeddings the output layer (a parameter only on a last stage that is not the first)
        holds the embedding's tensor.
        """
        weights = {weight.megatron: weight for weight in expand(self.family.rules, self.num_layers)}
        if self.tied:
            weights[OUTPUT_LAYER] = replace(weights[OUTPUT_LAYER], hf=weights[EMBEDDING].hf)
        return weights

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and full shape of every Hugging Face tensor, tied ones once, in the order of an export."""
        return {
            name: shape
            for weight in self.weights().values()
            for name, shape in zip(weight.hf, weight.rule.shapes(self), strict=True)
        }
