"""The store of what a teacher said: for every position of every sample its k most likely tokens, their
log-probabilities and the logarithm of what all other tokens have together. Owns the files; what goes in and comes out
is numpy arrays.

A store is a directory: `header.json`, and flat little-endian files that are read through memory maps, so that several
ranks of a machine share one copy and nothing is loaded that is not used. Samples are found by a digest of their tokens,
in whatever order, packing, data set or layout they come: a store cannot be used for other tokens.
"""

import functools
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

FORMAT = 1
HEADER = "header.json"
BLOCK_BYTES = 2**22  # what one checksum covers
_KIND = "megatron_ext teacher cache"
_ENTRIES = {
    "top_k": int,
    "temperature": float,
    "vocab_size": int,
    "teacher_vocab_size": int,
    "teacher": dict,
    "data": list,
    "samples": int,
    "tokens": int,
    "arrays": dict,
}
_REMEDY = "write it again with scripts/cache_teacher.py"


class Samples(Protocol):
    """What is asked of a data set; SFTDataset is one."""

    path: str
    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...  # .input_ids


@dataclass(frozen=True)
class StoreFacts:
    """What a store was made from and for.

    teacher: which teacher, as `run_folder.teacher_settings` describes it.
    teacher_vocab_size: of the teacher alone.
    vocab_size: token ids that the probabilities are over, those that teacher and student share.
    """

    top_k: int
    temperature: float
    vocab_size: int
    teacher_vocab_size: int
    teacher: Mapping[str, Any]


def sample_digest(input_ids: Sequence[int] | np.ndarray) -> int:
    """64 bits that stand for a sample's input tokens; of a million samples, two share them once in 10^7 times."""
    tokens = np.ascontiguousarray(input_ids, dtype="<i4")
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), "little")


