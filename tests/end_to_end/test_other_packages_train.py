"""Complete runs on unmodified environments of other packages, each from one line of configuration: real
engine and ranks, prompts and rewards of the package.
"""

import json
import math
import subprocess

import pyarrow.parquet as pq
import pytest

from tests.support.other_packages import game_server, interpreter_with, server_of, taskset
from tests.support.real_runs import metrics, run

pytestmark = pytest.mark.machine


def train(directory, package, line, *overrides):
    """Train two steps on the source ``line``; return the samples of both."""
    directory.mkdir(exist_ok=True)
    settings = (
        f"data={{train: [{line}], eval: [], max_prompt_tokens: 512}}",
        f"environments.python={interpreter_with(package)}", f"code_paths=[{directory}]",
        "environments.timeout_s=1200", "environments.max_turn_tokens=12", "sampling.max_new_tokens=64",
        "rewards.functions=[{function: environment}]", "steps=2", "tracking.samples=true",
    )  # fmt: skip
    done = run(directory, *settings, *overrides)
    assert "ledger: 8 prompts sampled = " in done.stdout and "does not balance" not in done.stdout
    lines = [line for line in metrics(directory) if line["step"]]
    assert len(lines) == 2 and not any(line.get("reward/unscored") for line in lines)
    assert all(line["mismatch/logprob_diff_max"] < 1e-5 for line in lines)
    assert any(line["policy/grad_norm"] > 0 for line in lines), "no reward of the package differs in a group"
    files = sorted((directory / "runs/run/samples").glob("step_*.parquet"))
    rows = [row for path in files for row in pq.read_table(path).to_pylist()]
    assert len(rows) == 2 * 16 and all(row["finish_reason"] == "stop" for row in rows)
    return rows


def digits(text):
    return sum(letter.isdigit() for letter in text) / max(len(text), 1)


LONG = ("environments.max_turn_tokens=80", "sampling.max_new_tokens=96", "batch.micro_batch_tokens=1024")

_SCORES = """
import json, sys
import reasoning_gym
made = reasoning_gym.create_dataset("chain_sum", max_terms=2, max_digits=1, seed=3, size=40)
entries = {entry["question"]: entry for entry in made}
rows = json.load(sys.stdin)
print(json.dumps([made.score_answer(text, entries[question]) for question, text in rows]))
"""


@pytest.mark.slow
def test_a_data_set_of_reasoning_gym_trains_with_the_scores_of_the_package(tmp_path):
    kwargs = "environment_kwargs: {max_terms: 2, max_digits: 1, seed: 3}"
    line = f'{{environment: "reasoning_gym:chain_sum", max_rows: 40, {kwargs}}}'
    python = interpreter_with("reasoning_gym")
    rows = train(tmp_path / "run", "reasoning_gym", line, *LONG)  # to hit a digit by chance
    texts = json.dumps([[row["problem"], row["turns"][0]["text"].strip()] for row in rows])
    scores = subprocess.run([python, "-c", _SCORES], input=texts, capture_output=True, text=True, check=True)
    assert [row["reward"] for row in rows] == pytest.approx(json.loads(scores.stdout))


_DIGITS = "sum(letter.isdigit() for letter in reply) / max(len(reply), 1)"


@pytest.mark.slow
def test_a_taskset_of_verifiers_trains_with_its_weighted_rewards(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "my_digits.py").write_text(taskset(_DIGITS, metric="digits", short=12))
    line = '{environment: "verifiers:my_digits", environment_kwargs: {last: 9}}'
    rows = train(directory, "verifiers", line)
    assert {row["problem"] for row in rows} <= {f"{i}+{i}=" for i in range(1, 9)}
    for row in rows:
        (turn,) = row["turns"]
        reply = turn["text"].strip()  # as the package's `last_reply`
        assert row["reward"] == pytest.approx(digits(reply) + 0.5 * (len(reply) < 12))


_STEP = """
share = sum(letter.isdigit() for letter in said) / max(len(said), 1)
return Told(text=f"more {self.count}", done=self.count == 2, reward=share)
"""


@pytest.mark.slow
def test_a_server_of_openenv_trains_with_the_rewards_of_its_turns(tmp_path):
    server = game_server("Say digits (seed {seed}).", _STEP, sessions=64)
    with server_of(server, interpreter_with("openenv"), tmp_path) as url:
        line = f'{{environment: "openenv:{url}", max_rows: 40, name: game}}'
        rows = train(tmp_path / "run", "openenv", line)
    for row in rows:
        shares = [digits(turn["text"]) for turn in row["turns"]]
        assert len(shares) == 2 and row["finish_reason"] == "stop"
        assert [turn["reward"] for turn in row["turns"]] == pytest.approx(shares)
        assert row["reward"] == pytest.approx(math.fsum(shares))
        assert row["turns"][0]["observation"].count("more 1") == 1
