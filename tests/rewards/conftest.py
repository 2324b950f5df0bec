"""Graders for tests of rewards without code of users."""

from collections.abc import Iterator

import pytest

from grpo_dist.rewards.pool import GraderPool
from tests.support.patience import HANG_S


@pytest.fixture(scope="package")
def pool() -> Iterator[GraderPool]:
    with GraderPool(2, timeout_s=HANG_S) as pool:
        yield pool
