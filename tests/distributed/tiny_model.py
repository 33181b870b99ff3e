"""A tiny Llama on disk, a batch with very uneven masks, and what ranks of any layout make of them.

What runs on the ranks is here, because functions sent to the pool have to be importable by it.
"""

from pathlib import Path
from typing import Any

import torch

from megatron_ext.config import Config
from megatron_ext.data import MicroBatch

VOCAB_SIZE = 250  # no multiple of anything, so padding differs between layouts
SEQ_LENGTH = 32
LR = 1e-3


def write_tiny_llama(directory: Path, *, tied: bool = False, heads: int = 4, groups: int = 2, layers: int = 4) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16 * heads,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():  # norms of 1 would hide a missing gradient reduction
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    return directory


def make_batch(seed: int, rows: int = 8) -> dict[str, torch.Tensor]:
    """Rows of very uneven length and mask: one token, none, fractional weights, holes."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, VOCAB_SIZE, (rows, SEQ_LENGTH), generator=generator)
    labels = torch.randint(0, VOCAB_SIZE, (rows, SEQ_LENGTH), generator=generator)
    mask = (torch.rand(rows, SEQ_LENGTH, generator=generator) < 0.6).float()
    mask[0] = 0.0
    mask[1] = 0.0
    mask[1, 5] = 1.0
    mask[2] = 1.0
    mask[3] *= torch.rand(SEQ_LENGTH, generator=generator)
    lengths = torch.full((rows,), SEQ_LENGTH)
    lengths[4], lengths[5] = 9, 1
    for row, length in enumerate(lengths.tolist()):
        mask[row, length:] = 0.0
        input_ids[row, length:] = 0
        labels[row, length:] = 0
    return {"input_ids": input_ids, "labels": labels, "loss_mask": mask, "lengths": lengths}


def make_config(directory: Path, micro_batch_size: int = 2, /, **sections: dict[str, Any]) -> Config:
    values: dict[str, dict[str, Any]] = {
        "model": {"hf_path": str(directory), "make_vocab_size_divisible_by": 8},
        "data": {"seq_length": SEQ_LENGTH},
        "training": {"train_iters": 10, "global_batch_size": 8, "micro_batch_size": micro_batch_size, "device": "cpu"},
        "optimizer": {"lr": LR, "lr_decay_style": "constant", "clip_grad": 0.5, "adam_beta2": 0.95},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Config.from_dict(values)


def split_batch(batch: dict[str, torch.Tensor], dp_rank: int, dp_size: int, micro_batch_size: int) -> list[MicroBatch]:
    rows = batch["input_ids"].size(0) // dp_size
    own = range(dp_rank * rows, (dp_rank + 1) * rows)
    return [
        MicroBatch(
            input_ids=batch["input_ids"][first : first + micro_batch_size],
            labels=batch["labels"][first : first + micro_batch_size],
            loss_mask=batch["loss_mask"][first : first + micro_batch_size],
            position_ids=torch.arange(SEQ_LENGTH).repeat(micro_batch_size, 1),
            lengths=batch["lengths"][first : first + micro_batch_size],
            sample_ids=torch.arange(first, first + micro_batch_size),
        )
        for first in own[::micro_batch_size]
    ]


class Run:
    """A model with its wrapper and optimizer on one rank."""

    def __init__(self, config: Config) -> None:
        from megatron_ext import platform
        from megatron_ext.losses import LossHead, VocabShard
        from megatron_ext.model_wrapper import MegatronModelWrapper
        from megatron_ext.models.factory import build_model
        from megatron_ext.models.hf_config import check_model_layout, load_hf_config
        from megatron_ext.models.sources import open_source
        from megatron_ext.models.weights import load_hf_weights
        from megatron_ext.optimizer import build_optimizer, build_scheduler
        from megatron_ext.parallel import create_context

        self.config = config
        self.parallel = create_context(config, platform.setup("cpu"))
        self.hf = load_hf_config(config.model.hf_path)
        check_model_layout(self.hf, config)
        self.chunks = build_model(self.hf, config, self.parallel)
        load_hf_weights(self.chunks, self.hf, open_source(self.hf, config.model.random_init, 1), self.parallel)
        self.optimizer = build_optimizer(config, self.chunks, self.parallel)
        self.scheduler = build_scheduler(config, self.optimizer)
        self.wrapper = MegatronModelWrapper(
            self.chunks,
            config,
            losses=LossHead.from_config(config, VocabShard(self.parallel.pg.tp, self.hf.vocab_size)),
            parallel=self.parallel,
            optimizer=self.optimizer,
        )

    def split(self, batch: dict[str, torch.Tensor]) -> list[MicroBatch]:
        p = self.parallel
        return split_batch(batch, p.dp_rank, p.dp_size, self.config.training.micro_batch_size)

    def step(self, batch: dict[str, torch.Tensor]) -> dict[str, float]:
        self.wrapper.zero_grad()
        result = self.wrapper.forward_backward_mini_batch(self.split(batch), return_per_token_outputs=False)
        self.optimizer.step()
        return dict(result.metrics)

    def gradients(self) -> dict[str, torch.Tensor]:
        """This rank's gradients by the parameter's name in the whole model."""
        from megatron_ext.models.weights import local_parameters

        if self.config.optimizer.use_distributed_optimizer:
            self._gather_gradients()
        return {name: parameter.main_grad.clone() for name, parameter in local_parameters(self.chunks).items()}

    def _gather_gradients(self) -> None:
        """Each data-parallel rank holds the reduced gradient of its own part of every bucket only."""
        import torch.distributed as dist

        group = self.parallel.pg.dp_cp
        for chunk in self.chunks:
            for buffer in chunk.buffers:
                for bucket in buffer.buckets:
                    parts = list(bucket.grad_data.chunk(group.size()))
                    dist.all_gather(parts, parts[group.rank()].clone(), group=group)

    def parameters(self) -> dict[str, torch.Tensor]:
        from megatron_ext.models.factory import finish_parameter_gathers
        from megatron_ext.models.weights import local_parameters

        finish_parameter_gathers(self.chunks)
        return {name: parameter.detach().clone() for name, parameter in local_parameters(self.chunks).items()}


def train_on_ranks(config: Config, batches: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Losses of every step, gradients of the first, parameters after the last."""
    run = Run(config)
    run.wrapper.zero_grad()
    first = run.wrapper.forward_backward_mini_batch(run.split(batches[0]), return_per_token_outputs=False)
    gradients = run.gradients()
    losses = [run.step(batch)["loss"] for batch in batches]
    return {
        "metrics": dict(first.metrics),
        "losses": losses,
        "gradients": gradients,
        "parameters": run.parameters(),
        "tp_rank": run.parallel.tp_rank,
        "pp_rank": run.parallel.pp_rank,
    }


def assemble(results: list[dict[str, Any]], key: str, model: Path) -> dict[str, torch.Tensor]:
    """The ranks' shards as one dict by Hugging Face name, every replica checked to hold the same."""
    from megatron_ext.models.families.base import EMBEDDING, OUTPUT_LAYER
    from megatron_ext.models.hf_config import load_hf_config

    hf = load_hf_config(model)
    shards: dict[str, dict[int, torch.Tensor]] = {}
    for result in results:
        for name, shard in result[key].items():
            known = shards.setdefault(name, {}).setdefault(result["tp_rank"], shard)
            torch.testing.assert_close(shard, known, rtol=0, atol=0, msg=f"replicas differ in {key} of {name}")
    whole: dict[str, torch.Tensor] = {}
    for name, weight in hf.weights().items():
        if name == OUTPUT_LAYER and hf.tied:
            if name in shards:  # the last stage's copy of the embedding
                for tp_rank, shard in shards[name].items():
                    torch.testing.assert_close(shard, shards[EMBEDDING][tp_rank], rtol=0, atol=0)
            continue
        by_rank = shards[name]
        merged = weight.rule.merge([by_rank[rank] for rank in sorted(by_rank)], hf)
        whole.update(zip(weight.hf, merged, strict=True))
    return whole
