"""A user's mistakes, through the entry point: each ends before any process group starts, with exit code 2, one message
that names the setting or the file and row, and nothing on disk touched.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from toy_run import ROOT, ToyRun, write_toy_model

sys.path.insert(0, str(ROOT))
import pretrain_sft


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    return ToyRun(tmp_path_factory.mktemp("toy"))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def refuse(toy: ToyRun, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run with changed settings under some world size; returns the message."""

    def run(*extra: str, world_size: int = 1, rank: int = 0, **changes) -> str:
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        before = snapshot(toy.folder)
        assert pretrain_sft.main([*toy.flags(**changes), *extra]) == 2
        assert snapshot(toy.folder) == before, "files were touched"
        out, err = capsys.readouterr()
        assert "Traceback" not in err and out == ""
        return err

    return run


def rows(folder: Path, *lines: str) -> Path:
    path = folder / f"rows{len(list(folder.glob('rows*')))}.jsonl"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


GOOD = json.dumps({"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]})


def test_misspelt_flag_and_key(refuse, toy: ToyRun) -> None:
    assert "did you mean --tensor-model-parallel-size" in refuse("--tensor-model-paralel-size", "2")
    config = toy.folder / "misspelt.yaml"
    config.write_text("optimizer: {learnig_rate: 1}\n")
    message = refuse("--config", str(config))
    assert "optimizer.learnig_rate" in message and "misspelt.yaml" in message


@pytest.mark.parametrize(
    ("world_size", "changes", "parts"),
    [
        (2, {"tensor_model_parallel_size": 3}, ["world size 2", "tensor_model_parallel_size 3"]),
        (3, {"tensor_model_parallel_size": 3}, ["num_attention_heads 4", "size 3", "use 1, 2 or 4"]),
        (3, {"pipeline_model_parallel_size": 3}, ["num_hidden_layers 4", "pipeline_model_parallel_size 3"]),
        (2, {"global_batch_size": 9}, ["global_batch_size", "9", "data-parallel size 2"]),
        (1, {"sequence_parallel": "true"}, ["sequence_parallel", "tensor_model_parallel_size"]),
        (2, {"context_parallel_size": 2, "seq_length": 30}, ["seq_length", "30"]),
        (1, {"seq_length": 128}, ["seq_length 128", "max_position_embeddings 64", "use 64 or less"]),
        (1, {"expert_model_parallel_size": 2}, ["expert_model_parallel_size"]),
        (1, {"device": "cuda"}, ["training.device is cuda", "--device cpu"]),
        (1, {"transformer_impl": "transformer_engine"}, ["transformer_impl", "transformer_engine"]),
    ],
)  # fmt: skip
def test_impossible_layouts(refuse, world_size: int, changes: dict, parts: list[str]) -> None:
    message = refuse(world_size=world_size, **changes)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("name", ["hf_path", "train_data_path", "valid_data_path", "load", "tokenizer_path"])
def test_missing_files(refuse, name: str) -> None:
    message = refuse(**{name: "/nowhere/at/all"})
    assert name in message and "/nowhere/at/all" in message


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        ([], ["holds no row"]),
        ([GOOD, "{not json"], ["line 2", "JSON"]),
        ([GOOD, GOOD, "[]"], ["line 3"]),
        ([GOOD, '{"text": "hello"}'], ["line 2", "messages"]),
        ([json.dumps({"messages": [{"role": "user", "content": "one"}]})], ["line 1", "assistant"]),
        ([json.dumps({"messages": [{"role": "robot", "content": "one"}]})], ["line 1", "robot"]),
    ],
)  # fmt: skip
def test_bad_rows(refuse, tmp_path: Path, lines: list[str], parts: list[str]) -> None:
    path = rows(tmp_path, *lines)
    message = refuse(train_data_path=path)
    for part in [path.name, *parts]:
        assert part in message
    assert path.name in refuse(valid_data_path=path)


def test_every_trained_token_cut_away(refuse, tmp_path: Path) -> None:
    long = json.dumps({"messages": [{"role": "user", "content": "one " * 40}, {"role": "assistant", "content": "two"}]})
    message = refuse(train_data_path=rows(tmp_path, long))
    assert "seq_length 32" in message and "every trained token" in message


def test_tokenizer_without_a_template(refuse, toy: ToyRun, tmp_path: Path) -> None:
    write_toy_model(tmp_path)
    for path in tmp_path.glob("chat_template*"):
        path.unlink()
    message = refuse(tokenizer_path=tmp_path)
    assert "chat template" in message and "chat_template" in message


def test_tokenizer_larger_than_the_model(refuse, tmp_path: Path) -> None:
    write_toy_model(tmp_path, vocab_size=12)
    message = refuse(hf_path=tmp_path)
    assert "token id" in message and "vocab_size is 12" in message and "tokenizer_path" in message


def test_unsupported_architecture(refuse, tmp_path: Path) -> None:
    write_toy_model(tmp_path, architectures=["GPT2LMHeadModel"])
    message = refuse(hf_path=tmp_path)
    assert "GPT2LMHeadModel is not supported" in message and "LlamaForCausalLM" in message


