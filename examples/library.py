"""MegatronModelWrapper without the trainer: train two steps and look at one sequence, on any number of ranks.

torchrun --standalone --nproc-per-node 2 examples/library.py --config examples/sft_tiny.yaml
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout that is not installed

from megatron_ext import platform
from megatron_ext.config import load_config

config = load_config(sys.argv[1:] or ["--config", "examples/sft_tiny.yaml"])
chosen = platform.setup(config.training.device)  # before anything imports megatron.core

from megatron_ext.data import TrainLoader, load_run_data  # noqa: E402
from megatron_ext.losses import LossHead, VocabShard  # noqa: E402
from megatron_ext.model_wrapper import MegatronModelWrapper  # noqa: E402
from megatron_ext.models import build_model, load_hf_config, load_initial_weights  # noqa: E402
from megatron_ext.optimizer import build_optimizer  # noqa: E402
from megatron_ext.parallel import parallel_session  # noqa: E402

with parallel_session(config, chosen) as parallel:
    hf = load_hf_config(config.model.hf_path)
    chunks = build_model(hf, config, parallel)  # one per virtual pipeline stage
    load_initial_weights(chunks, hf, config, parallel)
    optimizer = build_optimizer(config, chunks, parallel)
    head = LossHead.from_config(config, VocabShard(parallel.pg.tp, hf.vocab_size))
    wrapper = MegatronModelWrapper(chunks, config, losses=head, parallel=parallel, optimizer=optimizer)

    data = load_run_data(config).for_vocabulary(hf.vocab_size)
    loader = TrainLoader(
        data.train,
        global_batch_size=config.training.global_batch_size,
        micro_batch_size=config.training.micro_batch_size,
        dp_rank=parallel.dp_rank,
        dp_size=parallel.dp_size,
        seed=config.training.seed,
        pad_multiple=config.sequence_multiple,
        seq_length=config.data.seq_length,
        pad_id=data.pad_id,
    )
    for step in range(2):
        wrapper.zero_grad()
        result = wrapper.forward_backward_mini_batch(loader.next_step(), return_per_token_outputs=False)
        optimizer.step()
        if parallel.is_main:
            print(f"step {step}: {dict(result.metrics)}")
    first = wrapper.forward(loader.next_step()).loss_fn_outputs[0]
    if parallel.is_main:
        print("first sequence:", {name: value[:4].tolist() for name, value in first.items()})
