"""The command line: flags, files, what wins over what, and how mistakes in either are told."""
# ruff: noqa: E501 (a table of messages has one case a line)

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ext.config import Config, ConfigError, config_to_yaml, load_config, parse_command_line
from megatron_ext.config.help import help_text
from megatron_ext.config.settings import Setting, settings

NEEDED = ("--hf-path", "m", "--train-data-path", "t.jsonl", "--train-iters", "5")
FILE = """\
model: {hf_path: from-file}
data:
  train_data_path: t.jsonl
  valid_data_path: v.jsonl
training:
  train_iters: 5
optimizer:
  lr: 2e-4
"""


def problems_of(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(argv)
    assert all("\n" not in problem for problem in error.value.problems)
    return error.value.problems


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    return path


# -------------------------------------------------------------------------------------------------------- flags

SAMPLES: dict[str, tuple[tuple[str, ...], Any]] = {  # settings whose sample does not follow from their type
    "recompute_modules": (("core_attn", "mlp"), ["core_attn", "mlp"]),
    "valid_data_path": (("v.jsonl",), "v.jsonl"),
    "hidden_dropout": (("0.25",), 0.25),
    "attention_dropout": (("0.25",), 0.25),
    "adam_beta1": (("0.25",), 0.25),
    "adam_beta2": (("0.25",), 0.25),
    "transformer_impl": (("torch",), "torch"),
    "recompute_granularity": (("selective",), "selective"),
    "recompute_method": (("block",), "block"),
    "pad_to": (("seq_length",), "seq_length"),
    "optimizer": (("sgd",), "sgd"),
    "lr_decay_style": (("linear",), "linear"),
    "device": (("cpu",), "cpu"),
    "implementation": (("materialized",), "materialized"),
    "chunk_tokens": (("256",), 256),
    "loss_reduction": (("sequence_mean",), "sequence_mean"),
}


def sample(setting: Setting) -> tuple[tuple[str, ...], Any]:
    """A flag's words, and the value they stand for, which is not the default."""
    if setting.name in SAMPLES:
        return SAMPLES[setting.name]
    if bool in setting.types:
        value = not setting.info.default
        return (str(value).lower(),), value
    return {int: (("7",), 7), float: (("3e-1",), 0.3), str: (("some/name",), "some/name")}[setting.types[0]]


@pytest.mark.parametrize("setting", settings(Config).values(), ids=lambda setting: setting.path)
def test_every_setting_has_a_flag_in_all_spellings(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    # Here only the flags matter: the values tried need not go together.
    for check in ("combination_problems", "purpose_problems"):
        monkeypatch.setattr(f"megatron_ext.config.command_line.{check}", lambda config: [])
    words, value = sample(setting)
    for flag in (
        setting.flag,
        f"--{setting.name}",
        f"--{setting.path}",
        f"--{setting.path.replace('_', '-')}",
    ):
        given = (f"{flag}={words[0]}",) if len(words) == 1 else (flag, *words)
        for argv in ((*NEEDED, flag, *words), (*NEEDED, *given)):
            found = load_config(argv).to_dict()[setting.section][setting.name]
            assert found == value
            assert type(found) is type(value)
    assert setting.info.default != value


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--sequence-parallel"], True),
        (["--sequence-parallel", "true"], True),
        (["--sequence-parallel=TRUE"], True),
        (["--sequence_parallel", "false"], False),
        (["--no-sequence-parallel"], False),
        (["--no_sequence_parallel"], False),
        (["--sequence-parallel", "--no-sequence-parallel"], False),
        (["--no-parallel.sequence_parallel"], False),
    ],
)
def test_switches(argv: list[str], value: bool) -> None:
    config = load_config([*NEEDED, "--tensor-model-parallel-size", "2", *argv])
    assert config.parallel.sequence_parallel is value


def test_a_setting_whose_own_name_begins_with_no_is_a_switch_too() -> None:
    argv = [*NEEDED, "--load", "x", "--no-load-optim"]
    assert load_config(argv).checkpoint.no_load_optim is True
    assert load_config([*argv, "--no-no-load-optim"]).checkpoint.no_load_optim is False


