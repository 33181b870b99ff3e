"""Shows the largest differences between two files of per-token outputs: of two layouts, of two checkpoints, or of a run
and transformers.

    python scripts/compare_outputs.py A.parquet B.parquet
    python scripts/compare_outputs.py A.parquet --hf MODEL               # transformers' values for the tokens of A
    python scripts/compare_outputs.py A.parquet B.parquet --hf MODEL     # the same, and keep them as B

It reads both files row by row and owns the comparison; the files are `megatron_ext/token_file.py`'s. Exit code 1 if the
files hold different sequences or tokens, or differ by more than --tolerance; 2 if one cannot be read.
"""

import argparse
import heapq
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout that is not installed

from megatron_ext.token_file import REQUIRED_VALUES, FileRow, RowWriter, TokenFile, temporary_path

Key = tuple[str, int]
REFERENCE = "transformers"  # metadata of a file that --hf made


@dataclass
class Position:
    """Where two values differ, and by how much."""

    difference: float
    row: FileRow
    index: int
    a: float
    b: float

    def __str__(self) -> str:
        mask = self.row.values["loss_mask"][self.index]
        return (
            f"{self.difference:.2e}  {self.row.set_name} sample {self.row.sample_id}, position {self.index} "
            f"(target {self.row.labels[self.index]}, loss_mask {mask:g}): {self.a:.9g} and {self.b:.9g}"
        )


class Column:
    """The differences of one per-token array over all sequences."""

    def __init__(self, name: str, top: int) -> None:
        self.name = name
        self.top = top
        self.count = self.one_sided = self._kept = 0
        self.total = 0.0
        self.largest = {"all": 0.0, "trained": 0.0}
        self._worst: list[tuple[float, int, Position]] = []

    def add(self, a: FileRow, b: FileRow) -> None:
        left, right = a.values[self.name].astype(np.float64), b.values[self.name].astype(np.float64)
        # equal infinities and NaN on both sides are no difference; on one side alone they are the largest
        unordered = (np.isnan(left) != np.isnan(right)) | (np.isinf(left) != np.isinf(right))
        same = (left == right) | (np.isnan(left) & np.isnan(right))
        with np.errstate(invalid="ignore"):
            difference = np.where(same, 0.0, np.where(unordered, np.inf, np.abs(left - right)))
        self.count += len(difference)
        self.one_sided += int(unordered.sum())
        self.total += float(difference[~unordered].sum())
        trained = difference[a.values["loss_mask"] != 0]
        self.largest["all"] = max(self.largest["all"], float(difference.max(initial=0.0)))
        self.largest["trained"] = max(self.largest["trained"], float(trained.max(initial=0.0)))
        for index in np.argsort(-difference, kind="stable")[: self.top].tolist():
            self._keep(Position(float(difference[index]), a, index, float(left[index]), float(right[index])))

    def _keep(self, position: Position) -> None:
        if position.difference == 0.0:
            return
        self._kept += 1
        entry = (position.difference, -self._kept, position)  # of equal ones the first stays
        if len(self._worst) < self.top:
            heapq.heappush(self._worst, entry)
        elif position.difference > self._worst[0][0]:
            heapq.heapreplace(self._worst, entry)

    def worst(self) -> list[Position]:
        return [position for _, _, position in sorted(self._worst, key=lambda entry: -entry[0])]

    def line(self) -> list[str]:
        finite = self.count - self.one_sided
        mean = self.total / finite if finite else 0.0
        largest = [f"{self.largest[kind]:.2e}" for kind in ("all", "trained")]
        return [self.name, f"{self.count:,}", *largest, f"{mean:.2e}", str(self.one_sided)]


class Comparison:
    """Two files of the same sequences, row by row."""

    def __init__(self, top: int) -> None:
        self.top = top
        self.columns: dict[str, Column] = {}
        self.sequences = 0
        self.largest_mean: tuple[float, str] = (0.0, "")
        self.other_tokens: list[Key] = []

    def add(self, a: FileRow, b: FileRow, names: Iterable[str]) -> None:
        if not (np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.labels, b.labels)):
            self.other_tokens.append((a.set_name, a.sample_id))
            return
        self.sequences += 1
        for name in names:
            self.columns.setdefault(name, Column(name, self.top)).add(a, b)
        difference = abs(a.mean_loss - b.mean_loss)
        if difference > self.largest_mean[0]:  # NaN is not: its positions are listed
            where = f"{a.set_name} sample {a.sample_id}: {a.mean_loss:.9g} and {b.mean_loss:.9g}"
            self.largest_mean = (difference, where)

    @property
    def largest(self) -> float:
        return max((column.largest["all"] for column in self.columns.values()), default=0.0)

    def report(self) -> str:
        header = ["column", "positions", "largest", "of trained", "mean", "NaN or inf on one side"]
        table = [header, *(column.line() for column in self.columns.values())]
        widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
        lines = [f"{self.sequences} sequences in both; absolute differences:"]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        if self.largest_mean[1]:
            lines.append(
                f"largest difference of a sequence's mean loss: {self.largest_mean[0]:.2e}, {self.largest_mean[1]}"
            )
        for column in self.columns.values():
            worst = column.worst()
            if worst:
                lines += ["", f"{column.name}: the largest"]
                lines += [f"  {position}" for position in worst]
        return "\n".join(lines)


def keys_of(file: TokenFile) -> list[Key]:
    return [(row.set_name, row.sample_id) for row in file.rows()]


def only(file: TokenFile, keys: set[Key]) -> Iterator[FileRow]:
    return (row for row in file.rows() if (row.set_name, row.sample_id) in keys)


