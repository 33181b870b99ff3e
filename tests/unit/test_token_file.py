"""The file of per-token outputs: what was written is read back, whole or not at all, in bounded memory."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megatron_ext import token_file
from megatron_ext.token_file import FileRow, RowWriter, TokenFile

NUMBERS = {"loss_mask": [1.0], "logprobs": [0.0], "elementwise_loss": [0.0]}
UNEVEN = {"sample_id": 0, "set": "s", "token_ids": [1], "labels": [1, 2], "mean_loss": 0.0, **NUMBERS}
FIELDS = ["loss_mask", "logprobs", "elementwise_loss", "kl"]
suffixes = pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])


def make_row(sample_id: int, length: int, set_name: str = "validation") -> FileRow:
    generator = np.random.default_rng(sample_id)
    logprobs = -generator.random(length).astype(np.float32)
    if sample_id == 1:
        logprobs[0] = math.nan
    values = {
        "loss_mask": generator.choice([0.0, 0.5, 1.0], length),
        "logprobs": logprobs,
        "elementwise_loss": -logprobs,
        "kl": generator.random(length),
    }
    values["loss_mask"][-1] = 1.0
    ids = generator.integers(0, 2**40, length)
    return FileRow.of(set_name, sample_id, ids, ids + 1, values)


def write(path: Path, rows: list[FileRow], **metadata: str) -> None:
    with RowWriter(path, FIELDS, metadata) as writer:
        for row in rows:
            writer.write(row)


def assert_same(found: FileRow, expected: FileRow) -> None:
    assert (found.set_name, found.sample_id) == (expected.set_name, expected.sample_id)
    np.testing.assert_equal(found.mean_loss, expected.mean_loss)
    for left, right in ((found.token_ids, expected.token_ids), (found.labels, expected.labels)):
        assert left.dtype == np.int64 and np.array_equal(left, right)
    assert list(found.values) == list(expected.values)
    for name, array in expected.values.items():
        assert found.values[name].dtype == np.float32 and np.array_equal(found.values[name], array, equal_nan=True)


@suffixes
def test_rows_come_back_as_they_were(tmp_path: Path, suffix: str) -> None:
    rows = [make_row(0, 3), make_row(1, 1), make_row(7, 40), make_row(0, 5, "other")]
    path = tmp_path / f"out{suffix}"
    write(path, rows, tokenizer="somewhere")
    file = TokenFile(path)
    assert file.metadata == ({"tokenizer": "somewhere"} if suffix == ".parquet" else {})
    for found, expected in zip(file.rows(), rows, strict=True):
        assert_same(found, expected)
    assert [path.name for path in tmp_path.iterdir()] == [path.name]


def test_the_columns_and_their_types(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    write(tmp_path / "out.parquet", [make_row(0, 3)])
    schema = pq.read_schema(tmp_path / "out.parquet")
    ids, values = "list<element: int64>", "list<element: float>"
    assert dict(zip(schema.names, map(str, schema.types), strict=True)) == {
        "sample_id": "int64",
        "set": "string",
        "token_ids": ids,
        "labels": ids,
        **dict.fromkeys(FIELDS, values),
        "mean_loss": "double",
    }
    write(tmp_path / "out.jsonl", [make_row(0, 3)])
    assert list(json.loads((tmp_path / "out.jsonl").read_text())) == schema.names


def test_the_mean_loss_is_weighted_and_untouched_by_what_is_not_trained() -> None:
    losses = [1.0, 2.0, math.nan, 4.0]
    values = {"loss_mask": [1.0, 0.5, 0.0, 0.0], "logprobs": losses, "elementwise_loss": losses}
    assert FileRow.of("s", 0, [1] * 4, [1] * 4, values).mean_loss == pytest.approx(2.0 / 1.5)
    values["loss_mask"] = [0.0, 0.0, 1.0, 0.0]
    assert math.isnan(FileRow.of("s", 0, [1] * 4, [1] * 4, values).mean_loss)
    values["loss_mask"] = [0.0] * 4
    assert math.isnan(FileRow.of("s", 0, [1] * 4, [1] * 4, values).mean_loss)


def test_row_groups_are_written_as_rows_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    monkeypatch.setattr(token_file, "POSITIONS_IN_GROUP", 100)
    path = tmp_path / "out.parquet"
    rows = [make_row(i, 30) for i in range(10)]
    with RowWriter(path, FIELDS) as writer:
        for row in rows:
            writer.write(row)
            assert len(writer._format._rows) < 4, "rows pile up in memory"
    assert pq.ParquetFile(path).num_row_groups == 3
    for found, expected in zip(TokenFile(path).rows(), rows, strict=True):
        assert_same(found, expected)


@suffixes
def test_an_interrupted_file_is_not_there(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out{suffix}"
    path.write_text("what was there before")
    with pytest.raises(RuntimeError), RowWriter(path, FIELDS) as writer:
        writer.write(make_row(0, 3))
        assert path.read_text() == "what was there before"
        raise RuntimeError
    assert path.read_text() == "what was there before"
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_sample_written_twice_or_out_of_order_is_our_own_mistake(tmp_path: Path) -> None:
    for second in (3, 2):
        with pytest.raises(AssertionError, match="out of order"), RowWriter(tmp_path / "o.jsonl", FIELDS) as writer:
            writer.write(make_row(3, 2))
            writer.write(make_row(second, 2))
    write(tmp_path / "two_sets.jsonl", [make_row(3, 2), make_row(3, 2, "other")])


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("none.jsonl", None, "is not a file"),
        ("x.csv", "a,b", "has no known kind of file"),
        ("x.parquet", "no parquet", "cannot be read"),
        ("x.jsonl", "{\n", "line 1: not a row"),
        ("x.jsonl", "[1]\n", "line 1: not a row"),
        ("x.jsonl", "{}\n", "row 0: no row of per-token outputs"),
        ("x.jsonl", json.dumps(UNEVEN), "lengths [1, 2]"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, content: str | None, part: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError) as error:
        list(TokenFile(tmp_path / name).rows())
    assert part in str(error.value) and name in str(error.value)
