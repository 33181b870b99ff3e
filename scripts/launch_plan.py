"""Works out how a configuration is started, for the launch scripts: how many ranks on each node, where the run's folder
is, and what has to be added for a job that starts again. It starts nothing.

    python scripts/launch_plan.py --nodes N [--ranks-per-node R] [--rendezvous-port P] [--again] -- \
        ARGUMENTS OF pretrain_sft.py

Prints NAME=VALUE lines: `ranks_per_node`, `run_folder`, and one `argument` for each word to add behind the others. A
mistake in the configuration or its paths, a layout that does not fit, or a port in use ends it with a sentence and exit
code 2: found here, it is said once instead of once on every node.
"""

import argparse
import os
import socket
import sys
from pathlib import Path

from megatron_ext.config import Config, ConfigError, check_files, check_layout, parse_command_line

LATEST = "latest_checkpointed_iteration.txt"  # run_folder.py's, which would bring torch with it


def count_gpus() -> int:
    """The GPUs that a rank on this machine would see."""
    # importing torch takes seconds, so only where there is a driver
    if not Path("/dev/nvidiactl").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def ranks_on_each_node(config: Config, nodes: int, gpus: int) -> int:
    """One rank for each GPU; without GPUs as few as hold the layout, for ranks on a CPU share its cores."""
    if gpus and config.training.device != "cpu":
        return gpus
    return -(-config.model_parallel_size // nodes)


def check_ranks(config: Config, nodes: int, ranks_per_node: int) -> None:
    """`check_layout`, which says how many ranks; with it how they came about, and how to change that.

    Raises:
        ConfigError: the layout does not fit this number of ranks.
    """
    try:
        check_layout(config, nodes * ranks_per_node)
    except ConfigError as error:
        count = f"{nodes} node{'s' if nodes > 1 else ''} x {ranks_per_node} rank{'s' if ranks_per_node > 1 else ''}"
        how = "RANKS_PER_NODE changes the ranks on each node, and Slurm's --nodes their number"
        # one line: what a launcher says at the same time must not come between the parts
        *others, last = error.problems
        raise ConfigError([*others, f"{last} (they would be {count}; {how})"]) from None


def _positive(name: str, text: str, largest: int) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= largest:
        raise ConfigError([f"{name}: {text!r} is not a number from 1 to {largest}; use one, or leave it unset"])
    return int(text)


def check_port(port: int) -> None:
    """Raises ConfigError if something on this machine listens on the port where the nodes are to meet.

    torchrun would say so in a long report, after the other nodes have begun to talk to whatever is listening.
    """
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise ConfigError(
            [f"RENDEZVOUS_PORT: port {port} on {socket.gethostname()} cannot be used ({reason}); set a free one"]
        ) from None


def arguments_of_a_restart(config: Config) -> list[str]:
    """What makes a job that is started again go on from its own checkpoint instead of from where it began.

    Nothing while there is no checkpoint. The flags of the first start that say how to use *its* `load` are undone: they
    would take only the weights again, and begin at iteration 0.
    """
    checkpoint = config.checkpoint
    if checkpoint.save is None or not (Path(checkpoint.save) / LATEST).exists():
        return []
    arguments = ["--load", checkpoint.save]
    if checkpoint.finetune:
        arguments += ["--finetune", "false"]
    if checkpoint.no_load_optim and not checkpoint.no_save_optim:
        arguments += ["--no-load-optim", "false"]
    return arguments


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1, help="machines that take part")
    parser.add_argument("--ranks-per-node", default="", help="instead of one for each GPU, or what the layout needs")
    parser.add_argument("--rendezvous-port", default="", help="where the nodes meet, if this is the first of them")
    parser.add_argument("--again", action="store_true", help="the job ran before, and was cut off")
    parser.add_argument("arguments", nargs="+", help="the command line of pretrain_sft.py, behind --")
    options = parser.parse_args(words)
    try:
        config = parse_command_line(options.arguments).config
        added = arguments_of_a_restart(config) if options.again else []
        if added:
            config = parse_command_line([*options.arguments, *added]).config
        if options.ranks_per_node:
            ranks = _positive("RANKS_PER_NODE", options.ranks_per_node, 1024)
        else:
            ranks = ranks_on_each_node(config, options.nodes, count_gpus())
        check_ranks(config, options.nodes, ranks)
        check_files(config)
        if options.rendezvous_port:
            check_port(_positive("RENDEZVOUS_PORT", options.rendezvous_port, 65535))
    except ValueError as error:  # ConfigError is one
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"ranks_per_node={ranks}")
    print(f"run_folder={Path(config.log_directory).absolute()}")
    for word in added:
        print(f"argument={word}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