class TeacherCache:
    """A store opened for reading. `verify` compares its content with the checksums, which takes a pass over it.

    Raises:
        ValueError: there is no store at the path, or it is truncated, altered or of another version.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        header = self._read_header()
        self.facts = StoreFacts(
            header["top_k"],
            header["temperature"],
            header["vocab_size"],
            header["teacher_vocab_size"],
            header["teacher"],
        )
        self.num_tokens: int = header["tokens"]
        self.data: list[dict[str, Any]] = header["data"]
        self._arrays: dict[str, Any] = header["arrays"]
        samples, tokens, k = header["samples"], header["tokens"], self.facts.top_k
        self._digests = self._map("digests", (samples,))
        self._offsets = self._map("offsets", (samples + 1,))
        self._ids = self._map("ids", (tokens, k))
        self._log_probabilities = self._map("log_probabilities", (tokens, k))
        self._log_tail = self._map("log_tail", (tokens,))

    @property
    def vocab_size(self) -> int:
        """Token ids that the probabilities are over."""
        return self.facts.vocab_size

    @property
    def description(self) -> str:
        facts = self.facts
        return f"{self.directory}: top {facts.top_k} at temperature {facts.temperature} of {self.num_tokens} tokens"

    def _damaged(self, reason: str) -> ValueError:
        return ValueError(f"teacher_cache {self.directory} {reason}; {_REMEDY}")

    def _read_header(self) -> dict[str, Any]:
        path = self.directory / HEADER
        try:
            header = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(
                f"teacher_cache {self.directory} has no {HEADER}, so it is no store, or one whose writing was cut off; "
                "give a directory written by scripts/cache_teacher.py"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise self._damaged(f"is damaged: {HEADER} cannot be read ({error})") from None
        if not isinstance(header, dict) or header.get("kind") != _KIND:
            raise self._damaged(f"is no teacher's store: {HEADER} is of another kind")
        if header.get("format") != FORMAT:
            raise self._damaged(f"has format {header.get('format')}, this version reads {FORMAT}")
        checksum = header.pop("checksum", None)
        wrong = [name for name, kind in _ENTRIES.items() if not isinstance(header.get(name), kind)]
        if wrong or checksum != _checksum_of(header):
            raise self._damaged(f"is damaged: {HEADER} was altered")
        return header

    def _map(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        entry = self._arrays[name]
        path, dtype = self.directory / entry["file"], np.dtype(entry["dtype"])
        expected = math.prod(shape) * dtype.itemsize
        try:
            size = path.stat().st_size
        except OSError as error:
            raise self._damaged(f"is incomplete: {entry['file']} is missing ({error.strerror})") from None
        if size != expected:
            raise self._damaged(f"is truncated: {entry['file']} has {size} bytes, not {expected}")
        return np.memmap(path, dtype=dtype, mode="r", shape=shape)

    def verify(self, part: int = 0, parts: int = 1) -> str | None:
        """Compare blocks part, part + parts, ... of all files with their checksums; what is wrong, or None."""
        blocks = [
            (entry["file"], number, checksum)
            for entry in self._arrays.values()
            for number, checksum in enumerate(entry["checksums"])
        ]
        for file, number, checksum in blocks[part::parts]:
            with (self.directory / file).open("rb") as stream:
                stream.seek(number * BLOCK_BYTES)
                if _checksum(stream.read(BLOCK_BYTES)) != checksum:
                    return str(self._damaged(f"is damaged: block {number} of {file} does not have its checksum"))
        return None

    def check_samples(self, sets: Iterable[tuple[str, Samples]]) -> None:
        """Check that every sample of these data sets is in the store.

        Raises:
            ValueError: naming the data set, how many samples are missing and the first of them.
        """
        known = {entry["fingerprint"] for entry in self.data}
        for name, dataset in sets:
            if dataset.fingerprint in known:
                continue
            digests = np.array([sample_digest(dataset[index].input_ids) for index in range(len(dataset))], dtype="<u8")
            missing = np.flatnonzero(self._rows(digests) < 0)
            if len(missing):
                made_for = ", ".join(f"{entry['name']} ({entry['path']})" for entry in self.data)
                raise ValueError(
                    f"teacher_cache {self.directory} was made for other tokens: {len(missing)} of {len(dataset)} "
                    f"samples of {name} ({dataset.path}) are not in it, the first is sample {missing[0]}; it was made "
                    f"for {made_for}; write one for this data, tokenizer, chat template and seq_length with "
                    "scripts/cache_teacher.py"
                )

    def _rows(self, digests: np.ndarray) -> np.ndarray:
        """Row of each sample, -1 for one that is not there."""
        rows = np.searchsorted(self._digests, digests)
        inside = np.minimum(rows, len(self._digests) - 1)
        return np.where((rows < len(self._digests)) & (self._digests[inside] == digests), inside, -1)

    def read(self, input_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of one sample: ids [s, k] int64 (most likely first), log-probabilities [s, k] and log tail [s], both fp32.

        Raises:
            ValueError: it is not in the store.
        """
        row = int(self._rows(np.array([sample_digest(input_ids)], dtype="<u8"))[0])
        own = slice(int(self._offsets[row]), int(self._offsets[row + 1]))
        if row < 0 or own.stop - own.start != len(input_ids):
            raise ValueError(f"teacher_cache {self.directory} does not hold a sample of these {len(input_ids)} tokens")
        return (
            self._ids[own].astype(np.int64),
            self._log_probabilities[own].astype(np.float32),
            self._log_tail[own].astype(np.float32),
        )


