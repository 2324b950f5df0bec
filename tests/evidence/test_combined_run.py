"""A whole run that combines, on real engines and ranks: DPPO by KL, rejection of sequences by their distance
to the engine, completion order, two sources with separate rewards, a mean over prompts, updates reshuffled in
a second epoch, adapters under ZeRO-3.
"""

import json
from collections import Counter

import pytest

from tests.support.real_runs import metrics, run

pytestmark = pytest.mark.evidence

TOGETHER = [
    "steps=4", "max_staleness=1", "weight_sync.mode=keep", "checkpoint.every=2",
    'data.train=[{path: "demo:add2"}, {path: "demo:add3"}]', "data.eval=[]",
    """rewards.by_source={
      add2: {functions: [{name: digits, function: "end_to_end_rewards:digit_share"}]},
      add3: {functions: [{name: brevity, function: "end_to_end_rewards:brevity"}]}}""",
    "batch.order={name: completion, oversample: 1.5}", "batch.updates_per_step=2", "batch.epochs_per_batch=2",
    "batch.shuffle_epochs=true",
    "policy.zero_stage=3", "policy.lora={rank: 4}", "policy.optimizer.lr=1.0e-2",
]  # fmt: skip
DPPO = """algorithm={
  loss: dppo_kl, correction: bypass, advantage: dr_grpo, aggregation: prompt-mean-token-mean,
  zero_variance_filter: true, kl: {coef: 0.01, bias_correction: true},
  correction: {reject: [{rule: seq_mean_k3, high: HIGH}]}}"""


def test_dppo_rejection_first_come_sources_adapters_and_zero_3_train_together(tmp_path):
    """Killed once. On-policy samples agree with the engine to float32 rounding; sequences that the updates of
    a step moved too far from the engine are rejected, and the others still train.
    """
    settings = [*TOGETHER, DPPO.replace("HIGH", "1.0e-2")]
    run(tmp_path, *settings, check=False, kill_after="step_000002")
    run(tmp_path, *settings)
    lines = [line for line in metrics(tmp_path) if line["step"]]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["policy/grad_norm"] > 0 and line["rollout/staleness_max"] <= 1
        assert line["health/skipped_updates"] == 0
        assert 0 <= line["correction/rejected_share"] < 1
    fresh = [line for line in lines if line["rollout/staleness_max"] == 0]
    assert fresh and all(line["mismatch/logprob_diff_max"] < 1e-4 for line in fresh)
    # The engines follow the adapters: in every step they sample from the trainer's weights.
    assert any(line["correction/rejected_share"] > 0 for line in lines)
    ledger = [json.loads(line) for line in (tmp_path / "runs/run/ledger.jsonl").read_text().splitlines()]
    uids = Counter(uid for line in ledger for name, part in line.items() if name != "step" for uid in part)
    assert max(uids.values()) == 1 and {uid.split("-")[0] for uid in uids} == {"add2", "add3"}
