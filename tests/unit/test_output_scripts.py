"""scripts/compare_outputs.py and scripts/token_report.py on small files."""

import html
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.token_file import FileRow, RowWriter, TokenFile
from toy_run import ROOT, write_toy_model

FIELDS = ["loss_mask", "logprobs", "elementwise_loss"]


def run(script: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts" / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def make_row(sample_id: int, losses: list[float], mask: list[float] | None = None, shift: float = 0.0) -> FileRow:
    values = {
        "loss_mask": mask or [1.0] * len(losses),
        "logprobs": [-loss - shift for loss in losses],
        "elementwise_loss": [loss + shift for loss in losses],
    }
    ids = np.arange(len(losses) + 1) % 20
    return FileRow.of("validation", sample_id, ids[:-1], ids[1:], values)


def write(path: Path, rows: list[FileRow], **metadata: str) -> Path:
    with RowWriter(path, FIELDS, metadata) as writer:
        for row in rows:
            writer.write(row)
    return path


# -------------------------------------------------------------------------------------------- compare_outputs


def test_the_largest_difference_is_shown_with_its_place(tmp_path: Path) -> None:
    a = write(tmp_path / "a.parquet", [make_row(0, [1.0, 2.0]), make_row(1, [3.0, 4.0, 5.0], [0, 1, 1])])
    b = write(tmp_path / "b.jsonl", [make_row(0, [1.0, 2.001]), make_row(1, [3.5, 4.25, 5.0], [0, 1, 1])])
    result = run("compare_outputs.py", a, b)
    assert result.returncode == 0, result.stderr
    table = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line.strip()}
    assert table["elementwise_loss"] == ["5", "5.00e-01", "2.50e-01", "1.50e-01", "0"]
    assert table["loss_mask"][1] == "0.00e+00"
    assert "5.00e-01  validation sample 1, position 0 (target 1, loss_mask 0): 3 and 3.5" in result.stdout
    assert "sample 1: 4.5 and 4.625" in result.stdout, "the mean losses"
    assert run("compare_outputs.py", a, b, "--tolerance", 0.4).returncode == 1
    assert run("compare_outputs.py", a, b, "--tolerance", 0.6).returncode == 0
    assert run("compare_outputs.py", a, a, "--tolerance", 0).returncode == 0


def test_nan_on_one_side_is_the_largest_difference(tmp_path: Path) -> None:
    a = write(tmp_path / "a.parquet", [make_row(0, [math.nan, 2.0, math.nan])])
    b = write(tmp_path / "b.parquet", [make_row(0, [math.nan, 2.0, 3.0])])
    result = run("compare_outputs.py", a, b, "--tolerance", 1)
    assert result.returncode == 1
    assert re.search(r"^logprobs +3 +inf +inf +0.00e\+00 +1$", result.stdout, re.MULTILINE)
    assert "position 2" in result.stdout and "position 0" not in result.stdout
    assert run("compare_outputs.py", a, a, "--tolerance", 0).returncode == 0


def test_other_sequences_and_other_tokens_are_named(tmp_path: Path) -> None:
    rows = [make_row(i, [1.0, 2.0]) for i in range(3)]
    a, b = write(tmp_path / "a.parquet", rows), write(tmp_path / "b.parquet", rows[1:])
    result = run("compare_outputs.py", a, b)
    assert result.returncode == 1 and "1 sequences (validation sample 0)" in result.stdout
    assert "2 sequences in both" in result.stdout
    changed = [*rows[:2], make_row(2, [1.0, 2.0, 3.0])]
    result = run("compare_outputs.py", a, write(tmp_path / "c.parquet", changed))
    assert result.returncode == 1 and "validation sample 2 has other tokens" in result.stdout


def test_values_that_one_file_has_are_named(tmp_path: Path) -> None:
    row = make_row(0, [1.0, 2.0])
    a, b = write(tmp_path / "a.parquet", [row]), tmp_path / "b.parquet"
    with RowWriter(b, [*FIELDS, "z", "kl"], {}) as writer:
        values = row.values | {"z": np.zeros(2), "kl": np.ones(2)}
        writer.write(FileRow.of(row.set_name, row.sample_id, row.token_ids, row.labels, values))
    result = run("compare_outputs.py", a, b, "--tolerance", 0)
    assert result.returncode == 0, result.stderr
    assert f"not compared, as only {b} has them: kl, z" in result.stdout
    assert "not compared" not in run("compare_outputs.py", a, a).stdout


