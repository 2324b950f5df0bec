"""Complete runs of the real components from the command line: engine, graders, reference, two ZeRO ranks,
sync, checkpoints.

The demo model has random weights and learns nothing. The tests check that numbers are correct and
reproducible. `make evidence` has the runs that learn.
"""

import signal

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_dist.data.prompts import PromptFormat
from grpo_dist.demo.model import cached_model
from grpo_dist.loop.ledger import audit
from tests.support.real_runs import metrics, run, without_clock

pytestmark = [pytest.mark.machine, pytest.mark.long]


STALE = (
    "max_staleness=1",  # the only difference
    "algorithm.advantage=remax",  # adds a greedy answer to every prompt
    "steps=3",
    "checkpoint.every=2",
    "checkpoint.export=true",
    "evaluation.after=true",
    "distillation={teachers: [{name: small, model: 'demo:micro'}], coef: 0.5, "
    "kl: {name: top_k, k: 5, divergence: forward}}",
)


@pytest.fixture(scope="module")
def stale(tmp_path_factory):
    """Return the directory of a finished run with sampling one step ahead, and its output."""
    directory = tmp_path_factory.mktemp("stale")
    return directory, run(directory, *STALE).stdout


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    run(directory, "steps=6")
    return directory


def test_first_step_is_on_policy_to_the_last_digit(stale):
    start, first, *_ = metrics(stale[0])
    assert start["step"] == 0
    assert {"eval/add3/pass@1", "eval/add3/pass@1_stderr", "eval/add3/pass@2"} <= set(start)
    assert first["policy/ratio_mean"] == first["policy/ratio_max"] == 1.0
    assert abs(first["ref/kl"]) < 1e-9
    assert first["mismatch/logprob_diff_max"] < 1e-5
    assert first["rollout/staleness_max"] == 0
    assert first["policy/clip_low_share"] == first["policy/clip_high_share"] == 0


def test_a_teacher_of_distributions_gives_the_loss_that_transformers_and_the_definition_give(stale):
    """The loss of the first step, where the policy is the initial model; over both ranks."""
    first = next(line for line in metrics(stale[0]) if "loss/total" in line)
    tokenizer = AutoTokenizer.from_pretrained(cached_model("tiny", seed=0))
    small, policy = (
        AutoModelForCausalLM.from_pretrained(cached_model(name, seed=0), dtype=torch.float64)
        for name in ("micro", "tiny")
    )
    values = []
    for row in pq.read_table(stale[0] / "runs/run/samples/step_000001.parquet").to_pylist():
        prompt = list(PromptFormat().token_ids(row["problem"], tokenizer))
        tokens = torch.tensor([[*prompt, *row["completion_ids"]]])
        with torch.no_grad():
            p, q = (m(tokens).logits[0, len(prompt) - 1 : -1].softmax(dim=-1) for m in (small, policy))
        top, ids = p.topk(5, dim=-1)
        events = [(top, q.gather(1, ids)), (1 - top.sum(1), 1 - q.gather(1, ids).sum(1))]
        kl = (events[0][0] * (events[0][0] / events[0][1]).log()).sum(1)
        values.append(kl + events[1][0] * (events[1][0] / events[1][1]).log())
    assert first["loss/teacher"] == pytest.approx(0.5 * torch.cat(values).mean().item(), rel=1e-4)


@pytest.mark.slow
def test_weights_move_and_the_engine_follows(uninterrupted):
    last = metrics(uninterrupted)[-1]
    assert last["step"] == 6
    assert last["ref/kl"] > 1e-6
    assert last["mismatch/logprob_diff_max"] < 1e-5
    assert last["policy/lr"] == 0.0  # the linear schedule has ended


@pytest.mark.slow
def test_same_seed_gives_the_same_numbers_also_across_a_kill_and_a_resume(uninterrupted, tmp_path):
    """The first run is killed after its checkpoint of step 3; the second, a new process, resumes from it."""
    killed = run(tmp_path, "steps=6", check=False, kill_after="step_000003")
    assert killed.returncode == -signal.SIGKILL
    before = metrics(tmp_path)
    assert without_clock(before) == without_clock(metrics(uninterrupted)[: len(before)])
    done = run(tmp_path, "steps=6")
    assert "resuming from runs/run/checkpoints/step_000003" in done.stdout
    assert without_clock(metrics(tmp_path)) == without_clock(metrics(uninterrupted))
    ledgers = [directory / "runs/run/ledger.jsonl" for directory in (tmp_path, uninterrupted)]
    assert ledgers[0].read_text() == ledgers[1].read_text()
    assert audit(ledgers[0], steps=6, prompts_per_step=4) is None
    assert "ledger: 24 prompts sampled = " in done.stdout and "does not balance" not in done.stdout
    checkpoints = sorted(p.name for p in (tmp_path / "runs/run/checkpoints").iterdir())
    assert checkpoints == ["step_000003", "step_000006"]


