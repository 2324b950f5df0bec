"""The workflow of the guide: a user-supplied environment, named in a YAML file, through every command."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.documents import ROOT, blocks
from tests.support.patience import HANG_S
from tests.support.real_runs import metrics

pytestmark = [pytest.mark.machine, pytest.mark.long]

GUIDE = ROOT / "grpo_dist/guides/write_an_environment.md"
# A small cache and no compilation keep the run short.
SHORT = ("rollout.kv_cache_gib=0.25", "rollout.enforce_eager=true")


@pytest.mark.slow
def test_the_commands_of_the_guide_train_evaluate_score_and_report_its_environment(tmp_path):
    files = {block.file: block.text for block in blocks(GUIDE) if block.file}
    for name in ("games.py", "guess.yaml"):
        (tmp_path / name).write_text(files[name])
    commands = [c for block in blocks(GUIDE) if block.is_shell for c in block.commands]
    output = {}
    for command in commands:
        _, verb, *arguments = command.split()
        short = SHORT if verb in ("train", "eval") else ()
        done = subprocess.run(
            [sys.executable, "-m", "grpo_dist.cli", verb, *arguments, *short],
            cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=HANG_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-5000:]}"
        output[verb] = done.stdout
    assert list(output) == ["check", "train", "eval", "score", "report"]
    steps = [line for line in metrics(tmp_path, "guess") if line["step"]]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(1 <= line["episode/turns"] <= 6 and line["episode/rows"] == 1 for line in steps)
    assert all(-0.6 <= line["reward/mean"] <= 1 for line in steps)
    assert "ledger: 4 prompts sampled" in output["train"] and "does not balance" not in output["train"]
    (result,) = tmp_path.glob("runs/evaluations/*/result.json")
    all_measured = json.loads(result.read_text())["measured"]
    (measured,) = [m for m in all_measured if (m["set"], m["by"]) == ("held_out", None)]
    assert measured["problems"] == 50 and measured["episodes"]["episodes"] == measured["samples"] >= 50
    scored = (tmp_path / "step_000002.scored.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in scored]
    assert len(rows) == 8
    for row in rows:  # an action that was cut before it was answered has no reward
        turn_rewards = [turn["reward"] for turn in row["turns"] if turn["reward"] is not None]
        assert row["score"]["reward"] == (pytest.approx(sum(turn_rewards)) if turn_rewards else None)
    assert (tmp_path / "runs/guess/report.html").stat().st_size > 100_000
