"""A whole run on real parts with own pieces of nine kinds, ended and resumed with the same numbers."""

import signal

import pyarrow.parquet as pq
import pytest
import yaml

from grpo_dist.cli import main
from tests.plugins.test_guide_examples import EXAMPLES, SHOWN
from tests.support.real_runs import metrics, run, without_clock

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(3600)]


def overrides(directory) -> list[str]:
    """Return the configuration of the guide, as overrides, with its module in ``directory``."""
    (directory / "my_pieces.py").write_text("\n\n".join(EXAMPLES))
    given = SHOWN | {"code_paths": [str(directory)]}
    found = [f"{key}={yaml.safe_dump(value, default_flow_style=True, width=10**6).strip()}"
             for key, value in given.items() if key != "data"]  # fmt: skip
    data = yaml.safe_dump(SHOWN["data"]["train"], default_flow_style=True, width=10**6).strip()
    own = [f"data.train={data}", f"data.order={SHOWN['data']['order']}", "data.eval=[]"]
    return [*found, *own, "steps=3", "checkpoint.every=1", "checkpoint.keep=3"]


def play(directory, **how):
    directory.mkdir(exist_ok=True)
    return run(directory, *overrides(directory), **how)


def sampled(directory):
    tables = sorted((directory / "runs/run/samples").glob("step_*.parquet"))
    names = ("uid", "sample", "completion_ids", "sampled", "reward", "logprobs")
    return [{n: row.get(n) for n in names} for path in tables for row in pq.read_table(path).to_pylist()]


def test_a_run_of_own_pieces_that_is_ended_resumes_with_the_same_numbers(tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    play(whole)
    ended = play(parts, check=False, kill_after="step_000001", number=signal.SIGTERM)
    assert ended.returncode != 0
    resumed = play(parts)
    assert "resuming from" in resumed.stdout
    lines = [line for line in without_clock(metrics(whole)) if line["step"]]
    assert lines == [line for line in without_clock(metrics(parts)) if line["step"]]
    rows = sampled(whole)
    assert rows == sampled(parts) and len(rows) == 3 * 4 * 4
    # The rollout function put a token into every sample that did not end before; the others are the policy's.
    assert any(row["sampled"] and row["sampled"].count(False) == 1 for row in rows)
    assert all(0 < line["own/spread"] <= 2 for line in lines[:1]) and "ref/kl" in lines[0]
    assert lines[0]["mismatch/logprob_diff_max"] < 1e-4  # log-probs of samples with given tokens are right
    written = (whole / "runs/run/lines.txt").read_text()
    assert "1 own/spread " in written and "3 own/spread " in written
    # Other code is another run.
    with (parts / "my_pieces.py").open("a") as file:
        file.write("\n# changed\n")
    assert main(["train", str(parts / "config.yaml"), *overrides_of(parts)]) == 2
    assert "my_pieces.py (changed)" in capsys.readouterr().err


def overrides_of(directory) -> list[str]:
    text = (directory / "my_pieces.py").read_text()
    found = [*overrides(directory), f"output_dir={directory / 'runs'}"]
    (directory / "my_pieces.py").write_text(text)
    return found
