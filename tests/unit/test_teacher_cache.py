"""The store of a teacher's words: what is written is what is read, and whatever is wrong with a store is said."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from megatron_ext import teacher_cache
from megatron_ext.teacher_cache import (
    CacheWriter,
    StoreFacts,
    TeacherCache,
    check_new_store,
    sample_digest,
    weights_fingerprint,
)

K = 4


@dataclass
class Sample:
    input_ids: list[int]


@dataclass
class Samples:
    """A data set of given rows."""

    path: str
    rows: list[list[int]]
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        self.fingerprint = f"hash of {self.rows}"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.rows[index])


TRAIN = Samples("train.jsonl", [[5, 6, 7], [1], [2, 3], [9, 9, 9, 9]])
HELD_OUT = Samples("held_out.jsonl", [[8, 8], [5, 6, 7]])  # the second is in the training set too
SETS = [("train", TRAIN), ("validation", HELD_OUT)]


def facts(vocab_size: int = 100, **changes: object) -> StoreFacts:
    values = {"top_k": K, "temperature": 2.0, "vocab_size": vocab_size, "teacher_vocab_size": vocab_size}
    return StoreFacts(**(values | {"teacher": {"weights": "abc", "bf16": False}} | changes))


def words(row: list[int], vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a teacher says of a row, here: numbers that follow from its tokens."""
    tokens = np.array(row)
    ids = (tokens[:, None] * 7919 + np.arange(K)) % vocab_size
    log_probabilities = -np.arange(1, K + 1, dtype=np.float32) * np.float32(1 / 3) - tokens[:, None].astype(np.float32)
    return ids, log_probabilities, -tokens.astype(np.float32) / 7


def write(directory: Path, vocab_size: int = 100) -> Path:
    writer = CacheWriter(directory, facts(vocab_size), SETS)
    writer.create()
    for name, dataset in SETS:
        for index in reversed(range(len(dataset))):
            writer.write(name, index, np.array(dataset.rows[index]), *words(dataset.rows[index], vocab_size))
    assert not directory.exists(), "a store has its name before it is complete"
    writer.finish()
    return directory


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write(tmp_path / "store")


