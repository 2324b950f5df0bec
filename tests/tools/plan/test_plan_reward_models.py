"""Reward models in `grpo-dist plan`: sizes, memory and times by hand, and messages."""

import json
import re
from dataclasses import replace

import pytest
from transformers import Qwen2ForSequenceClassification, Qwen2ForTokenClassification

from grpo_dist.errors import UserError
from grpo_dist.tools.plan.accelerators import Peaks, parse_cluster
from grpo_dist.tools.plan.command import make_plan
from grpo_dist.tools.plan.memory import GIB, Sizes, frozen_worker
from grpo_dist.tools.plan.models import from_config_json, frozen_models, published
from grpo_dist.tools.plan.options import Assumptions, Setting, option_of, planned
from grpo_dist.tools.plan.rates import Rates, Reached
from grpo_dist.tools.plan.report import warnings
from grpo_dist.tools.plan.search import bound, reason
from grpo_dist.tools.plan.workload import workload_of
from tests.support.fakes import config
from tests.support.plans import printed
from tests.support.reward_models import config as classifier_config

KNOWN = "Qwen/Qwen2.5-7B"
BODY = 28 * (3584 * 128 * (2 * 28 + 2 * 4) + 3 * 3584 * 18944)  # weights that multiply each token


def configure(*models, **changes):
    base = {
        "model": {"path": "Qwen/Qwen2.5-1.5B", "gradient_checkpointing": True},
        "batch": {"prompts_per_step": 16, "samples_per_prompt": 4},
        "sampling": {"max_new_tokens": 256},
        "rewards": {"models": [{"name": "judge", "path": KNOWN} | model for model in models]},
    }
    return config(**base | changes)


def one(**changes):
    """Return the only reward model of a configuration with ``changes`` to it."""
    (model,), unknown = frozen_models(configure(changes))
    assert not unknown
    return model


def option(c, cluster):
    """Return the option of ``c`` with prompts of 100 tokens for a policy of 1.5 billion parameters."""
    workload, shape = workload_of(c, prompt_tokens=100), published("Qwen/Qwen2.5-1.5B")
    return option_of(c, Setting(parse_cluster(cluster), shape, workload, None, frozen=frozen_models(c)[0]))


# Sizes


@pytest.mark.parametrize("real", [Qwen2ForSequenceClassification, Qwen2ForTokenClassification])
def test_a_classifier_is_the_decoder_without_a_head(real):
    settings = classifier_config(1, num_hidden_layers=3, hidden_size=64, num_attention_heads=4)
    shape = from_config_json(settings.to_dict(), "made")
    model = real(settings).eval()
    head = sum(p.numel() for p in model.score.parameters())
    assert shape.without_head == sum(p.numel() for p in model.parameters()) - head


def test_sizes_come_from_a_directory_or_a_known_family(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(classifier_config(1).to_dict()))
    assert one(path=str(tmp_path)).shape.shape.layers == 1
    assert one().shape.without_head == 7_615_616_512 - 152064 * 3584


def test_a_model_whose_sizes_are_unknown_gives_the_reason():
    models, unknown = frozen_models(configure({"path": "some/model"}, {"name": "other"}))
    assert [m.settings.name for m in models] == ["other"]
    assert re.match(r"path = some/model: neither a directory here.*`path`$", unknown["judge"])


# Memory


@pytest.mark.parametrize("dtype, b", [("auto", 2), ("bfloat16", 2), ("float32", 4)])
def test_a_worker_holds_the_weights_and_one_batch(dtype, b):
    c = configure({"dtype": dtype})
    model = frozen_models(c)[0][0]
    tokens, longest = 16384, 512 + 256
    assert frozen_worker(c.max_length, model, Sizes.from_config(c, gpu=True)).parts == {
        "weights": b * (7_615_616_512 - 152064 * 3584),
        "activations": tokens * (3 * 18944 + 3 * 3584) * b,
        "attention mask": tokens * longest * (1 + b),
        "runtime": 2 * GIB,
    }


def test_a_row_above_the_budget_is_a_batch_of_its_own():
    c = configure({"micro_batch_tokens": 100})
    worker = frozen_worker(c.max_length, frozen_models(c)[0][0], Sizes.from_config(c, gpu=True))
    assert worker.parts["attention mask"] == 768 * 768 * 3


def test_what_does_not_fit_is_reported_with_a_remedy():
    c = configure({"path": "Qwen/Qwen2.5-72B", "dtype": "float32"}, cluster={"placement": "separate"})
    (problem,) = option(c, "1x8xH100").problems
    assert problem.startswith("reward model judge: a worker needs ")
    assert problem.endswith(
        "a H100 has 75.7 GiB for it; lower its `micro_batch_tokens`, set its `dtype`=bfloat16, raise its "
        "`tensor_parallel_size`, or use a smaller model"
    )
    with pytest.raises(UserError, match="reward model judge: a worker needs"):
        make_plan(c, "1x8xH100", Assumptions(prompt_tokens=100))


