"""Fine-tune a model: `torchrun --nproc-per-node N pretrain_sft.py --config FILE.yaml [--any-setting VALUE ...]`.

Every setting is a flag too; `--help` lists them all. Mistakes in the configuration, the files or the layout end the
run before any rank waits for another, with one sentence and exit code 2.
"""

import json
import os
import sys
import time
from collections.abc import Callable

from megatron_ext.config import Config, check_files, check_layout, config_to_yaml, parse_command_line

SECONDS_FOR_THE_FIRST_RANK = 10.0


def _prepare(config: Config) -> Callable[[], None]:
    """Find every mistake that one process alone can find; returns the run itself."""
    from megatron_ext import platform

    chosen = platform.setup(config.training.device)
    # these import megatron.core, so only after the platform is set up
    from megatron_ext.data import load_run_data
    from megatron_ext.models.hf_config import check_model_layout, load_hf_config
    from megatron_ext.models.sources import open_source
    from megatron_ext.parallel import is_main_from_environment, parallel_session, world_size_from_environment
    from megatron_ext.run_folder import check_load, check_outputs, check_save
    from megatron_ext.trainer import Trainer

    check_layout(config, world_size_from_environment())
    check_files(config)
    hf = load_hf_config(config.model.hf_path)
    check_model_layout(hf, config)
    check_load(config, hf)
    check_save(config)
    source = open_source(hf, config.model.random_init, config.training.seed)
    data = load_run_data(config).for_vocabulary(hf.vocab_size)
    if is_main_from_environment():
        check_outputs(config)

    def run() -> None:
        with parallel_session(config, chosen) as parallel:
            Trainer(config, hf, source, data, parallel).train()

    return run


def _report(error: ValueError) -> None:
    """Say what is wrong, once for each machine, and leave it for the launcher's own report.

    Every rank finds the same mistake. The others give the first rank of the machine time to speak: a launcher ends all
    ranks as soon as one of them exits. A rank that is not ended by then speaks too, for it may be alone with its error.
    """
    text = f"error: {error}"
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(SECONDS_FOR_THE_FIRST_RANK)
    print(text, file=sys.stderr, flush=True)
    launcher_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if launcher_file:  # torchrun shows its content as the root cause
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with open(launcher_file, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": details}}, file)


def main(arguments: list[str]) -> int:
    try:
        command = parse_command_line(arguments)
        if command.print_config:
            print(config_to_yaml(command.config), end="")
            return 0
        run = _prepare(command.config)
    except ValueError as error:  # ConfigError is one
        _report(error)
        return 2
    run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
