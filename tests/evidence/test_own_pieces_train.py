"""A whole run with nine kinds of user-supplied components, stopped and resumed with the same numbers."""

import signal

import pyarrow.parquet as pq
import pytest
import yaml

from grpo_dist.cli import main
from tests.plugins.test_guide_examples import EXAMPLES, SHOWN
from tests.support.real_runs import metrics, run, without_clock

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(3600)]


def overrides(directory) -> list[str]:
    """Return the configuration of the guide as overrides; write its module to ``directory``."""
    (directory / "my_components.py").write_text("\n\n".join(EXAMPLES))
    settings = {key: value for key, value in SHOWN.items() if key != "data"}
    settings |= {"code_paths": [str(directory)], "data.train": SHOWN["data"]["train"]}
    words = [f"{key}={yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()}"
             for key, value in settings.items()]  # fmt: skip
    words += [f"data.order={SHOWN['data']['order']}", "data.eval=[]"]
    return [*words, "steps=3", "checkpoint.every=1", "checkpoint.keep=3"]


def play(directory, **how):
    directory.mkdir(exist_ok=True)
    return run(directory, *overrides(directory), **how)


def read_samples(directory):
    tables = sorted((directory / "runs/run/samples").glob("step_*.parquet"))
    names = ("uid", "sample", "completion_ids", "sampled", "reward", "logprobs")
    return [{n: row.get(n) for n in names} for path in tables for row in pq.read_table(path).to_pylist()]


def test_a_stopped_run_of_user_components_resumes_with_the_same_numbers(tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    play(whole)
    ended = play(parts, check=False, kill_after="step_000001", number=signal.SIGTERM)
    assert ended.returncode != 0
    resumed = play(parts)
    assert "resuming from" in resumed.stdout
    lines = [line for line in without_clock(metrics(whole)) if line["step"]]
    assert lines == [line for line in without_clock(metrics(parts)) if line["step"]]
    rows = read_samples(whole)
    assert rows == read_samples(parts) and len(rows) == 3 * 4 * 4
    # The rollout function inserted a token into every sample long enough; the policy sampled the others.
    assert any(row["sampled"] and row["sampled"].count(False) == 1 for row in rows)
    assert all(0 < line["user/spread"] <= 2 for line in lines[:1]) and "ref/kl" in lines[0]
    assert lines[0]["mismatch/logprob_diff_max"] < 1e-4  # also in samples with inserted tokens
    written = (whole / "runs/run/lines.txt").read_text()
    assert "1 user/spread " in written and "3 user/spread " in written
    # Changed code is another run.
    words = [*overrides(parts), f"output_dir={parts / 'runs'}"]  # writes the module
    with (parts / "my_components.py").open("a") as file:
        file.write("\n# changed\n")
    assert main(["train", str(parts / "config.yaml"), *words]) == 2
    assert "my_components.py (changed)" in capsys.readouterr().err
