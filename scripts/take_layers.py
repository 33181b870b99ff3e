"""Makes a smaller model of some of a model's layers, as a student to distil into.

    python scripts/take_layers.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf --output models/student --every 2

Reads a Hugging Face directory or a .gguf file and writes a Hugging Face directory with embeddings, norms, output layer,
config and tokenizer of the original. Needs no process group.
"""

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout that is not installed

_LAYER = re.compile(r"^(model\.layers\.)(\d+)(\..*)$")


def chosen_layers(num_layers: int, every: int | None, keep: list[int] | None, drop: list[int] | None) -> list[int]:
    """The layers to keep, in order, by the one option that is given.

    Raises:
        ValueError: naming the option, its value and what is possible.
    """
    if every is not None:
        if not 1 <= every <= num_layers:
            raise ValueError(f"--every {every} leaves nothing to choose of {num_layers} layers; use 1 to {num_layers}")
        return list(range(0, num_layers, every))
    option, named = ("--keep", keep) if keep is not None else ("--drop", drop)
    assert named is not None
    in_order = sorted(set(named)) == named and named[0] >= 0 and named[-1] < num_layers
    if not in_order or (option == "--drop" and len(named) == num_layers):
        raise ValueError(
            f"{option} {','.join(map(str, named))} is not a list of ascending layer numbers from 0 to "
            f"{num_layers - 1}, each once, that leaves a layer"
        )
    return named if keep is not None else [layer for layer in range(num_layers) if layer not in named]


def take_layers(model: Path, output: Path, choose: Callable[[int], list[int]]) -> list[int]:
    """Write the smaller model; returns the layers it has, those that `choose` gives for the number there are."""
    from megatron_ext import platform

    platform.setup("cpu")
    import torch
    from safetensors.torch import save_file

    from megatron_ext.models.export import (
        MAX_SHARD_BYTES,
        export_config,
        generation_config,
        plan_shards,
        write_json,
        write_tokenizer,
    )
    from megatron_ext.models.hf_config import hf_config_from_dict, load_hf_config
    from megatron_ext.models.sources import open_source

    hf = load_hf_config(model)
    kept = choose(hf.num_layers)
    source = open_source(hf, random_init=False, seed=0)
    small = hf_config_from_dict({**hf.raw, "num_hidden_layers": len(kept)}, output)
    names = {name: _LAYER.sub(lambda m: f"{m[1]}{kept[int(m[2])]}{m[3]}", name) for name in small.tensor_shapes()}
    dtype = source.read(next(iter(names.values()))).dtype
    plan = plan_shards(small.tensor_shapes(), dtype.itemsize, MAX_SHARD_BYTES)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        index: dict[str, str] = {}
        for number, part in enumerate(plan):
            file = f"model-{number + 1:05}-of-{len(plan):05}.safetensors" if len(plan) > 1 else "model.safetensors"
            tensors = {name: source.read(names[name]).to(dtype).contiguous() for name in part}
            save_file(tensors, temporary / file, metadata={"format": "pt"})
            index |= dict.fromkeys(part, file)
        if len(plan) > 1:
            total = sum(torch.Size(shape).numel() for shape in small.tensor_shapes().values()) * dtype.itemsize
            write_json(
                temporary / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
            )
        write_json(temporary / "config.json", export_config(small, dtype))
        write_json(temporary / "generation_config.json", generation_config(hf))
        write_tokenizer(model, temporary)
        os.replace(temporary, output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return kept


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory or .gguf file")
    parser.add_argument("--output", type=Path, required=True, help="directory to write, which must not exist")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--every", type=int, metavar="N", help="keep layers 0, N, 2N, ...")
    which.add_argument("--keep", type=_numbers, metavar="LAYERS", help="keep these: 0,2,5")
    which.add_argument("--drop", type=_numbers, metavar="LAYERS", help="keep all but these")
    options = parser.parse_args(arguments)
    try:
        if options.output.exists():
            raise ValueError(f"--output {options.output} exists already; give a new directory, or remove it")
        kept = take_layers(
            options.model,
            options.output,
            lambda num_layers: chosen_layers(num_layers, options.every, options.keep, options.drop),
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.output}: {len(kept)} layers ({', '.join(map(str, kept))}) of {options.model}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
