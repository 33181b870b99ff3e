"""The file of per-token outputs: one row per sequence, as Parquet or as JSON lines, written row by row and read the
same way, so that neither side holds the whole of it. Owns the columns and the formats; what a row says is the caller's.

Columns: sample_id, set, token_ids, labels, loss_mask, logprobs, elementwise_loss, one for each further per-token array,
mean_loss. `labels[t]` is the target of position t, and every list has one entry for each position. NaN is kept as NaN.
Parquet also carries `metadata` (which model, which tokenizer). Imports neither torch nor megatron.core.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

Array = np.ndarray

WHOLE_NUMBERS = ("token_ids", "labels")
REQUIRED_VALUES = ("loss_mask", "logprobs", "elementwise_loss")
METADATA_KEY = b"megatron_ext"
POSITIONS_IN_GROUP = 1 << 18  # about 10 MB
ROWS_IN_GROUP = 4096


@dataclass(frozen=True)
class FileRow:
    """One sequence. `values` holds loss_mask, logprobs, elementwise_loss and any further array by name."""

    set_name: str
    sample_id: int
    token_ids: Array  # [length] int64
    labels: Array  # [length] int64
    values: dict[str, Array]  # [length] float32 each
    mean_loss: float = field(default=math.nan)

    @classmethod
    def of(cls, set_name: str, sample_id: int, token_ids: Any, labels: Any, values: Mapping[str, Any]) -> Self:
        """A row with its mean loss: of elementwise_loss, weighted by loss_mask."""
        arrays = {name: np.asarray(array, dtype=np.float32) for name, array in values.items()}
        mask, losses = (arrays[name].astype(np.float64) for name in ("loss_mask", "elementwise_loss"))
        weighted = np.where(mask != 0, losses, 0.0) * mask  # where before the product: 0 * NaN is NaN
        mean_loss = float(weighted.sum() / mask.sum()) if mask.sum() else math.nan
        ids = (np.asarray(array, dtype=np.int64) for array in (token_ids, labels))
        return cls(set_name, sample_id, *ids, arrays, mean_loss)


class Format(Protocol):
    """Writes rows to one file."""

    def write(self, row: FileRow) -> None: ...

    def close(self) -> None: ...


class JsonLinesFormat:
    def __init__(self, path: Path, fields: Sequence[str]) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._fields = fields

    def write(self, row: FileRow) -> None:
        record = {
            "sample_id": row.sample_id,
            "set": row.set_name,
            "token_ids": row.token_ids.tolist(),
            "labels": row.labels.tolist(),
            **{name: row.values[name].tolist() for name in self._fields},
            "mean_loss": row.mean_loss,
        }
        self._file.write(json.dumps(record) + "\n")  # NaN becomes NaN, which Python's json and pandas read back

    def close(self) -> None:
        self._file.close()


class ParquetFormat:
    """Keeps the rows of one row group and writes it when it is full."""

    def __init__(self, path: Path, fields: Sequence[str], metadata: Mapping[str, Any]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = [("sample_id", pa.int64()), ("set", pa.string())]
        columns += [(name, pa.list_(pa.int64())) for name in WHOLE_NUMBERS]
        columns += [(name, pa.list_(pa.float32())) for name in fields]
        columns += [("mean_loss", pa.float64())]
        self._arrow = pa
        self._schema = pa.schema(columns, metadata={METADATA_KEY: json.dumps(dict(metadata)).encode()})
        self._fields = fields
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[FileRow] = []
        self._positions = 0

    def write(self, row: FileRow) -> None:
        self._rows.append(row)
        self._positions += len(row.token_ids)
        if self._positions >= POSITIONS_IN_GROUP or len(self._rows) >= ROWS_IN_GROUP:
            self._flush()

    def close(self) -> None:
        try:
            self._flush()
        finally:
            self._writer.close()

    def _flush(self) -> None:
        if not self._rows:
            return
        pa, rows = self._arrow, self._rows
        offsets = np.cumsum([0, *(len(row.token_ids) for row in rows)], dtype=np.int32)

        def lists(arrays: list[Array]) -> Any:
            return pa.ListArray.from_arrays(offsets, np.concatenate(arrays))

        columns = [pa.array([row.sample_id for row in rows]), pa.array([row.set_name for row in rows])]
        columns += [lists([row.token_ids for row in rows]), lists([row.labels for row in rows])]
        columns += [lists([row.values[name] for row in rows]) for name in self._fields]
        columns += [pa.array([row.mean_loss for row in rows], pa.float64(), from_pandas=False)]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=self._schema))
        self._rows, self._positions = [], 0


class RowWriter:
    """Writes one file: under another name at first, and under its own when the `with` block ends without an error.

    Args:
        path: ends with .parquet or .jsonl.
        fields: names of every row's `values`, in the order of the columns.
        metadata: kept in a Parquet file; JSON lines have no place for it.
    """

    def __init__(self, path: str | Path, fields: Sequence[str], metadata: Mapping[str, Any] | None = None) -> None:
        assert set(REQUIRED_VALUES) <= set(fields), f"{REQUIRED_VALUES} are part of every row"
        self.path = Path(path)
        self._temporary = temporary_path(self.path)
        self._last: dict[str, int] = {}  # the newest sample of each set
        self._format: Format = (
            ParquetFormat(self._temporary, fields, metadata or {})
            if self.path.suffix == ".parquet"
            else JsonLinesFormat(self._temporary, fields)
        )

    def write(self, row: FileRow) -> None:
        """Append one row; of each set the sample ids ascend, so that none is there twice."""
        assert row.sample_id > self._last.get(row.set_name, -1), f"sample {row.sample_id} comes out of order"
        self._last[row.set_name] = row.sample_id
        self._format.write(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._format.close()
            if error is None:
                with self._temporary.open("rb+") as file:
                    os.fsync(file.fileno())
                os.replace(self._temporary, self.path)
        finally:
            self._temporary.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """Where a file is written until it is complete: in the same folder, so that it can be renamed."""
    return path.with_name(path.name + ".incomplete")


class TokenFile:
    """Reads such a file.

    Raises:
        ValueError: it is missing, of another kind, or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        if not self.path.is_file():
            raise ValueError(f"{path} is not a file; give one that was written with --per-token-outputs")
        if self.path.suffix not in (".parquet", ".jsonl"):
            raise ValueError(f"{path} has no known kind of file; give a .parquet or .jsonl file")
        if self.path.suffix == ".parquet":
            self._open_parquet()

    def rows(self) -> Iterator[FileRow]:
        """Every row, in the order of the file; a few are in memory at a time."""
        records = self._parquet_records() if self.path.suffix == ".parquet" else self._json_records()
        for number, record in enumerate(records):
            try:
                lists = {name: values for name, values in record.items() if isinstance(values, list | np.ndarray)}
                row = FileRow(
                    set_name=record["set"],
                    sample_id=int(record["sample_id"]),
                    token_ids=np.asarray(lists.pop("token_ids"), dtype=np.int64),
                    labels=np.asarray(lists.pop("labels"), dtype=np.int64),
                    values={name: np.asarray(values, dtype=np.float32) for name, values in lists.items()},
                    mean_loss=float(record["mean_loss"]),
                )
                lengths = {len(row.labels), *map(len, row.values.values()), len(row.token_ids)}
                if len(lengths) != 1 or not set(REQUIRED_VALUES) <= row.values.keys():
                    raise ValueError(f"lists of {len(row.values)} values have the lengths {sorted(lengths)}")
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{self.path}, row {number}: no row of per-token outputs ({error!r})") from None
            yield row

    def _open_parquet(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            self._parquet = pq.ParquetFile(self.path)
            stored = self._parquet.schema_arrow.metadata or {}
            self.metadata = json.loads(stored.get(METADATA_KEY, b"{}"))
        except (pa.ArrowInvalid, OSError, ValueError) as error:
            raise ValueError(f"{self.path} cannot be read ({error}); it is no complete Parquet file") from None

    def _parquet_records(self) -> Iterator[dict[str, Any]]:
        for batch in self._parquet.iter_batches(batch_size=32):
            names = batch.schema.names
            for i in range(batch.num_rows):
                yield {name: _plain(batch.column(name)[i]) for name in names}

    def _json_records(self) -> Iterator[dict[str, Any]]:
        with self.path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise ValueError("it is no object")
                except ValueError as error:
                    raise ValueError(f"{self.path}, line {number}: not a row ({error})") from None
                yield record


def _plain(scalar: Any) -> Any:
    """A list as an array, without a Python object for every number."""
    values = getattr(scalar, "values", None)
    return scalar.as_py() if values is None else values.to_numpy(zero_copy_only=False)
