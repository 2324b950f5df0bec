"""Settings of other frameworks are answered with those of this project."""

import re
from collections import Counter

import pytest

from grpo_dist.cli import main
from grpo_dist.config import Config
from grpo_dist.config.files import ConfigError, load_config
from grpo_dist.config.peer_table import FRAMEWORKS, PEER_TABLE
from grpo_dist.config.peers import hint, lookup, table
from grpo_dist.tools.config_reference import keys, sections

BASE = "model: {path: demo:add3}\ndata: {train: [{path: demo:add3}]}\n"


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def test_every_key_that_is_named_instead_exists():
    known = {key.path for prefix, section in sections(Config) for key in keys(section, prefix)}
    named = {key for row in PEER_TABLE for key in row.ours} | {
        key for row in PEER_TABLE for key in re.findall(r"`([a-z_.]+)`", row.note) if "." in key
    }
    assert len(named) > 90 and named - known == {"cluster.timeouts", "policy.lora"} & named - known


def test_the_table_covers_the_frameworks():
    count = {f: sum(len(row.names.get(f, ())) for row in PEER_TABLE) for f in FRAMEWORKS}
    assert min(count.values()) > 80 and sum(count.values()) > 500, count
    for row in PEER_TABLE:
        assert row.ours or row.note, "what has no counterpart says why"
        assert row.names


def test_no_framework_has_one_name_in_two_rows():
    for framework in FRAMEWORKS:
        names = Counter(name for row in PEER_TABLE for name in row.names.get(framework, ()))
        assert [name for name, count in names.items() if count > 1] == [], framework


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor_rollout_ref.actor.clip_ratio_high=0.28", ["did you mean `algorithm.clip_high`?", "verl's"]),
        ("clip_ratio_high=0.28", ["did you mean `algorithm.clip_high`?"]),
        ("algorithm.adv_estimator=grpo", ["did you mean `algorithm.advantage`?", "grpo_passk: pass_at_k"]),
        ("data.train_batch_size=8", ["did you mean `batch.prompts_per_step`?", "prompts"]),
        ("actor_rollout_ref={rollout: {n: 8}, actor: {ppo_epochs: 2}}", [
            "`actor_rollout_ref.rollout.n`: did you mean `batch.samples_per_prompt`?",
            "`actor_rollout_ref.actor.ppo_epochs`: did you mean `batch.epochs_per_batch`?",
        ]),
        ("num_generations=8", ["did you mean `batch.samples_per_prompt`?", "TRL's `num_generations`"]),
        ("scale_rewards=batch", ["did you mean `algorithm.std`?", "batch_raw"]),
        ("policy.learning_rate=1", ["did you mean `policy.optimizer.lr`?"]),
        ("n_samples_per_prompt=8", ["did you mean `batch.samples_per_prompt`?", "OpenRLHF's"]),
        ("rollout.n_samples_per_prompt=8", ["did you mean `batch.samples_per_prompt`?"]),
        ("eval.temperature=0", ["did you mean `evaluation.temperature`?"]),
        ("rollout.temperature=1", ["did you mean `sampling.temperature`?"]),
        ("loss_agg_mode=token-mean", ["did you mean `algorithm.aggregation`?"]),
        ("dual_clip_loss=true", ["did you mean `algorithm.dual_clip`?", "1 + 2 * pg_clip"]),
        ("ppo_epochs=1", ["did you mean `batch.epochs_per_batch`?"]),
        ("use_kl_loss=true", ["`algorithm.kl.coef`"]),
        ("actor_train={training_args: {learning_rate: 1e-6}}", ["did you mean `policy.optimizer.lr`?"]),
        ("top_p=0.9", ["no counterpart", "`sampling.temperature` alone"]),
        # A misspelt key of ours is still answered by its spelling.
        ("algorithm.clip_hihg=0.3", ["did you mean `algorithm.clip_high`?"]),
        ("polcy.lr=1", ["did you mean `policy`?"]),
    ],
)  # fmt: skip
def test_an_unknown_key_of_another_framework_is_answered_with_ours(base, override, words):
    with pytest.raises(ConfigError) as refusal:
        load_config(base, [override])
    message = str(refusal.value)
    assert "unknown key `" in message and [word for word in words if word not in message] == []


def test_every_name_of_the_table_finds_its_row():
    for row in PEER_TABLE:
        for framework, names in row.names.items():
            for name in names:
                assert any(one.row is row and one.framework == framework for one in lookup(name)), name


def test_a_word_that_many_settings_end_in_names_none():
    assert hint("path") is None and hint("no_such_thing") is None


def test_a_flag_of_another_framework_is_answered_with_the_key(base, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", str(base), "--n-samples-per-prompt", "8"])
    assert ended.value.code == 2
    assert "--n-samples-per-prompt: did you mean `batch.samples_per_prompt`?" in capsys.readouterr().err


def test_the_table_has_a_line_for_every_row():
    assert len(table().splitlines()) == len(PEER_TABLE) + 2