def reference_rows(model_path: Path, rows: Iterable[FileRow]) -> Iterator[FileRow]:
    """The same sequences with transformers' log-probabilities, one sequence at a time in float32."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}  # read when the library is imported
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    directory, options = (
        (model_path, {}) if model_path.is_dir() else (model_path.parent, {"gguf_file": model_path.name})
    )
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True, **options)
    model.eval()
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(row.token_ids.copy())[None]).logits[0]
            every = logits.double().log_softmax(-1)  # [length, vocabulary]
            logprobs = every.gather(1, torch.from_numpy(row.labels.copy())[:, None]).squeeze(1)
        values = {
            "loss_mask": row.values["loss_mask"],
            "logprobs": logprobs.numpy(),
            "elementwise_loss": -logprobs.numpy(),
        }
        yield FileRow.of(row.set_name, row.sample_id, row.token_ids, row.labels, values)


def compared_names(a: FileRow, b: FileRow, with_reference: bool) -> list[str]:
    """The arrays that both have; transformers knows nothing of a run's losses, so of it the log-probabilities only."""
    if with_reference:
        return ["logprobs"]
    return [name for name in a.values if name in b.values]


def compare_with_transformers(a: TokenFile, arguments: argparse.Namespace) -> Comparison:
    comparison = Comparison(arguments.top)
    metadata = {"reference": REFERENCE, "hf_path": str(arguments.hf), "tokenizer": a.metadata.get("tokenizer")}
    keeps = arguments.b is not None
    with RowWriter(arguments.b, REQUIRED_VALUES, metadata) if keeps else nullcontext() as writer:
        for ours, theirs in zip(a.rows(), reference_rows(arguments.hf, a.rows()), strict=True):
            comparison.add(ours, theirs, ["logprobs"])
            if writer is not None:
                writer.write(theirs)
    if keeps:
        print(f"wrote {arguments.b}")
    return comparison


def compare_files(a: TokenFile, b: TokenFile, top: int) -> tuple[Comparison, bool]:
    """The comparison of the sequences that both have, and whether those are all."""
    comparison = Comparison(top)
    keys_a, keys_b = keys_of(a), keys_of(b)
    both = set(keys_a) & set(keys_b)
    if [key for key in keys_a if key in both] != [key for key in keys_b if key in both]:
        raise ValueError(f"{a.path} and {b.path} hold their sequences in different orders; evaluate the same sets")
    for file, keys in ((a, keys_a), (b, keys_b)):
        missing = [key for key in keys if key not in both]
        if missing:
            shown = ", ".join(f"{name} sample {number}" for name, number in missing[:5])
            print(f"only in {file.path}: {len(missing)} sequences ({shown}{' ...' if len(missing) > 5 else ''})")
    with_reference = REFERENCE in (a.metadata.get("reference"), b.metadata.get("reference"))
    alone: dict[Path, set[str]] = {a.path: set(), b.path: set()}
    for ours, theirs in zip(only(a, both), only(b, both), strict=True):
        comparison.add(ours, theirs, compared_names(ours, theirs, with_reference))
        alone[a.path] |= ours.values.keys() - theirs.values.keys()
        alone[b.path] |= theirs.values.keys() - ours.values.keys()
    for path, names in alone.items():
        if names:
            print(f"not compared, as only {path} has them: {', '.join(sorted(names))}")
    return comparison, len(both) == len(keys_a) == len(keys_b)


def check_target(path: Path, overwrite: bool) -> None:
    """A file that --hf writes: known to be possible before a model is loaded."""
    if path.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"{path} has no known kind of file; let its name end with .parquet or .jsonl")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already; give another path, or replace it with --overwrite")
    try:
        temporary_path(path).open("wb").close()
        temporary_path(path).unlink()
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error}); give another path") from None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("a", metavar="A", type=Path, help="file written with --per-token-outputs")
    parser.add_argument("b", metavar="B", type=Path, nargs="?", help="another one; with --hf the file to write")
    parser.add_argument("--hf", metavar="MODEL", type=Path, help="Hugging Face directory or .gguf file to compare with")
    parser.add_argument("--top", type=int, default=5, help="positions shown of each column (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, help="largest difference that is still success")
    parser.add_argument("--overwrite", action="store_true", help="with --hf: replace B if it exists")
    arguments = parser.parse_args()
    if arguments.b is None and arguments.hf is None:
        parser.error("nothing to compare A with; give a second file, or --hf MODEL")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    complete = True
    try:
        a = TokenFile(arguments.a)
        if arguments.hf is not None:
            if not arguments.hf.exists():
                raise ValueError(f"--hf {arguments.hf} does not exist; give a Hugging Face directory or a .gguf file")
            if arguments.b is not None:
                check_target(arguments.b, arguments.overwrite)
            comparison = compare_with_transformers(a, arguments)
        else:
            comparison, complete = compare_files(a, TokenFile(arguments.b), arguments.top)
    except (ValueError, OSError) as error:
        print(f"compare_outputs: {error}", file=sys.stderr)
        return 2
    print(comparison.report())
    for name, number in comparison.other_tokens[:5]:
        print(f"{name} sample {number} has other tokens in the second file, and is not compared")
    if len(comparison.other_tokens) > 5:
        print(f"... and {len(comparison.other_tokens) - 5} more with other tokens")
    if arguments.tolerance is not None and comparison.largest > arguments.tolerance:
        print(f"the largest difference {comparison.largest:.2e} is above --tolerance {arguments.tolerance:g}")
        return 1
    return 0 if complete and not comparison.other_tokens else 1


if __name__ == "__main__":
    sys.exit(main())
