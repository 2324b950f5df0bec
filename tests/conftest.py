"""Shared fixtures. Shapes written in signatures are checked while tests run, and only then."""

from pathlib import Path

from jaxtyping import install_import_hook

install_import_hook(["grpo_dist.algorithms", "grpo_dist.logprobs", "grpo_dist.loss"], "beartype.beartype")

import pytest  # noqa: E402

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real problem sets; a test that needs them is skipped where they are not."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the real problem sets are not at {SHARED_DATA}")
    return SHARED_DATA