class CacheWriter:
    """Writes a store, from several processes at once: all make one with the same arguments, one of them calls `create`
    first and `finish` last, with a barrier behind and before. Until then the store has another name.
    """

    def __init__(self, directory: str | Path, facts: StoreFacts, sets: Iterable[tuple[str, Samples]]) -> None:
        self.directory = Path(directory)
        self.temporary = self.directory.with_name(self.directory.name + ".incomplete")
        self.facts = facts
        self._sets = list(sets)
        lengths: dict[int, int] = {}
        self._owners: dict[int, tuple[str, int]] = {}  # of samples that several sets have, one writes
        for name, dataset in self._sets:
            for index in range(len(dataset)):
                input_ids = dataset[index].input_ids
                digest = sample_digest(input_ids)
                assert lengths.setdefault(digest, len(input_ids)) == len(input_ids), "two samples share a digest"
                self._owners.setdefault(digest, (name, index))
        self._digests = np.array(sorted(lengths), dtype="<u8")
        self._offsets = np.cumsum([0, *(lengths[digest] for digest in self._digests.tolist())], dtype="<i8")
        self._maps: dict[str, np.memmap] = {}

    @property
    def num_tokens(self) -> int:
        return int(self._offsets[-1])

    def _layout(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        tokens, k = self.num_tokens, self.facts.top_k
        return {
            "digests": ("<u8", self._digests.shape),
            "offsets": ("<i8", self._offsets.shape),
            "ids": ("<u2" if self.facts.vocab_size <= 2**16 else "<i4", (tokens, k)),
            # rounded to 16 bits they cost up to 2e-3 nats a token, and a divergence can fall below 0
            "log_probabilities": ("<f4", (tokens, k)),
            "log_tail": ("<f4", (tokens,)),
        }

    def create(self) -> None:
        """Make the files, in full length; what a cut-off call has left is removed."""
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir(parents=True)
        for name, (dtype, shape) in self._layout().items():
            with (self.temporary / f"{name}.bin").open("wb") as file:
                # reserved now: a full disk would end a process that writes through a map without a word
                os.posix_fallocate(file.fileno(), 0, math.prod(shape) * np.dtype(dtype).itemsize)
        self._map("digests")[:] = self._digests
        self._map("offsets")[:] = self._offsets

    def _map(self, name: str) -> np.memmap:
        if name not in self._maps:
            dtype, shape = self._layout()[name]
            self._maps[name] = np.memmap(self.temporary / f"{name}.bin", dtype=dtype, mode="r+", shape=shape)
        return self._maps[name]

    def write(
        self,
        name: str,
        index: int,
        input_ids: np.ndarray,
        ids: np.ndarray,  # [s, k], most likely first
        log_probabilities: np.ndarray,  # [s, k]
        log_tail: np.ndarray,  # [s]
    ) -> None:
        """One sample of the set `name`."""
        digest = sample_digest(input_ids)
        if self._owners[digest] != (name, index):
            return
        row = int(np.searchsorted(self._digests, np.uint64(digest)))
        own = slice(int(self._offsets[row]), int(self._offsets[row + 1]))
        self._map("ids")[own] = ids
        self._map("log_probabilities")[own] = log_probabilities
        self._map("log_tail")[own] = log_tail

    def flush(self) -> None:
        for array in self._maps.values():
            array.flush()

    def finish(self) -> None:
        """Write the checksums and give the store its name; every process has flushed by then."""
        self.flush()
        arrays = {
            name: {"file": f"{name}.bin", "dtype": dtype, "checksums": _file_checksums(self.temporary / f"{name}.bin")}
            for name, (dtype, _) in self._layout().items()
        }
        header: dict[str, Any] = {
            "kind": _KIND,
            "format": FORMAT,
            **vars(self.facts),
            "data": [
                {"name": name, "path": dataset.path, "fingerprint": dataset.fingerprint, "samples": len(dataset)}
                for name, dataset in self._sets
            ],
            "samples": len(self._digests),
            "tokens": self.num_tokens,
            "arrays": arrays,
        }
        header["checksum"] = _checksum_of(header)
        with (self.temporary / HEADER).open("w", encoding="utf-8") as file:
            json.dump(header, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.temporary, self.directory)


def check_new_store(directory: str | Path) -> None:
    """Raises ValueError if something is at the path already: stores are never overwritten."""
    if Path(directory).exists():
        raise ValueError(f"--output {directory} exists already; give a new directory, or remove it")


@functools.cache
def stored_teacher(directory: str) -> Mapping[str, Any]:
    """Which teacher a store is of; see `TeacherCache`."""
    return TeacherCache(directory).facts.teacher


@functools.cache
def weights_fingerprint(path: str | Path, load: str | Path | None = None) -> str:
    """A digest that changes with the model: of its config, and of the size and evenly spread parts of each weight file.

    Args:
        path: a Hugging Face directory, a config.json or a .gguf file.
        load: the directory of a Megatron checkpoint that holds the weights instead.
    """
    path = Path(path)
    files = [path]
    if path.is_dir():
        files = [path / "config.json", *(sorted(path.glob("*.safetensors")) if load is None else [])]
    if load is not None:
        files += sorted(file for file in Path(load).iterdir() if file.is_file() and file.name != "run.json")
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size, part = file.stat().st_size, 4096
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            for number in range(64):
                stream.seek(max(0, size - part) * number // 63)
                digest.update(stream.read(part))
    return digest.hexdigest()


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _checksum_of(header: Mapping[str, Any]) -> str:
    return _checksum(json.dumps(header, sort_keys=True).encode())


def _file_checksums(path: Path) -> list[str]:
    checksums = []
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            checksums.append(_checksum(block))
    return checksums