def test_model_without_weights(refuse, toy: ToyRun) -> None:
    assert "safetensors" in refuse(random_init="false")


def test_checkpoint_of_another_model_or_other_settings(refuse, toy: ToyRun) -> None:
    from megatron_ext.config import load_config
    from megatron_ext.models.hf_config import load_hf_config
    from megatron_ext.run_folder import FORMAT, LATEST, RUN_FILE, model_identity, training_settings

    config, hf = load_config(toy.flags()), load_hf_config(toy.model)
    run = {
        "format": FORMAT,
        "iteration": 3,
        "model": model_identity(hf),
        "settings": training_settings(config),
        "has_optimizer": True,
        "layout": {},
        "loader": {},
    }

    def write(folder: str, **changes) -> Path:
        root = toy.folder / folder
        (root / "iter_0000003").mkdir(parents=True)
        (root / "iter_0000003" / RUN_FILE).write_text(json.dumps(run | changes))
        (root / LATEST).write_text("3\n")
        return root

    other = write("other", model=run["model"] | {"hidden_size": 48})
    assert "another model: hidden_size was 48 and is now 32" in refuse(load=other)
    assert "optimizer.lr was 0.001 and is now 0.5" in refuse(load=write("settings"), lr=0.5)
    for name, value, was, now in (
        ("loss_reduction", "sequence_mean", "training.loss_reduction was token_mean", "sequence_mean"),
        ("logit_softcap", 30, "logits.logit_softcap was None", "30.0"),
        ("logit_scale", 2, "logits.logit_scale was 1.0", "2.0"),
        ("losses.lm_loss.label_smoothing", 0.1, "losses.lm_loss was {'type': 'cross_entropy'", "0.1}"),
        ("losses.z", "{type: z_loss}", "losses.z was absent", "{'type': 'z_loss', 'weight': 1.0}"),
    ):
        message = refuse(f"--{name}", str(value), load=write(f"with other {name}"))
        assert was in message and f"{now}; set them as they were" in message
    assert "--no-load-optim" in refuse(load=write("bare", has_optimizer=False))
    assert "format 99" in refuse(load=write("new", format=99))
    (toy.folder / "dangling").mkdir()
    (toy.folder / "dangling" / LATEST).write_text("7\n")
    assert "not a complete checkpoint" in refuse(load=toy.folder / "dangling")
    (toy.folder / "dangling" / LATEST).write_text("seven\n")
    assert "'seven', not an iteration" in refuse(load=toy.folder / "dangling")
    (toy.folder / "empty").mkdir()
    assert "holds no checkpoint" in refuse(load=toy.folder / "empty")
    for damaged in ({"model": []}, {"settings": None}, {"iteration": "x"}, {"layout": 1}):
        root = write(f"damaged {next(iter(damaged))}", **damaged)
        assert "cannot be read" in refuse(load=root) and next(iter(damaged)) in refuse(load=root)
    (toy.folder / "dangling" / LATEST).write_bytes(b"\xff\xfe")
    assert f"{LATEST} cannot be read" in refuse(load=toy.folder / "dangling")
    (toy.folder / "dangling" / LATEST).write_text("9" * 5000)
    assert "not an iteration" in refuse(load=toy.folder / "dangling")
    assert "already holds the checkpoints of a run" in refuse(save=other, log_dir=None)


def test_what_may_and_may_not_change_on_resume(toy: ToyRun, tmp_path: Path) -> None:
    """How logits are computed may; a checkpoint from before a setting existed has what is its default now."""
    from megatron_ext.config import Config, load_config
    from megatron_ext.models.hf_config import load_hf_config
    from megatron_ext.run_folder import FORMAT, LATEST, RUN_FILE, check_load, model_identity, training_settings

    hf = load_hf_config(toy.model)
    names = ("training.loss_reduction", "logits.logit_softcap", "logits.logit_scale")

    def resume(saved: dict, *flags: str) -> None:
        run = {"format": FORMAT, "iteration": 3, "model": model_identity(hf), "settings": saved}
        run |= {"has_optimizer": True, "layout": {}, "loader": {}}
        (tmp_path / "iter_0000003").mkdir(exist_ok=True)
        (tmp_path / "iter_0000003" / RUN_FILE).write_text(json.dumps(run))
        (tmp_path / LATEST).write_text("3\n")
        check_load(load_config([*toy.flags(load=tmp_path), *flags]), hf)

    config: Config = load_config(toy.flags())
    saved = training_settings(config)
    assert set(names) < set(saved) and not any("chunk" in name or "implementation" in name for name in saved)
    resume(saved)
    resume(saved, "--chunk-tokens", "7", "--token-metrics")
    resume(saved, "--implementation", "materialized")
    with pytest.raises(ValueError, match=r"logits\.logit_scale was 1\.0 and is now 2\.0; set"):
        resume(saved, "--logit-scale", "2")

    old = {name: value for name, value in saved.items() if name not in names}
    old["losses.lm_loss"] = {"type": "cross_entropy", "weight": 1.0}
    resume(old)
    with pytest.raises(ValueError, match=r"training\.loss_reduction was token_mean and is now sequence_mean; set"):
        resume(old, "--loss-reduction", "sequence_mean")
    with pytest.raises(ValueError, match=r"losses\.lm_loss was .*'label_smoothing': 0\.0} and is now .*: 0\.1}; set"):
        resume(old, "--losses.lm_loss.label_smoothing", "0.1")
    with pytest.raises(ValueError, match=r"losses\.lm_loss was {'type': 'kl'} and is now"):
        resume(old | {"losses.lm_loss": {"type": "kl"}})
    with pytest.raises(ValueError, match=r"losses\.other was .* and is now absent"):
        resume(old | {"losses.other": {"type": "z_loss", "weight": 1.0}})
    with pytest.raises(ValueError, match=r"optimizer\.lr was absent and is now 0\.001"):
        resume({})


