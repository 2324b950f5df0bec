"""Reward functions of users, for tests of graders that import them."""

import pytest


def code_directory(**modules: str):
    """Return a fixture of the test file: a directory with these modules, by name."""

    @pytest.fixture(scope="module")
    def code(tmp_path_factory: pytest.TempPathFactory) -> str:
        directory = tmp_path_factory.mktemp("code")
        for name, text in modules.items():
            (directory / f"{name}.py").write_text(text)
        return str(directory)

    return code
