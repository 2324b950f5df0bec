"""Complete runs with teachers and demonstrations, on real engines, teachers and ranks."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_dist.data.prompts import PromptFormat
from grpo_dist.demo.model import cached_model
from tests.support.real_runs import metrics, run, without_clock

pytestmark = pytest.mark.machine

TEACHERS = (
    "distillation.teachers=[{name: small, model: 'demo:micro', sources: [add3]},"
    " {name: shown, model: reference, prompt: '{problem} It is {answer}.'}]"
)
COMMON = (
    "steps=3", "checkpoint.every=1", "rollout.threads=1", "policy.threads=1", "algorithm.kl.coef=0",
    "tracking.samples=true", TEACHERS,
    "demonstrations={data: [{path: 'demo:add3', examples: 20}], rows_per_step: 4}",
    "data.max_prompt_tokens=64",
)  # fmt: skip


def numbers(directory):
    lines = without_clock(metrics(directory))
    return [{k: v for k, v in line.items() if not k.startswith("restarts/")} for line in lines]


def exact_logprobs(model, prompt_ids, completion_ids):
    """Compute log-probs in float64, one row at a time, without code of this project."""
    tokens = torch.tensor([[*prompt_ids, *completion_ids]])
    with torch.no_grad():
        logits = model(tokens).logits[0].double().log_softmax(dim=-1)
    completion = torch.tensor(completion_ids)
    return logits[len(prompt_ids) - 1 : -1].gather(1, completion[:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def separate(tmp_path_factory):
    directory = tmp_path_factory.mktemp("apart")
    run(directory, *COMMON, "cluster.placement=separate")
    return directory


@pytest.mark.slow
def test_teachers_and_demonstrations_give_the_same_digits_colocated_and_after_a_kill(separate, tmp_path):
    shared = (*COMMON, "cluster.placement=colocated")
    run(tmp_path, *shared, check=False, kill_after="step_000002")
    run(tmp_path, *shared)
    assert numbers(tmp_path)[-1] == numbers(separate)[-1]
    ledgers = [(directory / "runs/run/ledger.jsonl").read_text() for directory in (separate, tmp_path)]
    assert ledgers[0] == ledgers[1]


@pytest.mark.slow
def test_teachers_that_are_killed_are_replaced_and_change_no_digit(separate, tmp_path):
    """A teacher with its own model, and the reference as a teacher."""
    run(tmp_path, *COMMON, "cluster.placement=separate", kill_after="step_000001", lose="ReferenceWorker")
    steps = [line for line in metrics(tmp_path) if "loss/total" in line]
    for role in ("teacher", "reference"):
        assert sum(line[f"restarts/{role}"] for line in steps) == 1, role
    assert numbers(tmp_path) == numbers(separate)
    ledgers = [(directory / "runs/run/ledger.jsonl").read_text() for directory in (separate, tmp_path)]
    assert ledgers[0] == ledgers[1]


@pytest.mark.slow
def test_teachers_compute_for_samples_what_transformers_computes_for_the_same_tokens(separate):
    """One teacher has its own model and source; the other is the initial policy, and reads the answer."""
    steps = [line for line in numbers(separate) if "loss/total" in line]  # the other lines are evaluations
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["demonstrations/nll"] > 0 for line in steps)
    assert (separate / "runs/run/ledger.jsonl").read_text().count("demonstrations") == 3
    samples = pq.read_table(separate / "runs/run/samples/step_000001.parquet").to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(cached_model("tiny", seed=0))
    small, tiny = (
        AutoModelForCausalLM.from_pretrained(cached_model(name, seed=0), dtype=torch.float64)
        for name in ("micro", "tiny")
    )
    gaps = {"small": [], "shown": []}
    for row in samples:
        plain, shown = (
            PromptFormat().token_ids(text, tokenizer)
            for text in (row["problem"], f"{row['problem']} It is {row['answer']}.")
        )
        engine, ids = np.array(row["logprobs"]), row["completion_ids"]
        expected = {"small": exact_logprobs(small, plain, ids), "shown": exact_logprobs(tiny, shown, ids)}
        for name, values in expected.items():
            gaps[name].append(engine - values)
    for name, values in gaps.items():
        expected = np.concatenate(values).mean()
        assert steps[0][f"teacher/kl/{name}"] == pytest.approx(expected, abs=2e-5), name
    assert abs(np.concatenate(gaps["shown"]).mean()) > 1e-4, "the answer changes the log-probs"
