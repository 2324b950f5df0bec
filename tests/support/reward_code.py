"""User-supplied reward functions, for tests of graders that import them."""

from collections.abc import Iterator

import pytest

from grpo_dist.rewards.pool import GraderPool


def code_directory(**modules: str):
    """Return a fixture for the test file: a directory with these modules, by name."""

    @pytest.fixture(scope="module")
    def code(tmp_path_factory: pytest.TempPathFactory) -> str:
        directory = tmp_path_factory.mktemp("code")
        for name, text in modules.items():
            (directory / f"{name}.py").write_text(text)
        return str(directory)

    return code


def grader_pool(num_workers: int, timeout_s: float):
    """Return a fixture for the test file: graders that can import its `code`."""

    @pytest.fixture(scope="module")
    def pool(code: str) -> Iterator[GraderPool]:
        with GraderPool(num_workers, timeout_s=timeout_s, memory_mb=512, code_paths=[code]) as pool:
            yield pool

    return pool
