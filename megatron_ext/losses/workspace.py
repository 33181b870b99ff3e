"""Memory for products and passes, kept on a CPU for the next call.

A GPU's allocator keeps what is freed. A CPU's returns large blocks to the kernel, which clears every page of the next
one again: for the logits of a chunk that takes a thirtieth of a training step of the head, and more of a shorter call.
"""

import threading

import torch


class Workspace:
    """Memory to borrow. A block has one borrower at a time; who does not return it keeps it.

    What is kept is no more than was borrowed at once.
    """

    def __init__(self) -> None:
        self._kept: list[torch.UntypedStorage] = []  # smallest first
        self._lent = self._most_lent = 0  # bytes that were asked for
        self._lock = threading.Lock()

    def borrow(self, num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[num_rows, num_columns], with whatever is in it."""
        if device.type != "cpu":
            return torch.empty(num_rows, num_columns, dtype=dtype, device=device)
        num_bytes = num_rows * num_columns * dtype.itemsize
        with self._lock:
            large_enough = [i for i, block in enumerate(self._kept) if num_bytes <= block.nbytes()]
            block = self._kept.pop(large_enough[0] if large_enough else -1) if self._kept else None
            self._lent += num_bytes
            self._most_lent = max(self._most_lent, self._lent)
        if block is None or block.nbytes() < num_bytes:
            block = torch.UntypedStorage(num_bytes)
        return torch.empty(0, dtype=dtype).set_(block, 0, (num_rows, num_columns), (num_columns, 1))

    def give_back(self, borrowed: torch.Tensor) -> None:
        """Nothing may use it from here on."""
        if borrowed.device.type != "cpu":
            return
        with self._lock:
            self._lent -= borrowed.nbytes
            self._kept = sorted([*self._kept, borrowed.untyped_storage()], key=torch.UntypedStorage.nbytes)
            while sum(block.nbytes() for block in self._kept) > self._most_lent:
                self._kept.pop(0)


WORKSPACE = Workspace()
