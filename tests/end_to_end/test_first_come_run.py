"""A run in completion order, with over-sampling, dynamic sampling and rewards by source; killed once."""

import json
from collections import Counter

import pyarrow.parquet as pq
import pytest

from tests.support.real_runs import metrics, run

pytestmark = [pytest.mark.machine, pytest.mark.long, pytest.mark.slow]

SOURCES = """[{path: "demo:add2", weight: 1, temperature: 0.7}, {path: "demo:add3", weight: 3}]"""
REWARDS = """{
  add2: {functions: [{name: digits, function: "end_to_end_rewards:digit_share"}]},
  add3: {functions: [{function: math}, {name: brevity, function: "end_to_end_rewards:brevity"}]}}"""


def test_every_group_is_trained_once_by_its_sources_rewards_also_after_a_kill(tmp_path):
    settings = [
        "steps=6", "max_staleness=2", "weight_sync.mode=keep", "checkpoint.every=2",
        "batch={order: {name: completion, oversample: 1.5}, samples_per_prompt: 3}",
        "dynamic_sampling={enabled: true, max_extra_prompts: 3}",
        f"data.train={SOURCES}", "data.eval=[]", f"rewards.by_source={REWARDS}",
    ]  # fmt: skip
    run(tmp_path, *settings, check=False, kill_after="step_000002")
    done = run(tmp_path, *settings)
    assert "ledger:" in done.stdout + done.stderr  # printed after the audit
    lines = [line for line in metrics(tmp_path) if line["step"]]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["rollout/staleness_max"] <= 2 for line in lines)
    assert lines[0]["group/carried_over"] > 0 == lines[-1]["group/carried_over"]
    assert lines[-1]["rollout/length_bias"] == pytest.approx(0.0, abs=1e-9)
    assert all(line["group/size_min"] == 3 for line in lines)
    on_policy = [line for line in lines if line["rollout/staleness_max"] == 0]
    assert all(line["mismatch/logprob_diff_max"] < 1e-4 for line in on_policy)
    run_dir = tmp_path / "runs/run"
    ledger = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    uids = [uid for line in ledger for name, uids in line.items() if name != "step" for uid in uids]
    assert max(Counter(uids).values()) == 1 and len(uids) >= 24
    sampled = Counter(uid.split("-")[0] for uid in uids)
    assert sampled["add3"] == pytest.approx(0.75 * len(uids), abs=3)
    for path in sorted((run_dir / "samples").glob("step_*.parquet")):
        for row in pq.read_table(path).to_pylist():
            scored = {name for name in row if name.startswith("reward/") and row[name] is not None}
            is_add2 = row["source"] == "add2"
            assert scored == ({"reward/digits"} if is_add2 else {"reward/math", "reward/brevity"})
            assert row["temperature"] == pytest.approx(0.7 if is_add2 else 1.0)