@pytest.mark.parametrize("vocab_size", [100, 2**16, 2**16 + 1, 151936])
def test_what_is_written_is_read_by_the_tokens_alone(tmp_path: Path, vocab_size: int) -> None:
    cache = TeacherCache(write(tmp_path / "store", vocab_size))
    assert cache.facts == facts(vocab_size) and cache.vocab_size == vocab_size
    assert cache.verify() is None
    assert cache.num_tokens == 3 + 1 + 2 + 4 + 2, "a sample of two sets is there once"
    for row in [*HELD_OUT.rows, *TRAIN.rows]:
        read = cache.read(np.array(row))
        assert [part.dtype for part in read] == [np.int64, np.float32, np.float32]
        for part, expected in zip(read, words(row, vocab_size), strict=True):
            np.testing.assert_array_equal(part, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_ids_take_two_bytes_where_they_can(tmp_path: Path) -> None:
    small, large = (write(tmp_path / str(size), size) / "ids.bin" for size in (2**16, 2**16 + 1))
    assert large.stat().st_size == 2 * small.stat().st_size == 4 * K * 12


def test_only_the_same_tokens_are_found(store: Path) -> None:
    cache = TeacherCache(store)
    for row in ([5, 6], [5, 6, 7, 0], [6, 5, 7], [0], []):
        with pytest.raises(ValueError, match=f"does not hold a sample of these {len(row)} tokens"):
            cache.read(np.array(row, dtype=np.int64))


def test_a_data_set_is_in_the_store_or_is_refused(store: Path) -> None:
    cache = TeacherCache(store)
    cache.check_samples(SETS)
    cache.check_samples([("validation", Samples("other.jsonl", [[9, 9, 9, 9], [8, 8]]))])  # the same samples
    with pytest.raises(ValueError) as error:
        cache.check_samples([("train", TRAIN), ("hard", Samples("hard.jsonl", [[8, 8], [8, 7], [1], [1, 1]]))])
    message = str(error.value)
    assert "2 of 4 samples of hard (hard.jsonl) are not in it, the first is sample 1" in message
    assert "it was made for train (train.jsonl), validation (held_out.jsonl); write one for this data" in message


def test_several_writers_share_the_work(tmp_path: Path) -> None:
    writers = [CacheWriter(tmp_path / "store", facts(), SETS) for _ in range(2)]
    writers[0].create()
    for number, (name, index) in enumerate((name, index) for name, data in SETS for index in range(len(data))):
        row = dict(SETS)[name].rows[index]
        writers[number % 2].write(name, index, np.array(row), *words(row, 100))
    writers[1].flush()
    writers[0].finish()
    cache = TeacherCache(tmp_path / "store")
    assert cache.verify() is None
    for row in TRAIN.rows:
        np.testing.assert_array_equal(cache.read(np.array(row))[1], words(row, 100)[1])


def test_what_a_cut_off_writer_left_is_no_store(tmp_path: Path) -> None:
    writer = CacheWriter(tmp_path / "store", facts(), SETS)
    writer.create()
    writer.flush()
    with pytest.raises(ValueError, match=r"store has no header\.json"):
        TeacherCache(tmp_path / "store")
    with pytest.raises(ValueError, match=r"store\.incomplete has no header\.json, so it is no store, or one whose"):
        TeacherCache(tmp_path / "store.incomplete")
    assert TeacherCache(write(tmp_path / "store")).verify() is None
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_nothing_is_overwritten(store: Path, tmp_path: Path) -> None:
    check_new_store(tmp_path / "new")
    with pytest.raises(ValueError, match="exists already; give a new directory, or remove it"):
        check_new_store(store)


FILES = ("digests", "offsets", "ids", "log_probabilities", "log_tail")


@pytest.mark.parametrize("file", FILES)
def test_a_truncated_or_missing_file_is_refused_at_once(store: Path, file: str) -> None:
    path = store / f"{file}.bin"
    content = path.read_bytes()
    for changed in (content[:-1], content + b"\0", b""):
        path.write_bytes(changed)
        with pytest.raises(
            ValueError, match=rf"is truncated: {file}\.bin has {len(changed)} bytes, not {len(content)};"
        ):
            TeacherCache(store)
    path.unlink()
    with pytest.raises(ValueError, match=rf"is incomplete: {file}\.bin is missing"):
        TeacherCache(store)


@pytest.mark.parametrize("file", FILES)
def test_one_changed_byte_is_found_by_the_part_that_has_its_block(
    store: Path, file: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(teacher_cache, "BLOCK_BYTES", 16)  # several blocks in these small files
    store = write(tmp_path / "blocks")
    path = store / f"{file}.bin"
    content = bytearray(path.read_bytes())
    content[17] ^= 1
    path.write_bytes(content)
    found = [TeacherCache(store).verify(part, 3) for part in range(3)]
    assert sum(problem is not None for problem in found) == 1
    (problem,) = filter(None, found)
    assert f"is damaged: block 1 of {file}.bin does not have its checksum; write it again" in problem
    assert TeacherCache(store).verify() == problem


def altered(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        header = json.loads(path.read_text())
        change(header)
        path.write_text(json.dumps(header))

    return apply


HEADERS = {  # what happens to the header, and what is said
    "not JSON": (lambda path: path.write_text("{"), r"is damaged: header\.json cannot be read"),
    "not text": (lambda path: path.write_bytes(b"\xff\xfe"), r"is damaged: header\.json cannot be read"),
    "cut": (lambda path: path.write_text(path.read_text()[:-200]), r"is damaged: header\.json cannot be read"),
    "a list": (lambda path: path.write_text("[]"), "is no teacher's store"),
    "of another kind": (altered(lambda header: header.update(kind="model")), "is no teacher's store"),
    "newer": (altered(lambda header: header.update(format=2)), "has format 2, this version reads 1"),
    "another temperature": (altered(lambda header: header.update(temperature=1.0)), "was altered"),
    "another number": (altered(lambda header: header.update(tokens=11)), "was altered"),
    "without an entry": (altered(lambda header: header.pop("samples")), "was altered"),
    "of the wrong type": (altered(lambda header: header.update(arrays=[])), "was altered"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_damaged_or_foreign_header_is_refused(store: Path, name: str) -> None:
    change, message = HEADERS[name]
    change(store / "header.json")
    with pytest.raises(ValueError, match=message):
        TeacherCache(store)


def test_digests_are_of_the_tokens_whatever_holds_them() -> None:
    assert sample_digest([1, 2, 70000]) == sample_digest(np.array([1, 2, 70000], dtype=np.int64))
    assert len({sample_digest(row) for row in ([1, 2], [2, 1], [1, 2, 0], [0, 1, 2], [1], [])}) == 6


def test_the_fingerprint_of_weights_is_that_of_their_content(tmp_path: Path) -> None:
    def model(name: str, weights: bytes = b"w" * 10000, config: str = "{}") -> Path:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(config)
        (directory / "model.safetensors").write_bytes(weights)
        return directory

    first = weights_fingerprint(model("first"))
    assert weights_fingerprint(model("moved")) == first
    assert weights_fingerprint(model("longer", b"w" * 10001)) != first
    assert weights_fingerprint(model("changed", b"w" * 9999 + b"x")) != first
    assert weights_fingerprint(model("config", config='{"a": 1}')) != first
    checkpoint = tmp_path / "iter_0000003"
    checkpoint.mkdir()
    (checkpoint / "__0_0.distcp").write_bytes(b"v" * 100)
    loaded = weights_fingerprint(tmp_path / "first", checkpoint)
    shutil.copytree(checkpoint, tmp_path / "copy")
    assert loaded != first and weights_fingerprint(tmp_path / "first", tmp_path / "copy") == loaded