def test_a_list_takes_words_or_commas() -> None:
    argv = [*NEEDED, "--recompute-granularity", "selective", "--recompute-modules"]
    for words in (["core_attn", "mlp"], ["core_attn,mlp"], ["[core_attn, mlp]"]):
        assert load_config([*argv, *words]).model.recompute_modules == ["core_attn", "mlp"]


def test_none_unsets_what_the_file_sets(file: Path) -> None:
    for word in ("none", "null", "None"):
        assert load_config(["--config", str(file), "--valid-data-path", word]).data.valid_data_path is None


def test_entries_of_maps_are_added_and_changed(file: Path) -> None:
    config = load_config(
        ["--config", str(file), "--losses.lm_loss.weight", "0.5", "--losses.aux", "{type: cross_entropy, weight: 0}",
         "--data.valid_data_path.hard-1.5", "h.jsonl", "--valid-data-path.easy", "e.jsonl"]
    )  # fmt: skip
    assert {name: loss.weight for name, loss in config.losses.items()} == {"lm_loss": 0.5, "aux": 0.0}
    assert config.evaluation_sets == {"validation": "v.jsonl", "hard-1.5": "h.jsonl", "easy": "e.jsonl"}
    # A whole map is set before its entries, in whichever order they come.
    config = load_config([*NEEDED, "--losses.b.weight", "2", "--losses", "{b: {type: cross_entropy}}"])
    assert {name: loss.weight for name, loss in config.losses.items()} == {"b": 2.0}
    config = load_config([*NEEDED, "--valid-data-path", "{a: x, b: y}"])
    assert config.evaluation_sets == {"a": "x", "b": "y"}


def test_a_flag_may_give_the_default_loss_another_type() -> None:
    for argv in (["--losses.lm_loss.type", "z_loss"], ["--losses.lm_loss", "{type: z_loss}"]):
        config = load_config([*NEEDED, *argv, "--losses.lm_loss.weight", "1e-4"])
        assert config.to_dict()["losses"] == {"lm_loss": {"type": "z_loss", "weight": 1e-4}}
    config = load_config([*NEEDED, "--losses.lm_loss.label-smoothing", "0.1", "--losses.z", "{type: z_loss}"])
    assert config.to_dict()["losses"] == {
        "lm_loss": {"type": "cross_entropy", "weight": 1.0, "label_smoothing": 0.1},
        "z": {"type": "z_loss", "weight": 1.0},
    }