def test_a_share_of_a_gpu_has_that_share_of_its_memory_and_of_its_speed():
    """Two models on one card: each must fit into half of it, and both compute at once."""
    halves = [{"gpu_share": 0.5}, {"name": "other", "gpu_share": 0.5}]
    c = configure(*halves, cluster={"placement": "separate"})
    opt = option(c, "1x3xH100")
    assert not opt.problems and opt.roles.gpus == 3  # a rank, an engine, and both models
    rates, half = opt.scenario.rates, frozen_models(c)[0][0]
    assert rates.scoring_s(half, 9, [5]) == 2 * rates.scoring_s(one(), 9, [5])
    small = configure({"gpu_share": 0.2}, cluster={"placement": "separate"})
    (problem,) = option(small, "1x3xH100").problems
    assert "a H100 with `gpu_share` = 0.2 has 15.1 GiB for it" in problem
    assert "raise its `gpu_share`" in problem
    turns = configure({"gpu_share": 0.2}, cluster={"placement": "colocated"})
    assert not option(turns, "1x3xH100").problems  # it has the GPU to itself while it scores


def test_a_split_model_has_its_part_of_the_layers_on_each_gpu():
    """72 billion 16-bit weights need two cards of 80 GB; each has the embedding and half of the rest."""
    c = configure({"path": "Qwen/Qwen2.5-72B", "tensor_parallel_size": 2}, cluster={"placement": "separate"})
    (model,), _ = frozen_models(c)
    shape = model.shape
    parts = frozen_worker(c.max_length, model, Sizes.from_config(c, gpu=True)).parts
    embedding = 152064 * 8192
    assert parts["weights"] == 2 * (embedding + (shape.without_head - embedding) // 2)
    assert parts["activations"] == 16384 * (3 * 29568 // 2 + 3 * 8192) * 2
    opt = option(c, "1x4xH100")
    assert not opt.problems and opt.roles.gpus == 4


# Times


def test_padding_is_computed_and_a_prompt_with_each_completion():
    """Rows of 30, 20 and 15 tokens; a batch of 60 tokens holds two rows padded to 30, the next one of 15."""
    rows = {2: 30, 1: 15}
    weights = 2 * BODY * sum(count * longest for count, longest in rows.items())
    pairs = sum(count * longest * (longest + 1) / 2 for count, longest in rows.items())
    expected = weights + 4 * 28 * 28 * 128 * pairs
    assert one(micro_batch_tokens=60).padded_flops(10, [10, 20, 5]) == pytest.approx(expected)


def test_it_computes_at_the_measured_share_of_the_card_or_of_one_thread():
    model, c = one(), configure({})
    peaks = Peaks.from_cluster(parse_cluster("1x8xH100"))
    rates = Rates(c, model.shape, Sizes.from_config(c, gpu=True), peaks, Reached(training=0.5))
    flops = model.padded_flops(100, [50] * 4)
    assert rates.scoring_s(model, 100, [50] * 4) == pytest.approx(flops / (0.5 * 989e12))
    thread = replace(rates, peaks=replace(peaks, thread_flops=2e9))
    assert thread.scoring_s(model, 100, [50] * 4) == pytest.approx(flops / (0.5 * 2e9))


def test_a_reward_model_that_is_the_bottleneck_scores_groups_one_after_the_other():
    """Completions of 256 tokens, prompts of 100: 16 groups of 4 rows of 356 on one worker of 72 billion."""
    lengths = {"bench": {"lengths": {"kind": "fixed", "tokens": 256}}}
    c = configure({"path": "Qwen/Qwen2.5-72B"}, max_staleness=1, **lengths)
    opt = option(c, "1x3xB200")
    assert not opt.problems and opt.roles.gpus == 3
    body = 80 * (8192 * 128 * (2 * 64 + 2 * 8) + 3 * 8192 * 29568)
    group = 4 * (2 * body * 356 + 4 * 80 * 64 * 128 * 356 * 357 / 2)
    scoring_s = 16 * group / (0.4 * 2250e12)
    plan = planned(opt)
    run = plan.simulated
    assert run.stage_s["reward_model"] == pytest.approx(scoring_s, rel=1e-6)
    # In mode drain a batch is sampled (during the update), scored and synced; grading a group takes 10 ms.
    others = run.stage_s["sample"] + run.stage_s["sync"]
    assert run.step_s == pytest.approx(scoring_s + others, rel=0.05)
    assert run.tokens_per_s < 1.05 * bound(opt)
    slow = replace(plan, simulated=replace(run, step_s=run.stage_s["reward_model"] / 0.95))
    assert reason(slow) == (
        "scoring by models bounds the step: busy all the time; raise `rewards.models.N.num_workers`"
    )


# Messages


def test_what_is_not_planned_is_named_and_nothing_is_refused():
    models = [{"path": "some/model"}, {"name": "exact", "dtype": "float32"}]
    text = printed(make_plan(configure(*models), "1x4xH100", Assumptions(prompt_tokens=100), splits=False))
    assert "warning: reward model judge: path = some/model: neither a directory here" in text
    assert "its 1 worker(s) are placed, but neither their memory nor their time is planned" in text
    assert "reward model exact x 1" in text and "reward model judge x" not in text
    assert "warning: reward model exact" not in text


def test_scoring_longer_than_its_deadline_causes_a_warning():
    plan = make_plan(configure({}), "1x4xH100", Assumptions(prompt_tokens=100), splits=False)
    run = plan.simulated.simulated
    assert not warnings(plan.simulated, plan.setting)
    slow = replace(run, stage_s=run.stage_s | {"reward_model": 1900.0})
    (line,) = warnings(replace(plan.simulated, simulated=slow), plan.setting)
    assert line == "warning: 1,900 s exceeds `cluster.timeouts.sample_s` = 1800; raise it"
