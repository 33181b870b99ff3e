"""Writes a model to a Hugging Face directory that transformers loads: weights gathered from all TP and PP
ranks one tensor at a time, config, generation config and tokenizer. The directory appears complete or not
at all.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from megatron_ext.models.factory import finish_parameter_gathers
from megatron_ext.models.families.base import OUTPUT_LAYER, HFConfig
from megatron_ext.models.mapping import Weight
from megatron_ext.models.weights import local_parameters
from megatron_ext.parallel import ParallelContext, one_for_all

MAX_SHARD_BYTES = 4 * 1024**3

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_export_directory(directory: str | Path) -> None:
    """Check that an export may create `directory`; nothing that exists is ever overwritten.

    Raises:
        ValueError: it is a file, or a directory that is not empty.
    """
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"save_hf {directory} exists and is not an empty directory; name a new one, or remove it")


def export_hf(
    model_chunks: list[MegatronModule],
    hf: HFConfig,
    directory: str | Path,
    parallel: ParallelContext,
    tokenizer_path: str | Path,
    *,
    chat_template: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the model in its own dtype, from global rank 0. All ranks call it, and return when it is there.

    Args:
        tokenizer_path: directory or .gguf file of the tokenizer, whose files go with the model.
        chat_template: jinja file that overrides the tokenizer's template.
        max_shard_bytes: largest weight file, which is also what rank 0 holds in memory at once.

    Raises:
        ValueError: the directory exists and is not empty (on every rank).
    """
    directory = Path(directory)
    _check_on_all_ranks(directory, parallel)
    finish_parameter_gathers(model_chunks)
    # ranks of other replicas have nothing to do while a large model is written, which may take long
    with one_for_all(parallel, "export") as is_mine:
        if parallel.dp_rank == 0 and parallel.cp_rank == 0:
            tensors = _gather_tensors(model_chunks, hf, parallel)
            if is_mine:
                _write_directory(tensors, hf, directory, tokenizer_path, chat_template, max_shard_bytes)
            else:
                for _ in tensors:  # take part in the collectives
                    pass


def _check_on_all_ranks(directory: Path, parallel: ParallelContext) -> None:
    """Rank 0 looks, all ranks raise: another rank may look later, when the directory is already written."""
    problem: list[str | None] = [None]
    if parallel.is_main:
        try:
            check_export_directory(directory)
        except ValueError as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise ValueError(problem[0])


@torch.no_grad()
def _gather_tensors(
    model_chunks: list[MegatronModule], hf: HFConfig, parallel: ParallelContext
) -> Iterator[tuple[str, Tensor]]:
    """Name and full tensor of every weight, on the CPU of global rank 0; elsewhere it yields nothing.

    A collective generator: every rank of the first data-parallel replica must run it to its end.
    """
    parameters = local_parameters(model_chunks)
    dtype = next(iter(parameters.values())).dtype
    held: list[list[str]] = [[] for _ in range(parallel.pp_size)]
    dist.all_gather_object(held, list(parameters), group=parallel.pg.pp)
    for name, weight in hf.weights().items():
        if hf.tied and name == OUTPUT_LAYER:
            continue
        owner = next(stage for stage, names in enumerate(held) if name in names)
        full: tuple[Tensor, ...] = ()
        if parallel.pp_rank == owner:
            full = _merge_shards(parameters[name], weight, hf, parallel)
        if parallel.tp_rank == 0 and owner != 0:
            full = _move_to_first_stage(full, weight, hf, dtype, owner, parallel)
        if parallel.is_main:
            for hf_name, tensor in zip(weight.hf, full, strict=True):
                yield hf_name, tensor.to("cpu", copy=True).contiguous()


def _merge_shards(parameter: Tensor, weight: Weight, hf: HFConfig, parallel: ParallelContext) -> tuple[Tensor, ...]:
    """The full tensors on TP rank 0 of the stage; nothing on its other TP ranks."""
    shards = [parameter.detach()]
    if parallel.tp_size > 1:
        # As bytes, because not every backend gathers every dtype.
        local = parameter.detach().contiguous().view(torch.uint8)
        gathered = [torch.empty_like(local) for _ in range(parallel.tp_size)] if parallel.tp_rank == 0 else None
        dist.gather(local, gathered, group=parallel.pg.tp, group_dst=0)
        if gathered is None:
            return ()
        shards = [shard.view(parameter.dtype) for shard in gathered]
    return weight.rule.merge(shards, hf)


