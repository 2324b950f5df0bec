"""Published runs: the page has what the plan says now, and what the price is made of, by hand."""

import math
import re
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from grpo_dist.config.files import load_config
from grpo_dist.errors import UserError
from grpo_dist.tools.plan.accelerators import parse_cluster
from grpo_dist.tools.plan.heads import CONFIGS
from grpo_dist.tools.plan.published import (
    GUIDE,
    MIDDLE,
    PRICE_VARIANTS,
    RUNS,
    PricedStage,
    after_cap,
    before_cap,
    main,
    row_digest,
    stated_digests,
)

STAGES = [(run, stage) for run in RUNS for stage in run.stages]


def test_the_page_has_the_rows_that_are_planned_now():
    """After a change of the plan: `python -m grpo_dist.tools.plan.published`."""
    now = [row_digest(run, variant) for run in RUNS for variant in PRICE_VARIANTS]
    assert stated_digests(GUIDE.read_text()) == now


@pytest.mark.parametrize(("run", "stage"), STAGES, ids=lambda x: getattr(x, "file", ""))
def test_the_first_row_has_the_hours_that_are_simulated_now(run, stage):
    (row,) = re.findall(rf"\| {run.name} \|.*\n\|---.*\n\| as published \| (.*)", GUIDE.read_text())
    stated = row.split(" | ")[run.stages.index(stage)]
    assert stated == f"{PricedStage.of(stage, PRICE_VARIANTS[0], MIDDLE).gpu_hours:,.0f}"


@pytest.mark.parametrize(("run", "stage"), STAGES, ids=lambda x: getattr(x, "file", ""))
def test_a_file_has_the_likely_lengths_and_uses_all_of_its_gpus(run, stage):
    found = load_config(CONFIGS / f"published/{stage.file}.yaml")
    lengths = found.bench.lengths
    mean = after_cap(lengths.mean, lengths.sigma, found.sampling.max_new_tokens)
    assert mean == pytest.approx(stage.means[MIDDLE], rel=1e-3)
    assert found.rollout.num_workers == found.policy.num_workers == parse_cluster(stage.cluster).gpus


def test_deepscaler_cuts_the_share_of_completions_that_its_authors_report():
    """4.2 to 6.5 % of those of the first stage, rllm-org/rllm#33."""
    found = load_config(CONFIGS / "published/deepscaler_1.5b_8k.yaml")
    mu = math.log(found.bench.lengths.mean) - found.bench.lengths.sigma**2 / 2
    cut = 1 - NormalDist(mu, found.bench.lengths.sigma).cdf(math.log(8192))
    assert 0.042 < cut < 0.065


def test_the_mean_after_a_cap_is_that_of_drawn_lengths_and_its_inverse_returns():
    drawn = np.minimum(np.random.default_rng(0).lognormal(math.log(1000) - 0.32, 0.8, 10**6), 1500)
    assert after_cap(1000, 0.8, 1500) == pytest.approx(drawn.mean(), rel=2e-3)
    for mean in (10.0, 700.0, 1490.0):
        assert after_cap(before_cap(mean, 0.8, 1500), 0.8, 1500) == pytest.approx(mean)
    with pytest.raises(UserError, match="mean = 1500 tokens: expected less than the cap of 1500"):
        before_cap(1500, 0.8, 1500)


def test_every_way_is_switched_on_alone_and_together():
    by_name = {variant.name: PricedStage.of(RUNS[0].stages[0], variant, MIDDLE) for variant in PRICE_VARIANTS}
    made = {name: priced.option.config for name, priced in by_name.items()}
    assert [name for name, c in made.items() if c.rollout.enforce_eager] == ["as published"]
    ways = {
        "and shared prompts": lambda c: c.model.packing,
        "and tail batching": lambda c: c.data.order == "length",
        "and carry-over": lambda c: c.batch.order == "finished",
        "and speculation": lambda c: c.rollout.speculation.tokens > 0,
        "and deltas": lambda c: c.weight_sync.deltas is True,
    }
    for way, is_on in ways.items():
        assert is_on(made[way]) and not is_on(made["with CUDA graphs"]), way
        others = [other for other in ways if other != way and ways[other](made[way])]
        assert others == [], way
    for name, missing in (("all, with tail batching", 2), ("all, with carry-over", 1)):
        on = [is_on(made[name]) for is_on in ways.values()]
        assert on == [i != missing for i in range(5)], name
    split = made["and carry-over"]  # of eight GPUs
    assert split.rollout.num_workers + split.policy.num_workers + split.reference.num_workers == 8
    assert by_name["and speculation"].option.scenario.rates.reached.accepted == 1.5


def test_tail_batching_saves_nothing_in_the_first_epoch():
    """40,000 prompts are 313 steps of 128, and 53,000 are 415."""
    unknown = {
        stage.file: PricedStage.of(stage, PRICE_VARIANTS[3], MIDDLE).unknown_steps for _, stage in STAGES
    }
    assert unknown == {
        "deepscaler_1.5b_8k": 313, "deepscaler_1.5b_16k": 0, "deepscaler_1.5b_24k": 0,
        "polaris_4b_40k": 234, "polaris_4b_48k": 181, "polaris_4b_52k": 0,
    }  # fmt: skip
    small = replace(RUNS[0].stages[0], rows=128 * 2000)  # more prompts than the stage has steps for
    plain, tail, known = (
        PricedStage.of(stage, PRICE_VARIANTS[i], MIDDLE)
        for stage, i in ((small, 1), (small, 3), (replace(small, rows=1), 3))
    )
    assert PRICE_VARIANTS[3].name == "and tail batching"
    plain = replace(plain, steps=tail.steps)
    assert tail.gpu_hours == pytest.approx(plain.gpu_hours, rel=0.02)
    assert known.gpu_hours < 0.98 * plain.gpu_hours and known.digest != tail.digest
    assert plain.digest == replace(plain, unknown_steps=7).digest


def test_the_stages_of_a_run_follow_each_other():
    for run in RUNS:
        steps = [load_config(CONFIGS / f"published/{stage.file}.yaml").steps for stage in run.stages]
        assert [stage.begins_at for stage in run.stages] == [sum(steps[:i]) for i in range(len(steps))]


@pytest.mark.slow
def test_the_command_finds_a_stale_page_and_repairs_it(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("# Runs\n<!-- begin generated: Small -->\nold\n<!-- end generated: Small -->\n")
    small = replace(RUNS[0], name="Small", stages=RUNS[0].stages[:1])
    monkeypatch.setattr("grpo_dist.tools.plan.published.GUIDE", page)
    monkeypatch.setattr("grpo_dist.tools.plan.published.RUNS", (small,))
    monkeypatch.setattr("grpo_dist.tools.plan.published.PRICE_VARIANTS", PRICE_VARIANTS[:1])
    assert main(["--check"]) == 1 and "old" in page.read_text()
    assert main([]) == 0 and main(["--check"]) == 0
    assert stated_digests(page.read_text()) == [row_digest(small, PRICE_VARIANTS[0])]
    assert "page.md: changed" in capsys.readouterr().out
