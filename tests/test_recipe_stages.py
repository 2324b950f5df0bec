"""The work of a stage, without what it would start: what is taken from a finished run, how models appear."""

import json
from pathlib import Path

import fakes
import pytest

from grpo_dist.recipe.config import Stage
from grpo_dist.recipe.stages import run_grpo_stage


def quiet(message: str) -> None:
    """Nothing is said."""


def stage(kind, directory: Path, **changes) -> Stage:
    config = fakes.config(**changes)
    return Stage("it", kind, directory, config, config, ())


@pytest.mark.parametrize(
    ("lines", "after"),
    [
        ([(0, 0.1), (2, 0.2), (6, 0.3)], {"eval/add3/pass@1": 0.3}),
        ([(0, 0.1), (4, 0.2), (6, None)], {}),  # 4 of 6 steps: not the model that the stage ends with
    ],
)
def test_a_run_s_result_is_measured_by_the_evaluation_of_its_last_step_alone(tmp_path, lines, after):
    written = [
        {"step": step, "time/step_s": 1.0} | ({} if rate is None else {"eval/add3/pass@1": rate})
        for step, rate in lines
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    (tmp_path / "DONE").write_text("6\n")
    result = run_grpo_stage(stage("grpo", tmp_path, steps=6), {}, quiet)
    assert result.before == {"eval/add3/pass@1": 0.1} and result.after == after