def _move_to_first_stage(
    full: tuple[Tensor, ...],
    weight: Weight,
    hf: HFConfig,
    dtype: torch.dtype,
    owner: int,
    parallel: ParallelContext,
) -> tuple[Tensor, ...]:
    if parallel.pp_rank == owner:
        for tensor in full:
            dist.send(tensor.contiguous(), group=parallel.pg.pp, group_dst=0)
        return ()
    if parallel.pp_rank != 0:
        return ()
    received = tuple(torch.empty(shape, dtype=dtype, device=parallel.device) for shape in weight.rule.shapes(hf))
    for tensor in received:
        dist.recv(tensor, group=parallel.pg.pp, group_src=owner)
    return received


def _write_directory(
    tensors: Iterator[tuple[str, Tensor]],
    hf: HFConfig,
    directory: Path,
    tokenizer_path: str | Path,
    chat_template: str | Path | None,
    max_shard_bytes: int,
) -> None:
    """Write everything beside the target, then rename."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.parent / f".{directory.name}.{os.getpid()}.tmp"
    temporary.mkdir()
    try:
        dtype = _write_weights(tensors, hf, temporary, max_shard_bytes)
        write_json(temporary / "config.json", export_config(hf, dtype))
        write_json(temporary / "generation_config.json", generation_config(hf))
        write_tokenizer(Path(tokenizer_path), temporary, chat_template)
        os.replace(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_weights(
    tensors: Iterator[tuple[str, Tensor]], hf: HFConfig, directory: Path, max_shard_bytes: int
) -> torch.dtype:
    """Stream tensors into files of at most `max_shard_bytes` each, with an index if there are several."""
    plan: list[list[str]] | None = None
    shard: dict[str, Tensor] = {}
    index: dict[str, str] = {}
    dtype = None
    for name, tensor in tensors:
        if plan is None:
            dtype = tensor.dtype
            plan = plan_shards(hf.tensor_shapes(), dtype.itemsize, max_shard_bytes)
            files = [f"model-{number + 1:05}-of-{len(plan):05}.safetensors" for number in range(len(plan))]
            if len(plan) == 1:
                files = ["model.safetensors"]
            waiting = list(zip(files, plan, strict=True))
        shard[name] = tensor
        file, names = waiting[0]
        if len(shard) == len(names):
            assert list(shard) == names, "tensors came in another order than planned"
            save_file(shard, directory / file, metadata={"format": "pt"})
            index.update(dict.fromkeys(names, file))
            shard = {}
            waiting.pop(0)
    assert dtype is not None and not shard and len(index) == len(hf.tensor_shapes())
    if len(set(index.values())) > 1:
        sizes = hf.tensor_shapes()
        total = sum(torch.Size(shape).numel() for shape in sizes.values()) * dtype.itemsize
        write_json(
            directory / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": index},
        )
    return dtype


def plan_shards(shapes: dict[str, tuple[int, ...]], itemsize: int, max_bytes: int) -> list[list[str]]:
    """Consecutive names that fit into `max_bytes` together; a larger tensor gets a file of its own."""
    plan: list[list[str]] = []
    left = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * itemsize
        if not plan or size > left:
            plan.append([])
            left = max_bytes
        plan[-1].append(name)
        left -= size
    return plan


def export_config(hf: HFConfig, dtype: torch.dtype) -> dict:
    """The imported config with the dtype of what is written."""
    raw = {**hf.raw, "architectures": [hf.family.architecture], "dtype": str(dtype).removeprefix("torch.")}
    if "torch_dtype" in raw:  # transformers before 4.56 reads this spelling
        raw["torch_dtype"] = raw["dtype"]
    return raw


def generation_config(hf: HFConfig) -> dict:
    """The generation config beside the imported model, or the one its config implies."""
    if hf.kind == "directory" and (hf.path / "generation_config.json").is_file():
        return json.loads((hf.path / "generation_config.json").read_text(encoding="utf-8"))
    ids = {key: hf.raw[key] for key in _TOKEN_IDS if hf.raw.get(key) is not None}
    return {"_from_model_config": True, **ids}


def write_tokenizer(source: Path, directory: Path, chat_template: str | Path | None = None) -> None:
    """Copy the tokenizer's files from a model directory, or make them from a GGUF file."""
    if source.suffix == ".gguf":
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(directory)
    else:
        for name in _TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
        if (source / "additional_chat_templates").is_dir():
            shutil.copytree(source / "additional_chat_templates", directory / "additional_chat_templates")
    if chat_template is not None:  # transformers prefers this file to any other place of a template
        shutil.copyfile(chat_template, directory / "chat_template.jinja")


def write_json(path: Path, content: dict) -> None:
    """Indented, as transformers writes it."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
