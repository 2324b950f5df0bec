"""Complete runs of several sources, some with environments, both user-supplied and built-in."""

import signal

import pyarrow.parquet as pq
import pytest

from grpo_dist.loop.ledger import audit
from tests.end_to_end.test_turns import COMMON, numbers
from tests.support.real_runs import metrics, run

pytestmark = [pytest.mark.machine, pytest.mark.long]

_OWN = 'environment: "end_to_end_environment:Digits"'
EPISODES = (
    'data.train=[{path: "demo:add3", max_rows: 16},'
    f'{{path: "demo:products", max_rows: 16, {_OWN}}},'
    f'{{path: "demo:add2", name: two, max_rows: 8, {_OWN}, environment_kwargs: {{turns: 2}}}},'
    '{path: "demo:add4", name: called, max_rows: 8, environment: calculator}]',
    "code_paths=[SUPPORT]",
    "environments={max_turn_tokens: 8, num_workers: 2}",
    "sampling.max_new_tokens=64",
    "environments.timeout_s=1200",
)


def play(directory, *overrides, **options):
    from tests.support import real_runs

    support = str(real_runs.Path(real_runs.__file__).parent)
    settings = [override.replace("SUPPORT", support) for override in EPISODES]
    directory.mkdir(exist_ok=True)
    return run(directory, *settings, *overrides, **options)


_SAMPLED = (
    "uid", "sample", "completion_ids", "policy_versions", "sampled", "turns", "reward", "finish_reason"
)  # fmt: skip


def check_same_run(first, second):
    """Check that two runs have the same tokens, and the same numbers to the last digit: the arithmetic of an
    engine does not depend on which episodes share its steps, and so not on when environments answer.
    """
    tokens = [[{name: row[name] for name in _SAMPLED} for row in rows(run)] for run in (first, second)]
    assert tokens[0] == tokens[1] != []
    assert numbers(first) == numbers(second)


def rows(directory):
    files = sorted((directory / "runs/run/samples").glob("step_*.parquet"))
    return [row for path in files for row in pq.read_table(path).to_pylist()]


@pytest.mark.slow
def test_episodes_give_the_same_run_where_all_roles_are_colocated(tmp_path):
    """With a greedy episode per prompt (ReMax), and engines that sleep while the policy trains."""
    for placement in ("separate", "colocated"):
        play(tmp_path / placement, *COMMON, f"cluster.placement={placement}", "algorithm.advantage=remax")
    separate, colocated = tmp_path / "separate", tmp_path / "colocated"
    check_same_run(separate, colocated)
    last = metrics(separate)[-1]
    assert last["mismatch/logprob_diff_max"] < 1e-5 and last["probe/logprob_diff_max"] < 1e-5
    assert last["throughput/rollout_turns"] > 0 and last["time/environment_act_busy_s"] > 0
    assert last["time/tool_wait_s"] > 0 and 0 <= last["throughput/episode_cached_share"] <= 1
    episodes = [row for row in rows(separate) if row["source"] == "products"]
    assert episodes and all(len(row["turns"]) == 3 for row in episodes)
    assert all(row["finish_reason"] == "stop" for row in episodes)
    assert not any(row["turns"] for row in rows(separate) if row["source"] == "add3")


@pytest.mark.slow
def test_episodes_sampled_ahead_continue_under_new_weights(tmp_path):
    """`keep`: each token has the version of its weights, and none is too old."""
    done = play(tmp_path, "steps=5", "max_staleness=1", "weight_sync.mode=keep", "rollout.num_workers=2")
    assert "ledger: 20 prompts sampled = " in done.stdout and "does not balance" not in done.stdout
    assert audit(tmp_path / "runs/run/ledger.jsonl", steps=5, prompts_per_step=4) is None
    lines = [line for line in metrics(tmp_path) if line["step"]]
    assert max(line["rollout/staleness_max"] for line in lines) == 1
    turns = {}
    for row in rows(tmp_path):
        turns.setdefault(row["source"], set()).add(len(row.get("turns") or ()))
    assert turns["add3"] == {0} and turns["products"] == {3} and turns["two"] == {2}
    assert 0 not in turns["called"], "each source has the environment that it names"
    for step in range(1, 6):
        table = pq.read_table(tmp_path / f"runs/run/samples/step_{step:06d}.parquet").to_pylist()
        versions = {v for row in table for v in row["policy_versions"]}
        with_mask = [row for row in table if row["sampled"]]
        pairs = [p for r in with_mask for p in zip(r["policy_versions"], r["sampled"], strict=True)]
        context_versions = {version for version, is_sampled in pairs if not is_sampled}
        assert versions - {-1} <= {max(0, step - 2), step - 1} and context_versions <= {-1}


@pytest.mark.slow
def test_a_run_of_episodes_that_is_ended_and_killed_resumes_with_the_same_numbers(tmp_path):
    """Finished groups of the current step are kept, unfinished ones sampled again. With two threads, whether
    the engine splits a request could depend on the rest of the batch.
    """
    unbroken, broken, settings = tmp_path / "whole", tmp_path / "parts", ("steps=6", "rollout.threads=2")
    play(unbroken, *settings)
    killed = play(broken, *settings, check=False, kill_after="step_000003")
    assert killed.returncode == -signal.SIGKILL
    play(broken, *settings)
    check_same_run(broken, unbroken)
    ledgers = [directory / "runs/run/ledger.jsonl" for directory in (unbroken, broken)]
    assert ledgers[0].read_text() == ledgers[1].read_text()
    assert audit(ledgers[0], steps=6, prompts_per_step=4) is None
