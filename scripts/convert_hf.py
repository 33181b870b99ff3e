"""Writes a checkpoint of a run as a Hugging Face directory that transformers loads.

    python scripts/convert_hf.py --config runs/my_run/config.yaml --load runs/my_run --save-hf exported/

Takes the settings of pretrain_sft.py. One process holds the whole model; start it with torchrun and a layout for models
that do not fit (`torchrun --nproc-per-node 4 scripts/convert_hf.py ... --tensor-model-parallel-size 4`).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout that is not installed

from megatron_ext.config import Config, load_config

# Checkpoints load under any layout; by default one process takes the whole model, whatever layout trained it.
ONE_RANK = [
    *("--tensor-model-parallel-size", "1", "--context-parallel-size", "1", "--no-sequence-parallel"),
    *("--pipeline-model-parallel-size", "1", "--virtual-pipeline-model-parallel-size", "none"),
    *("--num-layers-in-first-pipeline-stage", "none", "--num-layers-in-last-pipeline-stage", "none"),
    *("--no-use-distributed-optimizer", "--no-overlap-grad-reduce", "--no-overlap-param-gather"),
    *("--no-load-optim", "false", "--no-save-optim", "false", "--finetune"),
    *("--save", "none", "--save-interval", "none"),
]


def convert(config: Config) -> None:
    """Load the newest checkpoint of `checkpoint.load` and export it to `checkpoint.save_hf`."""
    from megatron_ext import platform

    chosen = platform.setup(config.training.device)
    from megatron_ext.checkpoint import Checkpointer
    from megatron_ext.models.export import check_export_directory, export_hf
    from megatron_ext.models.factory import build_model
    from megatron_ext.models.hf_config import check_model_layout, load_hf_config
    from megatron_ext.parallel import parallel_session
    from megatron_ext.run_folder import check_load

    hf = load_hf_config(config.model.hf_path)
    check_model_layout(hf, config)
    check_load(config, hf)
    check_export_directory(config.checkpoint.save_hf)
    with parallel_session(config, chosen) as parallel:
        chunks = build_model(hf, config, parallel, wrap_with_ddp=False)
        iteration = Checkpointer(config, hf, parallel).load_weights(chunks)
        target = config.checkpoint.save_hf
        export_hf(chunks, hf, target, parallel, config.tokenizer_path, chat_template=config.model.chat_template)
        if parallel.is_main:
            print(f"wrote iteration {iteration} of {config.checkpoint.load} to {target}")


def main(arguments: list[str]) -> int:
    try:
        config = load_config([*ONE_RANK, *arguments])
        for name in ("load", "save_hf"):
            if getattr(config.checkpoint, name) is None:
                raise ValueError(f"checkpoint.{name} is not set; give it with --{name.replace('_', '-')}")
        convert(config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":  # loading may spawn processes, which import this file again
    sys.exit(main(sys.argv[1:]))
