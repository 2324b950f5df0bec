"""`events.jsonl` exists in every run and has the warnings from before the first step."""

import json
import re
from pathlib import Path

import pytest

from grpo_dist.cli import main
from grpo_dist.observe import EVENTS, Tracker
from grpo_dist.runs import session
from grpo_dist.tools.report.command import write_report
from grpo_dist.tools.report.source import ReportLimits
from tests.support import fakes
from tests.support.report_page import pieces

GUIDE = Path(__file__).resolve().parents[2] / "grpo_dist/guides/diagnose_a_run.md"
OFF = {"console": False, "tensorboard": False}
CONFIG = """
name: run
output_dir: OUT
steps: 1
model: {path: "demo:tiny"}
data:
  train: [{path: OUT/train.jsonl}]
  eval: [{path: OUT/held_out.jsonl}]
  max_prompt_tokens: 64
batch: {prompts_per_step: 2, samples_per_prompt: 2}
tracking: {console: false, tensorboard: false}
"""


def events(run):
    return [json.loads(line)["message"] for line in (run / EVENTS).read_text().splitlines()]


def test_a_run_without_a_warning_has_an_empty_file_of_events(tmp_path):
    with Tracker(fakes.config(tracking=OFF), tmp_path) as tracker:
        tracker.log(1, {"reward/mean": 1.0})
    assert (tmp_path / EVENTS).read_text() == ""


def test_the_snippet_of_the_guide_reads_a_run_without_a_warning(tmp_path, capsys):
    with Tracker(fakes.config(tracking=OFF), tmp_path) as tracker:
        tracker.log(1, {"reward/mean": 0.5})
    (snippet,) = re.findall(r"```python\n(import json.*?)```", GUIDE.read_text(), re.S)
    exec(snippet.replace("runs/my-run", str(tmp_path)), {})
    assert capsys.readouterr().out == "[0.5]\n"


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Prepare a run directory without training."""
    rows = "".join(json.dumps({"problem": f"1+{i}=", "answer": i + 1}) + "\n" for i in range(4))
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text(rows)

    async def nothing(*arguments):
        return {}

    monkeypatch.setattr(session, "_session", nothing)
    monkeypatch.setattr(session, "audit", lambda run: "")
    (tmp_path / "c.yaml").write_text(CONFIG.replace("OUT", str(tmp_path)))
    assert main(["train", str(tmp_path / "c.yaml")]) == 0
    return tmp_path / "run"


def test_the_warning_about_held_out_training_problems_is_in_events_and_report(trained):
    (warning,) = events(trained)
    assert "held_out: 4 of 4 problems are also in the training set" in warning
    _, found = pieces(write_report([str(trained)], None, ReportLimits(), lambda message: None))
    assert [event[2] for event in found["0/events/0"]] == [warning]