@pytest.mark.slow
def test_a_killed_run_resumes_with_fewer_ranks_and_other_micro_batches(uninterrupted, tmp_path):
    """The step after the checkpoint has the same samples and weight update as with two ranks."""
    run(tmp_path, "steps=6", check=False, kill_after="step_000003")
    layout = ("policy.num_workers=1", "policy.zero_stage=0", "batch.micro_batch_tokens=512")
    done = run(tmp_path, "steps=6", *layout)
    (line,) = [text for text in done.stdout.splitlines() if text.startswith("resuming from")]
    assert "step_000003, with another layout (`batch.micro_batch_tokens` = 512 was 256, " in line
    assert "`policy.num_workers` = 1 was 2, `policy.zero_stage` = 0 was 2): results differ by" in line
    resumed, unbroken = metrics(tmp_path), metrics(uninterrupted)
    assert [line["step"] for line in resumed] == [line["step"] for line in unbroken]
    fourth, expected = (next(line for line in lines if line["step"] == 4) for lines in (resumed, unbroken))
    assert fourth["reward/mean"] == expected["reward/mean"]
    for key in ("loss/total", "policy/grad_norm", "ref/kl", "policy/lr"):
        assert fourth[key] == pytest.approx(expected[key], rel=1e-4), key
    assert resumed[-1]["mismatch/logprob_diff_max"] < 1e-5
    assert audit(tmp_path / "runs/run/ledger.jsonl", steps=6, prompts_per_step=4) is None


@pytest.mark.slow
def test_a_terminated_run_saves_its_step_and_leaves_nothing_behind(uninterrupted, tmp_path):
    done = run(tmp_path, "steps=6", check=False, kill_after="step_000003", number=signal.SIGTERM)
    assert done.returncode == 75, done.stderr[-3000:]
    assert "SIGTERM: stopping after this step" in done.stdout and "Traceback" not in done.stderr
    lines = metrics(tmp_path)
    assert 3 <= lines[-1]["step"] < 6  # 3: the next was still being sampled
    assert without_clock(lines) == without_clock(metrics(uninterrupted)[: len(lines)])
    newest = max(p.name for p in (tmp_path / "runs/run/checkpoints").iterdir())
    assert newest == f"step_{lines[-1]['step']:06d}"


def test_a_finished_run_is_not_repeated_and_other_settings_do_not_resume_it(stale):
    done = run(stale[0], *STALE, "policy.optimizer.weight_decay=0.5", check=False)
    assert done.returncode == 2
    assert "made with another configuration" in done.stderr and "Traceback" not in done.stderr


def test_a_stale_run_exports_a_model_that_a_new_engine_evaluates(stale):
    """Sampling runs ahead; every token records the version of its weights."""
    base, output = stale
    lines = metrics(base)
    assert [line.get("rollout/staleness_max") for line in lines] == [None, 0, 1, 1]
    assert lines[-1]["ref/kl"] > 1e-6 and "eval/add3/pass@1" in lines[-1]
    assert "accuracy on held-out problems" in output and "run directory: runs/run" in output
    assert "ledger: 12 prompts sampled = " in output and "does not balance" not in output
    directory = base / "runs/run"
    model = AutoModelForCausalLM.from_pretrained(directory / "model")
    assert model.config.tie_word_embeddings
    assert "assistant" in AutoTokenizer.from_pretrained(directory / "model").chat_template
    assert (directory / "config.yaml").is_file() and any((directory / "tensorboard").iterdir())
    rows = pq.read_table(directory / "samples/step_000002.parquet").to_pylist()
    assert len(rows) == 16
    assert all(0 <= row["reward"] <= 1 and len(row["completion_ids"]) == len(row["logprobs"]) for row in rows)
    assert all(0 <= row["baseline_reward"] <= 1 for row in rows)
    ahead = directory / "checkpoints/step_000002/ahead"
    assert sorted(p.name for p in ahead.iterdir()) == ["batch_000002.parquet"]


def test_more_workers_than_the_cluster_fits_are_rejected_before_any_starts(tmp_path):
    done = run(tmp_path, "steps=1", "batch.prompts_per_step=256", "policy.num_workers=512", check=False)
    assert done.returncode == 2
    assert "`policy.num_workers` = 512 but the cluster has" in done.stderr and "Traceback" not in done.stderr
