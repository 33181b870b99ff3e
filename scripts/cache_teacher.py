"""Writes what a teacher says about a data set into a store, so that distillation from it needs no teacher in memory.

    python scripts/cache_teacher.py --config distill.yaml --output caches/mine --top-k 64 --temperature 1.0

Takes the settings of pretrain_sft.py: the teacher, the tokenizer, the training file and every evaluation set are those
of the configuration. Start it with torchrun and a layout for teachers that do not fit into one process; training may
have another one. Train from the store with

    pretrain_sft.py --config distill.yaml --teacher-path none --teacher-cache caches/mine

and losses whose top_k and temperature are those of the store.
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout that is not installed

from megatron_ext.config import Config, check_files, check_layout, load_config

# What only training needs is left out, so that the configuration of a distillation run can be given as it is.
NOT_TRAINED = [
    *("--save", "none", "--save-interval", "none", "--save-hf", "none", "--load", "none", "--no-finetune"),
    *("--no-save-optim", "false", "--no-load-optim", "false", "--teacher-cache", "none"),
]


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this script, and the settings that are left."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="All other flags are those of pretrain_sft.py.", allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, required=True, help="directory to write, which must not exist")
    parser.add_argument("--top-k", type=int, help="tokens to keep at each position (default: top_k of the losses)")
    parser.add_argument("--temperature", type=float, help="of the teacher's softmax (default: that of the losses)")
    return parser.parse_known_args(arguments)


def chosen(name: str, given: float | None, config: Config) -> float:
    """A number given on the command line, or the one that all distillation losses agree on."""
    values = {getattr(loss, name) for loss in config.distillation_losses.values()}
    if given is None:
        if len(values) != 1 or None in values:
            raise ValueError(
                f"--{name.replace('_', '-')} is not given and the losses do not name one number "
                f"({', '.join(map(str, values)) or 'there are no distillation losses'}); give it"
            )
        (given,) = values
    if not given > 0 or given == float("inf"):
        raise ValueError(f"--{name.replace('_', '-')} {given} is not positive; use a number above 0")
    return given


def cache(config: Config, options: argparse.Namespace) -> None:
    """Check everything, then run every sample of every data set through the teacher."""
    from megatron_ext import platform

    device = platform.setup(config.training.device)
    from megatron_ext.cache_run import fill_cache
    from megatron_ext.data import load_run_data
    from megatron_ext.models.hf_config import load_hf_config
    from megatron_ext.parallel import is_main_from_environment, parallel_session, world_size_from_environment
    from megatron_ext.run_folder import teacher_settings
    from megatron_ext.teacher import Teacher, plan_teacher
    from megatron_ext.teacher_cache import CacheWriter, StoreFacts, check_new_store

    check_layout(config, world_size_from_environment())
    check_files(config)
    plan = plan_teacher(config, load_hf_config(config.model.hf_path))
    if plan is None:
        raise ValueError("teacher.teacher_path is not set; give the teacher that is to be asked")
    top_k, temperature = chosen("top_k", options.top_k, config), chosen("temperature", options.temperature, config)
    if top_k > plan.vocab_size:
        raise ValueError(f"--top-k {top_k} is larger than the vocabulary of {plan.vocab_size}; use less")
    check_new_store(options.output)
    data = load_run_data(config).for_vocabulary(plan.vocab_size)
    facts = StoreFacts(int(top_k), float(temperature), plan.vocab_size, plan.hf.vocab_size, teacher_settings(config))
    writer = CacheWriter(options.output, facts, data.named())

    def say(text: str) -> None:
        if is_main_from_environment():
            print(text, flush=True)

    with parallel_session(config, device) as parallel:
        started = time.perf_counter()
        fill_cache(writer, Teacher(plan, parallel), data, config, parallel, say)
        size = sum(file.stat().st_size for file in options.output.iterdir()) / 1e6
        say(
            f"wrote {options.output}: top {top_k} at temperature {temperature} of {writer.num_tokens} tokens, "
            f"{size:.1f} MB, in {time.perf_counter() - started:.0f} s"
        )


def main(arguments: list[str]) -> int:
    options, settings = parse_arguments(arguments)
    try:
        cache(load_config([*settings, *NOT_TRAINED]), options)
    except ValueError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":  # loading may spawn processes, which import this file again
    sys.exit(main(sys.argv[1:]))
