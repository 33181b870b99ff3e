"""Import, forward and export under every kind of layout, against transformers' dense model in one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankPool
from safetensors.torch import load_file
from tiny_model import make_config, write_tiny_llama

from megatron_ext.config import Config

IDS = torch.randint(0, 250, (2, 16), generator=torch.Generator().manual_seed(4))


def forward_logits(chunks: list, hf: Any, parallel: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """Logits [b, s, vocab] on the last stage: chunk after chunk, stage after stage, without a schedule."""
    import torch.distributed as dist

    from megatron_ext.models.factory import unwrap_model

    batch, length = ids.shape
    local_length = length // parallel.tp_size if chunks[0].config.sequence_parallel else length
    dtype = chunks[0].config.params_dtype
    positions = torch.arange(length).expand(batch, -1)
    output = None
    for chunk_index, chunk in enumerate(chunks):
        for stage in range(parallel.pp_size):
            if stage != parallel.pp_rank:
                continue
            if (chunk_index, stage) != (0, 0):
                hidden = torch.empty(local_length, batch, hf.hidden_size, dtype=dtype)
                dist.recv(hidden, group=parallel.pg.pp, group_src=(stage - 1) % parallel.pp_size)
                unwrap_model(chunk).set_input_tensor(hidden)
            output = chunk(ids, positions, None)
            if (chunk_index, stage) != (len(chunks) - 1, parallel.pp_size - 1):
                dist.send(output.contiguous(), group=parallel.pg.pp, group_dst=(stage + 1) % parallel.pp_size)
    if not parallel.is_last_stage:
        return None
    parts = [torch.empty_like(output) for _ in range(parallel.tp_size)]
    dist.all_gather(parts, output.contiguous(), group=parallel.pg.tp)
    return torch.cat(parts, dim=-1)[..., : hf.vocab_size]


def import_on_ranks(config: Config, ids: torch.Tensor | None, export_to: Path | None, **export: Any) -> Any:
    """Build and load; returns the logits where they are, and exports if asked."""
    from megatron_ext import platform
    from megatron_ext.models import (
        build_model,
        check_model_layout,
        export_hf,
        load_hf_config,
        load_initial_weights,
    )
    from megatron_ext.parallel import create_context

    parallel = create_context(config, platform.setup("cpu"))
    hf = load_hf_config(config.model.hf_path)
    check_model_layout(hf, config)
    chunks = build_model(hf, config, parallel)
    load_initial_weights(chunks, hf, config, parallel)
    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        logits = None if ids is None else forward_logits(chunks, hf, parallel, ids)
    if export_to is not None:
        export_hf(chunks, hf, export_to, parallel, config.tokenizer_path, **export)
    return logits


def refusal(config: Config, export_to: Path | None, **export: Any) -> str:
    """What `import_on_ranks` raises; raised there, it would cost the pool its ranks."""
    try:
        import_on_ranks(config, None, export_to, **export)
    except (ValueError, OSError) as error:
        return str(error)
    return "no error"


@torch.no_grad()
def dense_logits(tensors: dict[str, torch.Tensor], directory: Path, ids: torch.Tensor) -> torch.Tensor:
    """Logits of transformers' model with these weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig.from_pretrained(directory)).eval()
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model(ids).logits


