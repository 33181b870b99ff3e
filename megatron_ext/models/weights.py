"""Reads Hugging Face weights into model chunks: every rank reads its own shards, every parameter is
assigned exactly once. Layouts are in `mapping`, names in the family's table; writing is in `export`.
"""

import re
from functools import partial

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ext.config import Config
from megatron_ext.models.factory import unwrap_model
from megatron_ext.models.families.base import EMBEDDING, HFConfig
from megatron_ext.models.mapping import Weight, canonical_name
from megatron_ext.models.sources import TensorSource, check_source, open_source, tied_copies
from megatron_ext.parallel import ParallelContext

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def local_parameters(model_chunks: list[MegatronModule]) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by their names in the whole model: global layer numbers, unfused norms."""
    parameters: dict[str, torch.nn.Parameter] = {}
    for chunk in model_chunks:
        model = unwrap_model(chunk)
        for local_name, parameter in model.named_parameters():
            name = canonical_name(local_name)
            if found := _LAYER.match(name):
                global_layer = model.decoder.layers[int(found[1])].layer_number - 1
                name = f"decoder.layers.{global_layer}.{name[found.end() :]}"
            assert name not in parameters, f"two chunks hold {name}"
            parameters[name] = parameter
    return parameters


def load_initial_weights(
    model_chunks: list[MegatronModule], hf: HFConfig, config: Config, parallel: ParallelContext
) -> None:
    """Fill the model as configured: from the weights at hf_path, or with random ones."""
    source = open_source(hf, config.model.random_init, config.training.seed)
    load_hf_weights(model_chunks, hf, source, parallel)


@torch.no_grad()
def load_hf_weights(
    model_chunks: list[MegatronModule], hf: HFConfig, source: TensorSource, parallel: ParallelContext
) -> None:
    """Fill every parameter of this rank from the source, cast from the stored dtype to the parameter's.

    Call it before an optimizer is built: that one copies the parameters into its fp32 masters.

    Raises:
        ValueError: tensors are missing, unexpected or misshapen, or a second copy of a tied weight differs.
    """
    check_source(hf, source)
    weights = hf.weights()
    for name, parameter in local_parameters(model_chunks).items():
        assert name in weights, f"the table of {hf.family.architecture} has no rule for {name}"
        shard = _read_shard(weights[name], hf, source, parameter.shape[0], parallel)
        assert shard.shape == parameter.shape, f"{name} is {parameter.shape}, its shard {shard.shape}"
        if name == EMBEDDING:
            _check_tied_copies(weights[name], shard, hf, source, parallel)
        parameter.data.copy_(shard)


def _read_shard(
    weight: Weight, hf: HFConfig, source: TensorSource, local_rows: int, parallel: ParallelContext
) -> Tensor:
    reads = [partial(source.read, name) for name in weight.hf]
    return weight.rule.shard(reads, hf, local_rows, parallel.tp_rank, parallel.tp_size)


def _check_tied_copies(
    weight: Weight, embedding: Tensor, hf: HFConfig, source: TensorSource, parallel: ParallelContext
) -> None:
    """Some tied checkpoints store the output layer too; if it differs, config.json is wrong about tying."""
    for name in tied_copies(hf).intersection(source.keys()):
        copy = weight.rule.shard(
            [partial(source.read, name)], hf, embedding.shape[0], parallel.tp_rank, parallel.tp_size
        )
        if not torch.equal(copy, embedding):
            raise ValueError(
                f"{hf.path}: tie_word_embeddings is true, but {name} differs from {weight.hf[0]}; "
                "set tie_word_embeddings to false in config.json if the output layer is a weight of its own"
            )