def test_settings_of_the_loss_head(refuse) -> None:
    assert "logits.chunk_tokens: 0 is too small; use auto or a whole number" in refuse("--chunk-tokens", "0")
    assert "--losses.NAME.label_smoothing" in refuse("--label-smoothing", "0.1")
    assert "'kl' is not a known choice; use cross_entropy, z_loss, forward_kl, reverse_kl or jsd" in refuse(
        "--losses.b", "{type: kl}"
    )
    assert "chunk_tokens: 64 does nothing" in refuse("--chunk-tokens", "64", "--implementation", "materialized")


def test_other_ranks_let_the_first_one_speak(refuse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waited: list[float] = []
    monkeypatch.setattr(pretrain_sft.time, "sleep", waited.append)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    message = refuse(train_data_path="/nowhere/at/all")
    assert waited == [] and "/nowhere/at/all" in message
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == message.strip()
    assert "/nowhere/at/all" in refuse(world_size=2, rank=1, train_data_path="/nowhere/at/all")
    assert waited == [pretrain_sft.SECONDS_FOR_THE_FIRST_RANK]


@pytest.mark.parametrize("setting", ["save", "log_dir", "save_hf"])
def test_places_that_cannot_be_written_to(toy: ToyRun, refuse, setting: str) -> None:
    message = refuse(**{setting: "/proc/nowhere/at/all"})
    assert setting in message and "/proc/nowhere" in message


def test_log_file_that_is_a_directory(toy: ToyRun, refuse) -> None:
    (toy.folder / "odd log" / "metrics.jsonl").mkdir(parents=True)
    message = refuse(log_dir=toy.folder / "odd log")
    assert "logging.log_dir" in message and "metrics.jsonl" in message


@pytest.mark.parametrize("text", ["0", "abc", "-1"])
def test_world_size_that_is_none(toy: ToyRun, refuse, text: str) -> None:
    assert "WORLD_SIZE" in refuse(world_size=text)


# ---------------------------------------------------------------------------------------------- evaluation runs


@pytest.fixture
def refuse_evaluation(refuse, toy: ToyRun) -> Callable[..., str]:
    return lambda **changes: refuse(**({"eval_only": "true", "train_data_path": None, "train_iters": None} | changes))


def test_per_token_outputs_that_exist_or_cannot_be_written(refuse_evaluation, toy: ToyRun) -> None:
    existing = toy.folder / "existing.parquet"
    existing.write_text("somebody's work")
    message = refuse_evaluation(per_token_outputs=existing)
    assert f"evaluation.per_token_outputs: {existing} exists already" in message and "--overwrite" in message
    assert "is the evaluation set" in refuse_evaluation(per_token_outputs=toy.valid_data, overwrite="true")
    assert "known kind of file" in refuse_evaluation(per_token_outputs=toy.folder / "out.csv")
    assert "cannot be a directory" in refuse_evaluation(per_token_outputs=existing / "out.jsonl")
    long = toy.folder / ("x" * 249 + ".jsonl")  # a name of 255 bytes, but not while it is being written
    long_message = refuse_evaluation(per_token_outputs=long, log_dir=toy.folder)
    assert "evaluation.per_token_outputs" in long_message and "cannot be written" in long_message


def test_per_token_outputs_in_a_folder_that_may_not_be_written(refuse_evaluation) -> None:
    message = refuse_evaluation(per_token_outputs="/proc/out.jsonl")
    assert "evaluation.per_token_outputs" in message and "cannot be written" in message


def test_evaluation_needs_a_set_with_a_trained_token(refuse_evaluation, toy: ToyRun) -> None:
    assert "data.valid_data_path is not set, as eval_only needs" in refuse_evaluation(valid_data_path=None)
    long_question = json.dumps(
        {"messages": [{"role": "user", "content": "one " * 40}, {"role": "assistant", "content": "two"}]}
    )
    path = rows(toy.folder, long_question)
    message = refuse_evaluation(valid_data_path=path)
    assert "evaluation set validation" in message and str(path) in message and "seq_length 32" in message


def test_evaluation_of_another_models_checkpoint(refuse_evaluation, toy: ToyRun) -> None:
    empty = toy.folder / "no_checkpoint"
    empty.mkdir(exist_ok=True)
    assert "holds no checkpoint" in refuse_evaluation(load=empty)
