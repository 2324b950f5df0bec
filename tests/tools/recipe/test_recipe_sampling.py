"""The sample stage with fake workers: it resumes by chunks, is reproducible, and reports an empty result."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

import actors.cluster
from grpo_dist.config import Config
from grpo_dist.errors import UserError
from grpo_dist.tools.recipe.rejection import run_sampling
from tests.support.fakes import World, fake_cluster

END = 1  # end token of the demo's tokenizer


def config(**rejection) -> Config:
    return Config.model_validate({
        "model": {"path": "demo:tiny"}, "data": {"train": [{"path": "demo:add3", "max_rows": 10}]},
        "sampling": {"max_new_tokens": 4}, "rejection": {"samples_per_prompt": 4} | rejection,
    })  # fmt: skip


class OneAtATime(World):
    """An engine with capacity for one prompt: requests finish in order."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._room = asyncio.Lock()

    async def sample(self, prompt, *, seeds, sampling):
        async with self._room:
            sampled = await super().sample(prompt, seeds=seeds, sampling=sampling)
        short = (replace(r, completion_ids=np.array([r.completion_ids[0], END], np.int32)) for r in sampled)
        return tuple(short)


@pytest.fixture
def clusters(monkeypatch):
    """Return the worlds of started clusters, and uids at which the next ones fail."""
    worlds: list[World] = []
    failing: list[str] = []

    def make():
        return OneAtATime(fail_on=failing.pop() if failing else None)

    monkeypatch.setattr(actors.cluster, "Cluster", fake_cluster(worlds, make))
    monkeypatch.setattr("grpo_dist.tools.recipe.rejection._CHUNK", 3)
    return worlds, failing


def sample(directory, **rejection):
    report = run_sampling(config(**rejection), directory, lambda _: None)
    return report, (directory / "sft.jsonl").read_text()


def test_an_interrupted_sampling_resumes_with_the_missing_chunks_and_gives_the_same_result(
    tmp_path, clusters
):
    worlds, failing = clusters
    report, text = sample(tmp_path / "whole")
    order = [uid for uid, _, _ in sorted(worlds[0].sampled)]
    assert len(order) == 10 and report["samples"] == 40
    third_chunk = json.loads(text.splitlines()[-1])["uid"]  # the last prompt kept, in chunk 3 or 4
    failing.append(third_chunk)
    with pytest.raises(RuntimeError, match="engine died"):
        sample(tmp_path / "cut")
    before = {p.name for p in (tmp_path / "cut/samples").iterdir()}
    assert before and before < {p.name for p in (tmp_path / "whole/samples").iterdir()}
    assert not (tmp_path / "cut/sft.jsonl").exists()
    assert sample(tmp_path / "cut") == (report, text)
    again = {uid for uid, _, _ in worlds[-1].sampled}
    assert third_chunk in again and len(again) == 10 - 3 * len(before)


def test_prompts_are_drawn_by_seed_and_samples_of_a_prompt_have_different_seeds(tmp_path, clusters):
    worlds, _ = clusters
    report, _ = sample(tmp_path, max_prompts=4)
    assert report["prompts"] == 4 and report["samples"] == 16
    seeds = [seed for _, group, _ in worlds[0].sampled for seed in group]
    assert len(set(seeds)) == 16


def test_a_stage_that_keeps_nothing_gives_the_reason_and_writes_no_demonstrations(tmp_path, clusters):
    with pytest.raises(UserError) as refusal:
        sample(tmp_path, min_reward=2)
    message = str(refusal.value)
    assert "none of 40 samples was kept (40 below_min_reward); lower `rejection.min_reward` = 2" in message
    assert not (tmp_path / "sft.jsonl").exists() and (tmp_path / "report.json").is_file()
