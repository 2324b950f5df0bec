"""`events.jsonl` exists in every run, and includes warnings from before the first step."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from actors.workers import reward
from grpo_dist.cli import main
from grpo_dist.errors import Preempted, Unhealthy, UserError
from grpo_dist.observe.console import step_line
from grpo_dist.observe.tracker import EVENTS, Tracker
from grpo_dist.plugins.algorithm import UserCode, user_advantages
from grpo_dist.plugins.inputs import AdvantageInputs
from grpo_dist.runs import session
from grpo_dist.tools.report.command import write_report
from grpo_dist.tools.report.source import ReportLimits
from tests.support import fakes
from tests.support.reports import pieces

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
def prepared_run(tmp_path, monkeypatch):
    """Prepare a run directory without training."""
    rows = "".join(json.dumps({"problem": f"1+{i}=", "answer": i + 1}) + "\n" for i in range(4))
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text(rows)

    async def nothing(run, point):
        return run, {}

    monkeypatch.setattr(session, "_session", nothing)
    monkeypatch.setattr(session, "audit", lambda run: "")
    (tmp_path / "c.yaml").write_text(CONFIG.replace("OUT", str(tmp_path)))
    assert main(["train", str(tmp_path / "c.yaml")]) == 0
    return tmp_path / "run"


@pytest.mark.slow
def test_the_warning_about_held_out_training_problems_is_in_events_and_report(prepared_run):
    (warning,) = events(prepared_run)
    assert "held_out: 4 of 4 problems are also in the training set" in warning
    _, data = pieces(write_report([str(prepared_run)], None, ReportLimits(), lambda message: None))
    assert [event[2] for event in data["0/events/0"]] == [warning]


def test_why_a_run_ended_itself_is_its_last_event(tmp_path):
    """A warning of an actor's handle on the driver is an event, too; a stop request is not."""
    with pytest.raises(Unhealthy), Tracker(fakes.config(tracking=OFF), tmp_path):
        reward.logger.warning("reward mine:score: KeyError: 'x' (/home/me/mine.py:2 in score)")
        raise Unhealthy("step 1: no sample could be scored")
    first, last = events(tmp_path)
    assert first.startswith("reward mine:score: KeyError")
    assert last == "the run ended: step 1: no sample could be scored"
    with pytest.raises(Preempted), Tracker(fakes.config(tracking=OFF), tmp_path):
        raise Preempted("asked to end")
    assert len(events(tmp_path)) == 2


def test_user_code_that_raises_is_the_last_event_with_its_file_and_line(tmp_path):
    """In an advantage estimator, after the trial before the run."""
    (tmp_path / "late.py").write_text("def late(rewards):\n    return rewards / []\n")
    inputs = AdvantageInputs(torch.ones(2), torch.zeros(2), torch.ones(2), torch.zeros(2), {}, {})
    with pytest.raises(UserError) as end, Tracker(fakes.config(tracking=OFF), tmp_path):
        user_advantages("late:late", UserCode([str(tmp_path)]), inputs)
    message = str(end.value)
    assert message.startswith("advantage estimator late:late failed: TypeError: ")
    assert message.endswith(f"({tmp_path}/late.py:2 in late); correct it")
    assert events(tmp_path) == [f"the run ended: {message}"]


def test_the_line_of_a_step_counts_the_samples_that_were_not_scored():
    metrics = {"time/step_s": 1.0, "throughput/completion_tokens_per_s": 5.0, "reward/mean": math.nan}
    assert "  reward nan  not scored 12  1.0 s" in step_line(3, metrics | {"reward/unscored": 12.0})
    assert "not scored" not in step_line(3, metrics | {"reward/unscored": 0.0})
