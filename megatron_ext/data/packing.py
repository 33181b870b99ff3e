"""Which sequences share a row: bin packing over lengths. Pure functions of their arguments, so that a resumed run packs
as the first one did. Owns neither the order in which samples are seen (loader.py) nor tensors (batch.py).
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace


def aligned(length: int, multiple: int) -> int:
    """What a sequence takes of a row: its length rounded up to a multiple, and at least one."""
    return max(1, -(-length // multiple)) * multiple


def pack(lengths: Sequence[int], *, capacity: int, multiple: int = 1, rows_multiple: int = 1) -> list[list[int]]:
    """Put sequences into as few rows as best-fit decreasing needs, rounded up to a multiple of `rows_multiple`.

    Rows that the rounding adds are used too: the sequences are spread evenly if that makes the longest row shorter.

    Args:
        lengths: of the sequences, each of which takes `aligned(length, multiple)` positions.
        capacity: positions of a row.

    Returns:
        Indices into `lengths`, each exactly once; ascending in a row, rows by their first; rows may be empty.
    """
    sizes = [aligned(length, multiple) for length in lengths]
    assert all(size <= capacity for size in sizes), f"a sequence of {max(sizes)} does not fit a row of {capacity}"
    longest_first = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    rows = _best_fit(sizes, longest_first, capacity)
    num_rows = -(-len(rows) // rows_multiple) * rows_multiple
    evenly = _spread(sizes, longest_first, num_rows)
    if _longest(sizes, evenly) < _longest(sizes, rows):  # which also says that it fits
        rows = evenly
    rows = sorted(sorted(row) for row in rows if row)
    return rows + [[] for _ in range(num_rows - len(rows))]


def count_fitting(lengths: Iterable[int], *, capacity: int, multiple: int = 1, num_rows: int) -> int:
    """How many of the first sequences go into `num_rows` rows, each into the first row that still has room."""
    room = [capacity] * num_rows
    count = 0
    for length in lengths:
        size = aligned(length, multiple)
        row = next((row for row, left in enumerate(room) if left >= size), None)
        if row is None:
            break
        room[row] -= size
        count += 1
    return count


def _best_fit(sizes: Sequence[int], order: Iterable[int], capacity: int) -> list[list[int]]:
    """Each sequence into the fullest row that has room for it."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (positions left, row), ascending
    for index in order:
        place = bisect_left(room, (sizes[index], -1))
        left, row = room.pop(place) if place < len(room) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        insort(room, (left - sizes[index], row))
    return rows


def _spread(sizes: Sequence[int], order: Iterable[int], num_rows: int) -> list[list[int]]:
    """Each sequence into the row that is shortest so far, whatever fits."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    filled = [(0, row) for row in range(num_rows)]
    heapify(filled)
    for index in order:
        length, row = filled[0]
        rows[row].append(index)
        heapreplace(filled, (length + sizes[index], row))
    return rows


def _longest(sizes: Sequence[int], rows: Iterable[Iterable[int]]) -> int:
    return max((sum(sizes[index] for index in row) for row in rows), default=0)
