"""A worker on a node without the model's directory, as if only the driver's node has the download."""

import asyncio
import platform

import pytest

from actors.workers.policy import PolicyWorker
from actors.workers.reference import ReferenceWorker
from actors.workers.reward import PolicyTokenizer, RewardModelWorker, load_tokenizer
from actors.workers.rollout import RolloutWorker
from grpo_dist.config import ModelConfig
from grpo_dist.config.rewards import OutcomeModelConfig
from grpo_dist.runtime.model_files import check_on_node
from tests.support.engine_arguments import spec

MISSING = "/home/driver/.cache/huggingface/hub/model"
POLICY = ModelConfig(path="owner/name")


def reference(directory):
    ReferenceWorker(model=POLICY, model_dir=MISSING, temperature=1.0).ready()


def reward_model(path, policy_dir):
    settings = OutcomeModelConfig(name="judge", path=path)
    RewardModelWorker(settings, policy=POLICY, policy_dir=policy_dir).ready()


STARTS = {
    "rank": lambda _: PolicyWorker().start(None, None, None, MISSING, None),
    "engine": lambda _: asyncio.run(RolloutWorker(spec(model_dir=MISSING)).start()),
    "reference": reference,
    "reward model": lambda present: reward_model(MISSING, str(present)),
    "tokenizer of a reward model": lambda present: reward_model(str(present), MISSING),
    "tokenizer of a reward worker": lambda _: load_tokenizer(PolicyTokenizer(MISSING, False)),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_the_message_names_the_directory_the_node_and_what_to_set(monkeypatch, tmp_path, start):
    monkeypatch.setenv("HF_HOME", "/home/worker/hub")
    monkeypatch.delenv("GRPO_DIST_CACHE", raising=False)
    with pytest.raises(ValueError, match="does not have it") as refusal:
        start(tmp_path)
    message = str(refusal.value)
    assert message.startswith(f"model directory {MISSING}: node {platform.node()} ")
    assert "HF_HOME=/home/worker/hub, GRPO_DIST_CACHE=not set" in message


def test_a_directory_that_is_there_is_no_problem(tmp_path):
    check_on_node(tmp_path)
    check_on_node(str(tmp_path))
