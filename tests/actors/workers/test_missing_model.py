"""A worker on a node without the model's directory, as if only the driver's node has the download; or without
the run's directory.
"""

import asyncio
import platform

import pytest

from actors.workers.policy import PolicyWorker
from actors.workers.reference import ReferenceWorker
from actors.workers.reward import PolicyTokenizer, RewardModelWorker, load_tokenizer
from actors.workers.rollout import RolloutWorker
from grpo_dist.config import ModelConfig
from grpo_dist.config.rewards import OutcomeModelConfig
from grpo_dist.errors import UserError
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


def test_a_rank_that_does_not_see_the_run_directory_saves_nothing(tmp_path):
    """It would make the directory on its own node, and the checkpoint would lack its part."""
    partial = tmp_path / "checkpoints/.partial_step_000020_0"
    for call in (
        lambda: PolicyWorker().check_sees(str(partial)),
        lambda: PolicyWorker().save(f"{partial}/policy", True),
    ):
        with pytest.raises(UserError, match=r"set `output_dir` to a directory on storage") as refusal:
            call()
        assert str(refusal.value).startswith(f"{partial}: node {platform.node()} of a policy rank does not")
    assert not list(tmp_path.iterdir())
    PolicyWorker().check_sees(str(tmp_path))


def test_a_directory_that_is_there_is_no_problem(tmp_path):
    check_on_node(tmp_path)
    check_on_node(str(tmp_path))