def test_auto_or_a_number(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for text, value in (("auto", "auto"), ("256", 256)):
        path.write_text(FILE + f"logits: {{chunk_tokens: {text}}}\n")
        for config in (
            load_config([*NEEDED, "--chunk-tokens", text]),
            load_config([*NEEDED, f"--logits.chunk_tokens={text}"]),
            load_config([*NEEDED, "--chunk-tokens", "7", "--chunk-tokens", text]),
            load_config(["--config", str(path)]),
        ):
            assert config.logits.chunk_tokens == value
            assert yaml.safe_load(config_to_yaml(config))["logits"]["chunk_tokens"] == value
            assert Config.from_dict(yaml.safe_load(config_to_yaml(config))) == config


def test_a_flag_for_one_entry_leaves_its_yaml_alias_alone(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(FILE + "losses:\n  a: &a {type: cross_entropy}\n  b: *a\n")
    config = load_config(["--config", str(path), "--losses.a.weight", "3"])
    assert [loss.weight for loss in config.losses.values()] == [3.0, 1.0]


TOKENS = "use auto or a whole number of at least 1 and at most 100000000 (default 'auto')"
BAD_FLAGS = [  # flags, the start of the one problem
    (["--tensor-model-paralel-size", "2"], "--tensor-model-paralel-size is not a flag; did you mean --tensor-model-parallel-size?"),
    (["--learning-rate", "1"], "--learning-rate is not a flag; did you mean --lr?"),
    (["--tp", "2"], "--tp is not a flag; did you mean --tensor-model-parallel-size?"),
    (["--data.lr", "1"], "--data.lr is not a flag; lr belongs to the section optimizer: use --lr"),
    (["--data.seq_lenght", "1"], "--data.seq_lenght is not a flag; did you mean --seq-length?"),
    (["--losses.lm_loss.wieght", "1"], "--losses.lm_loss.wieght is not a flag; did you mean --losses.lm_loss.weight?"),
    (["--losses.lm_loss.label_smothing", "1"], "--losses.lm_loss.label_smothing is not a flag; did you mean --losses.lm_loss.label_smoothing?"),
    (["--label-smoothing", "0.1"], "--label-smoothing is not a flag; label_smoothing belongs to an entry of losses: use --losses.NAME.label_smoothing"),
    (["--losses.lm_loss.type"], "--losses.lm_loss.type needs a value; use cross_entropy, z_loss, forward_kl, reverse_kl or jsd"),
    (["--losses.lm_loss.type", "kl"], "losses.lm_loss.type: 'kl' is not a known choice; use cross_entropy, z_loss, forward_kl, reverse_kl or jsd (--losses.lm_loss.type)"),
    (["--losses.lm_loss.label_smoothing", "1"], "losses.lm_loss.label_smoothing: 1.0 is too large; use a number of at least 0 and below 1 (default 0.0) (--losses.lm_loss.label_smoothing)"),
    (["--losses.z", "{type: z_loss, label_smoothing: 0}"], "losses.z.label_smoothing is not a known key; the keys of losses.z (a z_loss) are type, weight (--losses.z)"),
    (["--chunk-tokens"], "--chunk-tokens needs a value; use auto or a whole number"),
    (["--chunk-tokens", "0"], f"logits.chunk_tokens: 0 is too small; {TOKENS} (--chunk-tokens)"),
    (["--chunk-tokens", "-1"], f"logits.chunk_tokens: -1 is too small; {TOKENS} (--chunk-tokens)"),
    (["--chunk-tokens", "many"], f"logits.chunk_tokens: 'many' is not auto or a whole number; {TOKENS} (--chunk-tokens)"),
    (["--chunk-tokens", "1.5"], f"logits.chunk_tokens: '1.5' is not auto or a whole number; {TOKENS} (--chunk-tokens)"),
    (["--chunk-tokens", "true"], f"logits.chunk_tokens: 'true' is not auto or a whole number; {TOKENS} (--chunk-tokens)"),
    (["--chunk-tokens", "none"], f"logits.chunk_tokens: 'none' is not auto or a whole number; {TOKENS} (--chunk-tokens)"),
    (["--chunk-tokens", "256", "--implementation", "materialized"], "logits.chunk_tokens: 256 does nothing with implementation materialized; use"),
    (["--logit-softcap", "0"], "logits.logit_softcap: 0.0 is too small; use a number above 0, or null (--logit-softcap)"),
    (["--softcap", "30"], "--softcap is not a flag; did you mean --logit-softcap?"),
    (["--data", "{}"], "--data is a section; set its settings one by one, as in --train-data-path"),
    (["--confg", "f"], "--confg is not a flag; did you mean --config?"),
    (["--qqqq", "f", "g"], "--qqqq is not a flag; --help lists all of them"),
    (["--trainin", "f"], "--trainin is not a flag; --help lists all of them"),
    (["--no-lr"], "--no-lr is not a flag; lr belongs to the section optimizer: use --lr"),
    (["--lr"], "--lr needs a value; use a number"),
    (["--recompute-modules"], "--recompute-modules needs a value; use a list of core_attn, layernorm or mlp, or null"),
    (["--config"], "--config needs a value; name a YAML file"),
    (["--lr", "1", "2"], "--lr: '2' is one value too many"),
    (["--no-shuffle", "true"], "--no-shuffle: 'true' is one value too many"),
    (["--print-config", "x"], "--print-config: 'x' is one value too many"),
    (["--lr", "-1e-4"], "optimizer.lr: -0.0001 is too small; use a number of at least 0 (default 1e-05) (--lr)"),
    (["--lr", "nan"], "optimizer.lr: nan is not finite"),
    (["--seed", "1.5"], "training.seed: '1.5' is not a whole number"),
    (["--bf16", "maybe"], "training.bf16: 'maybe' is not true or false; use true or false (default false) (--bf16)"),
    (["--device", "none"], "training.device: 'none' is not a known choice"),
    (["--save", ""], "checkpoint.save: the text is empty; use a path, or null (--save)"),
    (["--losses.aux", "3"], "losses.aux is 3, which is not a map of keys and values"),
    (["--losses.aux", "{type: "], "losses.aux is '{type: ', which is not a map of keys and values"),
    (["--losses.aux.weight", "1"], "losses.aux.type is not set; use cross_entropy, z_loss, forward_kl, reverse_kl or jsd"),
    (["--valid-data-path", "{train: x}"], "data.valid_data_path names a set 'train'"),
    (["--min-lr", "1"], "optimizer.min_lr: 1.0 is above lr 1e-05; use at most 1e-05"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "start"), BAD_FLAGS)
def test_a_wrong_flag_is_refused_in_these_words(argv: list[str], start: str) -> None:
    problems = problems_of(*NEEDED, *argv)
    assert len(problems) == 1
    assert problems[0].startswith(start)


def test_words_before_the_first_flag_and_no_words_at_all() -> None:
    assert problems_of("run.yaml", *NEEDED) == [
        "'run.yaml' does not follow a flag; write --NAME VALUE, as in --lr 1e-5"
    ]
    assert problems_of() == ["no settings were given; start with --config FILE (--help lists every setting)"]


def test_training_needs_data_and_a_length() -> None:
    assert problems_of("--hf-path", "m") == [
        "data.train_data_path is not set; give the JSONL file to train on",
        "training.train_iters is not set; give the number of optimizer steps to train for",
    ]
    assert problems_of("--train-iters", "3")[0].startswith("model.hf_path is not set; use a path: Hugging Face")


# --------------------------------------------------------------------------------------------------------- file


def test_flags_win_over_the_file_and_the_last_flag_over_the_first(file: Path) -> None:
    config = load_config(["--config", str(file)])
    assert (config.model.hf_path, config.optimizer.lr, config.training.train_iters) == ("from-file", 2e-4, 5)
    config = load_config(["--lr", "1", "--config", str(file), "--lr", "3e-4", "--hf-path", "from-flag"])
    assert (config.model.hf_path, config.optimizer.lr, config.training.train_iters) == ("from-flag", 3e-4, 5)


def test_a_flag_may_correct_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(FILE.replace("train_iters: 5", "train_iters: five"))
    assert load_config(["--config", str(path), "--train-iters", "6"]).training.train_iters == 6


def test_the_written_configuration_runs_again_as_it_is(file: Path, tmp_path: Path) -> None:
    for argv in ([], ["--save", "out", "--losses.aux", "{type: cross_entropy}"], ["--log-dir", "logs"]):
        config = load_config(["--config", str(file), *argv])
        written = tmp_path / "config.yaml"
        written.write_text(config_to_yaml(config))
        assert load_config(["--config", str(written)]) == config
        assert load_config(["--config", str(written)]).log_directory == config.log_directory


def test_logs_go_to_a_folder_named_after_the_file_unless_told_otherwise(file: Path) -> None:
    assert str(load_config(["--config", str(file)]).log_directory) == "runs/run"
    assert str(load_config(["--config", str(file), "--save", "out"]).log_directory) == "out"
    assert str(load_config(["--config", str(file), "--save", "out", "--log-dir", "l"]).log_directory) == "l"
    assert str(load_config(NEEDED).log_directory) == "runs/sft"


def test_an_evaluation_run_logs_outside_of_the_checkpoints_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    file = folder / "config.yaml"
    file.write_text("model: {hf_path: m}\ndata: {valid_data_path: v}\ncheckpoint: {save: runs/mine}\n")
    command = ["--config", str(file), "--eval-only", "--load", "runs/mine"]
    assert str(load_config(command).log_directory) == "runs/mine_eval"
    assert str(load_config([*command, "--log-dir", "l"]).log_directory) == "l"
    other = file.rename(folder / "other.yaml")
    assert str(load_config(["--config", str(other), "--eval-only"]).log_directory) == "runs/other_eval"
    assert (
        str(load_config(["--hf-path", "m", "--valid-data-path", "v", "--eval-only"]).log_directory) == "runs/sft_eval"
    )


def test_an_evaluation_run_needs_sets_and_nothing_of_training() -> None:
    assert problems_of("--hf-path", "m", "--eval-only") == [
        "data.valid_data_path is not set, as eval_only needs; give the JSONL file to evaluate on"
    ]


def test_print_config_is_told_to_the_caller(file: Path) -> None:
    assert parse_command_line(["--config", str(file), "--print-config"]).print_config is True
    command = parse_command_line(["--print_config", *NEEDED])
    assert command.print_config is True
    assert Config.from_dict(yaml.safe_load(config_to_yaml(command.config))) == command.config
    assert parse_command_line(["--config", str(file)]).print_config is False


BAD_FILES = [  # text, what follows the file's path in the message
    ("", ": the file is empty; a run needs at least model: {hf_path: ...}"),
    ("# only a comment\n", ": the file is empty; a run needs"),
    ("- model\n", ":1: the file is a list, not a map of sections; start it with model:"),
    ("\nmodel\n", ":2: the file is a single value, not a map of sections; start it with model:"),
    ("model: [1\ndata: 2\n", ":2:5: this is not YAML: "),
    ("model:\n\thf_path: m\n", ":2:1: this is not YAML: found character '\\t' that cannot start any token"),
    ("model: {hf_path: 'm}\n", ":2:1: this is not YAML: found unexpected end of stream"),
    ("model: {}\n---\ndata: {}\n", ":2:1: this is not YAML: "),
    ("model: *nowhere\n", ":1:8: this is not YAML: found undefined alias"),
    ("model: !!python/object:os.system x\n", ":1:8: this is not YAML: could not determine a constructor"),
    ("model: &a {hf_path: *a}\n", ": this is not YAML: "),
    ("data: &a [*a]\n", ": this is not YAML: "),
    ("save: 2024-13-45\n", ": this is not YAML: month must be in 1..12; correct the file"),
    ("a: \x00\n", ": this is not YAML: "),
]  # fmt: skip


@pytest.mark.parametrize(("text", "rest"), BAD_FILES)
def test_a_file_that_is_no_configuration_is_named_with_the_line(text: str, rest: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    problems = problems_of("--config", str(path))
    assert len(problems) == 1
    # The two parsers PyYAML may be built with word the cause differently; place and remedy are ours.
    assert problems[0].startswith(f"{path}{rest}".split("found")[0].split("this is not YAML: could")[0])
    assert ";" in problems[0]


def test_a_file_that_cannot_be_read_is_named_beside_wrong_flags(tmp_path: Path) -> None:
    missing, binary = tmp_path / "no.yaml", tmp_path / "b.yaml"
    binary.write_bytes(b"model: \xff")
    assert problems_of("--config", str(missing), "--qqqq") == [
        "--qqqq is not a flag; --help lists all of them",
        f"--config {missing}: no such file; check the path (relative paths start at the current directory)",
    ]
    assert problems_of("--config", str(tmp_path)) == [
        f"--config {tmp_path}: this is a directory; name a YAML file in it"
    ]
    assert problems_of("--config", str(binary)) == [
        f"--config {binary}: not text in UTF-8 (byte 7); save the file as UTF-8"
    ]


def test_every_problem_of_file_and_flags_is_told_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: {hf_path: m}\n"
        "data:\n"
        "  seq_length: 8\n"
        "  seq_length: 0\n"
        "optimizer:\n"
        "  learnig_rate: 1\n"
        "  lr: -1\n"
        "training: {train_iters: 1, seed: x}\n"
    )
    assert problems_of("--config", str(path), "--clip-grad", "-1", "--qqqq", "1") == [
        "--qqqq is not a flag; --help lists all of them",
        f"data.seq_length is given twice ({path}, lines 3 and 4); keep one",
        f"data.seq_length: 0 is too small; use a whole number of at least 1 and at most 100000000 (default 1024) ({path}, line 4)",
        f"optimizer.lr: -1 is too small; use a number of at least 0 (default 1e-05) ({path}, line 7)",
        "optimizer.clip_grad: -1.0 is too small; use a number of at least 0 (default 1.0) (--clip-grad)",
        f"optimizer.learnig_rate is not a known key; did you mean optimizer.lr? ({path}, line 6)",
        f"training.seed: 'x' is not a whole number; use a whole number of at least 0 and at most 2147483647 (default 1234) ({path}, line 8)",
    ]


def test_a_section_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(FILE + "training: {seed: 1}\n")
    problems = problems_of("--config", str(path), "--train-iters", "2")
    assert problems == [f"training is given twice ({path}, lines 5 and 9); keep one"]


def test_a_loss_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(FILE + "losses:\n  a: {type: cross_entropy}\n  b: {type: z_loss}\n  a: {type: z_loss}\n")
    assert problems_of("--config", str(path)) == [f"losses.a is given twice ({path}, lines 10 and 12); keep one"]


def test_a_wrong_value_of_a_typed_loss_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        FILE
        + "losses:\n  a:\n    type: cross_entropy\n    label_smoothing: 1\n  b: {type: kl}\nlogits:\n  chunk_tokens: 1.5\n"
    )
    assert problems_of("--config", str(path)) == [
        f"losses.a.label_smoothing: 1 is too large; use a number of at least 0 and below 1 (default 0.0) ({path}, line 12)",
        f"losses.b.type: 'kl' is not a known choice; use cross_entropy, z_loss, forward_kl, reverse_kl or jsd ({path}, line 13)",
        f"logits.chunk_tokens: 1.5 is not auto or a whole number; {TOKENS} ({path}, line 15)",
    ]


def test_yaml_merge_keys_and_anchors_work(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(FILE + "losses:\n  a: &a {type: cross_entropy, weight: 2}\n  b: {<<: *a, weight: 3}\n")
    config = load_config(["--config", str(path)])
    assert [loss.weight for loss in config.losses.values()] == [2.0, 3.0]


# --------------------------------------------------------------------------------------------------------- help


def test_help_lists_every_setting_under_its_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    lines = help_text().splitlines()
    assert max(map(len, lines)) <= 110
    table = lines[: lines.index("values:")]
    for setting in settings(Config).values():
        switch = setting.flag.replace("--", "--[no-]") if bool in setting.types else setting.flag
        own = [number for number, line in enumerate(table) if line.split()[:1] in ([setting.flag], [switch])]
        assert len(own) == 1, setting.flag
        heading = next(line for line in reversed(lines[: own[0]]) if line and not line.startswith(" "))
        assert heading == f"{setting.section}:"
    assert any("[iterations; default 1]" in line for line in lines)
    text = " ".join(help_text().split())
    assert (
        "--losses.NAME.type {cross_entropy,z_loss,forward_kl,reverse_kl,jsd} kind of loss (cross_entropy: next-token cross-entropy; z_loss: "
        in text
    )
    assert "--losses.NAME.label_smoothing X of cross_entropy: share of the target spread evenly over" in text
    assert (
        "--chunk-tokens {auto,N} tokens in a chunk (auto: as many as keep a chunk's logits small) [tokens; default auto]"
        in text
    )
    for key in ("type", "weight", "label_smoothing"):
        assert sum(line.split()[:1] == [f"--losses.NAME.{key}"] for line in table) == 1


def test_help_is_printed_and_ends_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "-h"):
        with pytest.raises(SystemExit) as ending:
            load_config(["--config", "missing.yaml", flag])
        assert ending.value.code == 0
        assert capsys.readouterr().out.strip() == help_text().strip()
