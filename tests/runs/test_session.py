"""The end of a training session."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_dist.runs.session import _finish
from tests.support import fakes


class Exports:
    """A policy and a tracker."""

    def __init__(self):
        self.warnings = []

    async def export(self, directory, *, tokenizer_dir):
        directory.mkdir()

    def warn(self, message):
        self.warnings.append(message)


@pytest.mark.parametrize("linked", [True, False])
def test_what_came_into_the_place_of_the_model_during_the_run_is_kept(tmp_path, linked):
    if linked:
        (tmp_path / "model").symlink_to("nothing")
    else:
        (tmp_path / "model").mkdir()
        (tmp_path / "model/model-q4.gguf").write_text("kept")
    ours = Exports()
    inputs = SimpleNamespace(model_dir=Path("start"))
    run = SimpleNamespace(config=fakes.config(), directory=tmp_path, tracker=ours, inputs=inputs)
    asyncio.run(_finish(run, SimpleNamespace(policy=ours)))
    kept = tmp_path / "model.old-1"
    assert kept.is_symlink() if linked else (kept / "model-q4.gguf").read_text() == "kept"
    assert (tmp_path / "model").is_dir() and f"it is now {kept}" in ours.warnings[0]
