"""Fine-tune a model: `torchrun --nproc-per-node N pretrain_sft.py --config FILE.yaml [--any-setting VALUE ...]`.
With `--eval-only` measure it instead.

Every setting is a flag too; `--help` lists them all. Mistakes in the configuration, the files or the layout end the
run before any rank waits for another, with one sentence and exit code 2.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable

from megatron_ext.config import Config, config_to_yaml, parse_command_line

SECONDS_FOR_THE_FIRST_RANK = 10.0


def _prepare(config: Config) -> Callable[[], int]:
    """Find every mistake that one process alone can find; returns the run itself, which returns the exit code."""
    from megatron_ext import platform

    platform.set_layout_variables(config)
    chosen = platform.setup(config.training.device)
    # these import megatron.core, so only after the platform is set up
    from megatron_ext.eval_run import EvaluationRun
    from megatron_ext.parallel import is_main_from_environment, parallel_session, world_size_from_environment
    from megatron_ext.preparation import prepare
    from megatron_ext.run_folder import check_save, folders_written_to
    from megatron_ext.run_lock import RunLock
    from megatron_ext.trainer import Trainer

    is_main = is_main_from_environment()
    prepared = prepare(config, world_size=world_size_from_environment(), makes_folders=is_main)
    lock = contextlib.nullcontext()
    if is_main:
        with contextlib.ExitStack() as stack:
            stack.enter_context(RunLock(folders_written_to(config)).acquire())
            if not config.evaluation.eval_only:
                check_save(config)  # once more: the run that held the folder until a moment ago may have written to it
            lock = stack.pop_all()

    def run() -> int:
        # the lock inside: a failed session ends the process on its way out
        with parallel_session(config, chosen) as parallel, lock:
            parts = (config, prepared.hf, prepared.source, prepared.data, parallel, prepared.teacher)
            if config.evaluation.eval_only:
                return EvaluationRun(*parts).run()
            Trainer(*parts).train()
            return 0

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
    return run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