def assert_same_tensors(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    exported: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        exported |= load_file(file)
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        assert exported[name].dtype == tensor.dtype
        assert torch.equal(exported[name], tensor), name


LAYOUTS = {
    "one rank": (1, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "TP2 SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "PP2 uneven": (2, {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1}),
    "PP2 VPP2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "PP4": (4, {"pipeline_model_parallel_size": 4}),
    "TP2 PP2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "DP2": (2, {}),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_transformers_and_the_export_is_exact(
    ranks: RankPool, tmp_path: Path, layout: str, tied: bool
) -> None:
    world_size, parallel = LAYOUTS[layout]
    model = write_tiny_llama(tmp_path / "model", tied=tied)
    original = load_file(model / "model.safetensors")
    config = make_config(model, parallel=parallel)
    results = ranks.run(world_size, import_on_ranks, config, IDS, tmp_path / "exported")
    expected = dense_logits(original, model, IDS)
    compared = [logits for logits in results if logits is not None]
    assert compared
    for logits in compared:
        assert (logits - expected).abs().max() <= 1e-5
    assert_same_tensors(tmp_path / "exported", original)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "exported",
        "model",
    ]  # no temporary directory left


def test_three_way_tensor_parallelism(ranks: RankPool, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", tied=True, heads=9, groups=3)
    config = make_config(model, parallel={"tensor_model_parallel_size": 3})
    results = ranks.run(3, import_on_ranks, config, IDS, tmp_path / "exported")
    original = load_file(model / "model.safetensors")
    assert (results[0] - dense_logits(original, model, IDS)).abs().max() <= 1e-5
    assert_same_tensors(tmp_path / "exported", original)


def test_distributed_optimizer_and_overlap_do_not_change_the_weights(ranks: RankPool, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    config = make_config(
        model,
        parallel={"pipeline_model_parallel_size": 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
        optimizer={"use_distributed_optimizer": True},
    )
    ranks.run(4, import_on_ranks, config, None, tmp_path / "exported")
    assert_same_tensors(tmp_path / "exported", load_file(model / "model.safetensors"))


def test_bf16_is_imported_and_exported_as_bf16(ranks: RankPool, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    config = make_config(model, parallel={"tensor_model_parallel_size": 2}, training={"bf16": True})
    ranks.run(2, import_on_ranks, config, None, tmp_path / "exported")
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(model / "model.safetensors").items()}
    assert_same_tensors(tmp_path / "exported", rounded)
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["dtype"] == "bfloat16"


def test_transformers_loads_an_export_in_several_files(ranks: RankPool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = write_tiny_llama(tmp_path / "model", tied=True)
    exported = tmp_path / "exported"
    config = make_config(model, parallel={"pipeline_model_parallel_size": 2})
    ranks.run(2, export_in_parts, config, exported)
    assert len(list(exported.glob("model-*-of-*.safetensors"))) > 2
    loaded, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert loaded.dtype == torch.float32
    original = load_file(model / "model.safetensors")
    original["lm_head.weight"] = original["model.embed_tokens.weight"]
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, original[name]), name
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def export_in_parts(config: Config, export_to: Path) -> None:
    import_on_ranks(config, None, export_to, max_shard_bytes=100_000)


def test_random_weights_are_the_same_under_every_layout(ranks: RankPool, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    (model / "model.safetensors").unlink()
    exported = []
    for name, parallel in (
        ("one", {}),
        ("tp", {"tensor_model_parallel_size": 2}),
        ("pp", {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    ):
        values = make_config(model / "config.json", parallel=parallel).to_dict()
        values["model"]["random_init"] = True
        config = Config.from_dict(values)
        ranks.run(1 if name == "one" else 2, import_on_ranks, config, None, tmp_path / name)
        exported.append(load_file(tmp_path / name / "model.safetensors"))
    for other in exported[1:]:
        assert other.keys() == exported[0].keys()
        assert all(torch.equal(tensor, exported[0][name]) for name, tensor in other.items())
    assert 0.09 < exported[0]["model.embed_tokens.weight"].std() < 0.11  # initializer_range


def test_an_existing_export_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", layers=2)
    ranks.run(2, import_on_ranks, make_config(model), None, tmp_path / "exported")
    errors = ranks.run(2, refusal, make_config(model), tmp_path / "exported")
    assert all("exists and is not an empty directory" in error for error in errors)


def test_a_failed_export_leaves_nothing(ranks: RankPool, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", layers=2)
    (error,) = ranks.run(1, refuse_template, make_config(model), tmp_path / "exported")
    assert "absent.jinja" in error
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def refuse_template(config: Config, export_to: Path) -> str:
    return refusal(config, export_to, chat_template="absent.jinja")


def test_a_tied_model_with_another_output_layer_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = write_tiny_llama(tmp_path / "model", tied=True, layers=2)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors")
    ranks.run(1, import_on_ranks, make_config(model), None, None)  # an equal copy is fine
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, model / "model.safetensors")
    (error,) = ranks.run(1, refusal, make_config(model), None)
    assert "tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight" in error