def test_transformers_as_the_reference(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = write_toy_model(tmp_path / "model")
    torch.manual_seed(3)
    llama = LlamaForCausalLM(LlamaConfig.from_pretrained(model))
    llama.save_pretrained(model)
    ids = torch.tensor([[3, 7, 1, 9, 4]])
    with torch.no_grad():
        logprobs = llama(ids[:, :-1]).logits[0].double().log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
    values = {"loss_mask": [0, 1, 1, 1], "logprobs": logprobs, "elementwise_loss": -logprobs}
    a = write(tmp_path / "a.parquet", [FileRow.of("validation", 4, ids[0, :-1], ids[0, 1:], values)])
    reference = tmp_path / "reference.parquet"
    result = run("compare_outputs.py", a, reference, "--hf", model, "--tolerance", 1e-5)
    assert result.returncode == 0, result.stdout + result.stderr
    (row,) = TokenFile(reference).rows()
    np.testing.assert_allclose(row.values["logprobs"], logprobs, rtol=1e-5)
    assert (row.sample_id, row.labels.tolist()) == (4, [7, 1, 9, 4])
    assert run("compare_outputs.py", a, reference, "--tolerance", 1e-5).returncode == 0
    refused = run("compare_outputs.py", a, reference, "--hf", model)
    assert refused.returncode == 2 and "--overwrite" in refused.stderr

    values["logprobs"] = logprobs.roll(1)
    wrong = write(tmp_path / "wrong.parquet", [FileRow.of("validation", 4, ids[0, :-1], ids[0, 1:], values)])
    assert run("compare_outputs.py", wrong, "--hf", model, "--tolerance", 1e-5).returncode == 1


@pytest.mark.parametrize("arguments", [["gone.parquet", "gone.parquet"], ["gone.parquet"]])
def test_unusable_arguments_are_refused(tmp_path: Path, arguments: list[str]) -> None:
    result = run("compare_outputs.py", *arguments)
    assert result.returncode == 2 and "Traceback" not in result.stderr


# ----------------------------------------------------------------------------------------------- token_report


def report_of(path: Path, *arguments: object) -> str:
    result = run("token_report.py", path, *arguments)
    assert result.returncode == 0, result.stderr
    return path.with_suffix(".html").read_text(encoding="utf-8")


def spans_of(article: str) -> list[tuple[str, str, str]]:
    """Class, tooltip and text of each token."""
    found = re.findall(r'<span class="(\w+)" title="([^"]*)">(.*?)</span>', article, re.DOTALL)
    return [(kind, html.unescape(tip), html.unescape(text)) for kind, tip, text in found]


def test_the_worst_sequences_come_first_and_no_more_than_asked_for(tmp_path: Path) -> None:
    losses = {0: [1.0], 1: [5.0], 2: [math.nan], 3: [0.5], 4: [3.0]}
    path = write(tmp_path / "out.parquet", [make_row(i, values) for i, values in losses.items()])
    page = report_of(path, "--limit", 3)
    assert re.findall(r"validation sample (\d)</span>", page) == ["2", "1", "4"]
    assert "5 sequences, 5 trained tokens" in page and "1 sequences with values that are not finite" in page
    assert "the 3 worst of them" in page
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page), "the page loads something"


def test_tokens_are_coloured_by_their_own_loss(tmp_path: Path) -> None:
    model = write_toy_model(tmp_path / "model")
    row = make_row(0, [0.0, 1.0, 9.0, math.nan, 9.0], [1.0, 1.0, 1.0, 1.0, 0.0])
    page = report_of(write(tmp_path / "out.parquet", [row], tokenizer=str(model)))
    article = page[page.index("<article") :]
    first, *targets = spans_of(article[article.index("<p") :])
    assert first[0] == "off", "the first token has no loss"
    kinds = [kind for kind, _, _ in targets]
    assert kinds[0] == "l0" and kinds[2] == "l11" and kinds[3:] == ["nan", "off"]
    assert 0 < int(kinds[1][1:]) < 6
    # labels 1 to 5 of the toy vocabulary
    assert [text.strip() for _, _, text in targets] == ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "one"]
    tip = targets[4][1]
    for part in ('"one"', "id 5", "loss 9.0000 (not trained)", "logprob -9.0000", "loss_mask 0", "position 4"):
        assert part in tip


def test_text_cannot_become_markup_and_white_space_is_seen(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = ["<script>alert(1)</script>", "&amp;", '"quoted"', "\n", "\t", "  ", "é", "\n\n"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>").save_pretrained(tmp_path / "tokenizer")
    path = write(tmp_path / "out.jsonl", [make_row(0, [1.0] * len(words))])
    page = report_of(path, "--tokenizer", tmp_path / "tokenizer")
    assert "<script>alert" not in page and page.count("<script>") == 1
    texts = [text for _, _, text in spans_of(page[page.index("<article") :])][1:]
    assert texts[:3] == words[:3]
    assert texts[3:] == ["↵\n", "⇥\t", "··", "é", "↵\n↵\n"]
    assert r'"\n"  id 4' in html.unescape(page)


def test_without_a_tokenizer_ids_are_shown(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [make_row(0, [1.0, 2.0])])
    result = run("token_report.py", path, "--output", tmp_path / "page.html")
    assert result.returncode == 0 and "names no tokenizer" in result.stderr
    assert [text for _, _, text in spans_of((tmp_path / "page.html").read_text().split("<article")[1])] == [
        "0 ",
        "1 ",
        "2 ",
    ]


def test_a_character_of_several_tokens_is_shown_once(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    ids = np.array(tokenizer("aéz日")["input_ids"])
    assert len(ids) == 1 + 2 + 1 + 3
    values = {name: [1.0] * (len(ids) - 1) for name in FIELDS}
    path = write(tmp_path / "out.jsonl", [FileRow.of("validation", 0, ids[:-1], ids[1:], values)])
    page = report_of(path, "--tokenizer", tmp_path / "tokenizer")
    assert [text for _, _, text in spans_of(page.split("<article")[1])] == ["a", "é", "‥", "z", "日", "‥", "‥"]


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    result = run("token_report.py", tmp_path / "gone.parquet")
    assert result.returncode == 2 and "is not a file" in result.stderr
