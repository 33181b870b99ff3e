"""One pool of ranks for all distributed tests."""

from collections.abc import Iterator

import pytest
from harness import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.stop()
