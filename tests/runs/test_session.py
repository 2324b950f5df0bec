"""Begin and end of a training session."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_dist.errors import UserError
from grpo_dist.runs.session import _check_shared, _finish
from tests.support import fakes


class Exports:
    """Stands in for the policy and the tracker."""

    def __init__(self):
        self.warnings = []

    async def export(self, directory, *, tokenizer_dir):
        directory.mkdir()

    def warn(self, message):
        self.warnings.append(message)


@pytest.mark.parametrize("linked", [True, False])
def test_what_replaced_the_model_during_the_run_is_kept(tmp_path, linked):
    if linked:
        (tmp_path / "model").symlink_to("nothing")
    else:
        (tmp_path / "model").mkdir()
        (tmp_path / "model/model-q4.gguf").write_text("kept")
    fake = Exports()
    inputs = SimpleNamespace(model_dir=Path("start"))
    run = SimpleNamespace(config=fakes.config(), directory=tmp_path, tracker=fake, inputs=inputs)
    asyncio.run(_finish(run, SimpleNamespace(policy=fake)))
    backup = tmp_path / "model.old-1"
    assert backup.is_symlink() if linked else (backup / "model-q4.gguf").read_text() == "kept"
    assert (tmp_path / "model").is_dir() and f"it is now {backup}" in fake.warnings[0]


@pytest.mark.parametrize("shared", [True, False])
def test_a_run_directory_that_a_rank_does_not_see_is_refused_at_the_start(tmp_path, shared):
    looked_at = []

    async def check_sees(path):
        looked_at.append(path)
        assert path.parent == tmp_path and path.exists()
        if not shared:
            raise ValueError("node b does not see it")

    def check():
        asyncio.run(_check_shared(tmp_path, SimpleNamespace(check_sees=check_sees)))

    if shared:
        check()
        check()
    else:
        with pytest.raises(UserError, match="node b"):
            check()
    assert len({*looked_at}) == 2 - (not shared), "a node may have an old file of the same name"
    assert not list(tmp_path.iterdir())
