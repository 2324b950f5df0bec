"""The identity of a run: settings that may change on resume, and settings that may not."""

import dataclasses
import json
import os
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest
import yaml

from grpo_dist.config import AlgorithmConfig
from grpo_dist.config.differences import flat
from grpo_dist.config.earlier import translate, translate_algorithm
from grpo_dist.config.files import dump_config
from grpo_dist.runs.checkpoint import list_checkpoints
from grpo_dist.runs.identity import (
    _FREE,
    _FREE_KEYS,
    _LAYOUT,
    Change,
    changes,
    columns_digest,
    describe,
    drop_layout,
    fingerprint,
)
from grpo_dist.runs.resume import load_state
from grpo_dist.runs.run_directory import keep_require_box
from grpo_dist.runs.start import resolve_steps
from tests.support import fakes, made_checkpoints
from tests.support.patience import HANG_S

MODEL = {"name": "quality", "path": "p"}
TEACHER = {"name": "large", "model": "p"}


def config(**changed):
    return fakes.config(**{"rewards": {"models": [MODEL]}} | changed)


def test_the_keys_that_may_change_exist():
    """A renamed key would silently become part of the identity again."""
    everything = flat(config(distillation={"teachers": [TEACHER]}).model_dump(mode="json"))
    for pattern in _LAYOUT:
        own = pattern.replace("*", "0")
        assert own in everything and Change(own, 1, 2).is_layout, pattern
    sections = {key.split(".")[0] for key in everything}
    assert set(_FREE) <= sections and {key for key in _FREE_KEYS if "*" not in key} <= everything.keys()


@pytest.mark.parametrize(
    ("changed", "key", "decides"),
    [
        ({"seed": 7}, "seed", True),
        ({"steps": 9}, "steps", False),
        ({"policy": {"num_workers": 2}}, "policy.num_workers", False),
        ({"policy": {"optimizer": {"lr": 1.0}}}, "policy.optimizer.lr", True),
        ({"rewards": {"models": [MODEL | {"num_workers": 2}]}}, "rewards.models.0.num_workers", False),
        ({"rewards": {"models": [MODEL | {"weight": 2}]}}, "rewards.models.0.weight", True),
        ({"rewards": {"models": [MODEL], "timeout_s": 9}}, "rewards.timeout_s", True),
        ({"bench": {"steps": 9}}, "bench.steps", False),
        ({"distillation": {"teachers": [TEACHER]}}, "distillation.teachers.0.model", True),
        ({"demonstrations": {"data": "d.jsonl"}}, "demonstrations", True),
        ({"sft": {"model": "demo:tiny", "data": "demo:add3"}}, "sft", False),
        ({"policy": {"lora": {}}}, "policy.lora", True),
        ({"health": {"min_signal_groups": 3}}, "health.min_signal_groups", True),
        ({"health": {"min_signal_groups": 0, "kl_above": 3.0}}, "health.kl_above", False),
    ],
)
def test_the_fingerprint_changes_with_settings_that_decide_the_numbers(changed, key, decides):
    other = config(**changed)
    found = [c for c in changes(dump_config(config()), other) if f"{c.key}.".startswith(f"{key}.")]
    assert found and {c.decides(other) for c in found} == {decides}
    assert (fingerprint(config()) != fingerprint(other)) == decides


def test_a_decaying_schedule_makes_the_last_step_part_of_the_identity():
    falling = {"policy": {"optimizer": {"schedule": "linear"}}}
    (found,) = changes(dump_config(config(**falling)), other := config(**falling, steps=9))
    assert found == Change("steps", 6, 9) and found.decides(other)
    assert fingerprint(config(**falling)) != fingerprint(other)


def without(settings, *keys):
    """Return the configuration of a version without ``keys``."""
    old = yaml.safe_load(dump_config(settings))
    for key in keys:
        section, name = key.split(".")
        del old[section][name]
    return old


def test_keys_added_by_a_later_version_are_no_change_at_their_defaults():
    later = "rewards.accept_arithmetic", "health.unscored_steps_above", "weight_sync.probe_every"
    old = without(config(), *later)
    assert changes(yaml.safe_dump(old), config()) == []
    other = config(rewards={"models": [MODEL], "accept_arithmetic": True})
    (found,) = changes(yaml.safe_dump(old), other)
    assert found == Change("rewards.accept_arithmetic", None, True) and found.decides(other)


def test_a_run_that_began_without_require_box_resumes_so(tmp_path):
    """Its instruction asks for a box, which would change the key from false to true."""
    data = {"train": [{"path": "demo:add3"}], "instruction": "Answer in \\boxed{}."}
    asking = config(data=data)
    recorded = tmp_path / "config.yaml"
    assert asking.rewards.require_box and keep_require_box(asking, tmp_path) == asking
    for old in (without(asking, "rewards.require_box"), yaml.safe_load(dump_config(asking))):
        recorded.write_text(yaml.safe_dump(old))
        resumed = keep_require_box(asking, tmp_path)
        assert changes(recorded.read_text(), resumed) == []
        assert resumed.rewards.require_box == ("require_box" in old["rewards"])
        recorded.write_text(dump_config(resumed))  # as the resumed run records it
        assert keep_require_box(asking, tmp_path) == resumed
    stricter = config(data=data, rewards={"models": [MODEL], "require_box": False})
    (change,) = changes(dump_config(asking), stricter)
    assert change.key == "rewards.require_box" and change.decides(stricter)


EARLIER = yaml.safe_load(
    (Path(__file__).parents[1] / "support/earlier_checkpoint/step_000002/config.yaml").read_text()
)["algorithm"] | {"kl": {"coef": 0.0, "estimator": "k3", "target": None, "gain": 0.1}}
RULE = {"rule": "token_k2", "high": 0.1}


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ({}, {}),
        ({"policy_loss": "sapo", "tau_positive": 2.0}, {"loss": {"name": "sapo", "tau_positive": 2.0}}),
        ({"policy_loss": "gspo"}, {"loss": "gspo"}),
        (
            {"policy_loss": "a:f", "kwargs": {"policy_loss": {"b": 1}}},
            {"loss": {"name": "a:f", "kwargs": {"b": 1}}},
        ),
        ({"advantage": "pass_at_k", "pass_k": 3}, {"advantage": {"name": "pass_at_k", "k": 3}}),
        ({"advantage": "rloo", "whiten_advantages": True}, {"advantage": {"name": "rloo", "whiten": True}}),
        ({"advantage": "reinforce_pp"}, {"advantage": "reinforce_pp"}),
        ({"old_logprobs": "rollout"}, {"correction": "bypass"}),
        (
            {"correction": {"kind": "none", "level": "token", "high": 2.0, "veto": 1e-4, "reject": [RULE]}},
            {"correction": {"kind": "none", "veto": 1e-4, "reject": [RULE]}},
        ),
        (
            {"kl": {"coef": 0.1, "estimator": "k1"}, "add_token_level_kl": True},
            {"kl": {"coef": 0.1, "estimator": "k1", "in_reward": True}},
        ),
        ({"entropy_coef": 0.1}, {"entropy": {"coef": 0.1}}),
        (
            {"entropy_coef": 0.1, "adaptive_entropy": {"target": 0.2, "delta": 0.005, "low": 0.0}},
            {"entropy": {"kind": "adaptive", "coef": 0.1, "target": 0.2}},
        ),
        ({"process_coef": 0.5, "outcome_coef": 2.0}, {"process": {"coef": 0.5, "outcome_coef": 2.0}}),
        *(
            (
                {"reward_norm": "batch", "reward_shift": s, "reward_scale": d},
                {"reward_norm": {"name": "batch", **norm}},
            )
            for s, d, norm in (
                (None, None, {}), (False, False, {}), (True, True, {}), (True, None, {"scale": False}),
                (True, False, {"scale": False}), (False, None, {"shift": False}),
                (False, True, {"shift": False}),
            )
        ),
    ],
)  # fmt: skip
def test_a_flat_section_of_an_earlier_version_means_what_it_meant(was, now):
    """What a checkpoint says in it is compared with what is set now."""
    meant = AlgorithmConfig.model_validate(now).model_dump(mode="json")
    assert translate_algorithm(EARLIER | was) == meant
    assert translate_algorithm(meant) == meant


SECTIONS = {
    "batch": {"order": "launched", "oversample": None, "min_samples": None},
    "distillation": {"kl_as": "advantage", "estimator": "k3+", "top_k": 0, "divergence": "reverse"},
    "cluster": {"timeouts": {"room_s": 300.0}, "restarts": {"health_s": 3.0}},
    "health": {
        "garbage_above": None, "length_above": None, "action": "skip", "max_rollbacks": 3,
        "idle_steps_above": 50,
    },
    "rollout": {"speculation": {"tokens": 0, "max_sequences": 4, "history_tokens": 16_000_000}},
    "environments": {"sandbox": {"backend": "process", "output_kb": 64}},
    "evaluation": {"threads": 0, "max_prompts": None},
    "policy": {"logprob_chunk_mib": None},
    "reference": {"threads": 0},
    "rejection": {"chunk_prompts": 512, "prefer": "shortest"},
    "rewards": {"prompt_opens_thought": None, "overlong_buffer": {"share": 0.2}},
    "profile": {"memory": False, "shapes": True, "stacks": False},
    "tracking": {"wandb": {"enabled": False, "project": "grpo-dist", "entity": None, "mode": "auto"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ({}, {}),
        (
            {"batch": {"order": "finished", "oversample": 1.25}},
            {"max_staleness": 1, "batch": {"order": {"name": "completion", "oversample": 1.25}}},
        ),
        (
            {"distillation": {"kl_as": "loss", "estimator": "k2"}},
            {"distillation": {"teachers": [TEACHER], "kl": {"name": "sampled", "estimator": "k2"}}},
        ),
        (
            {"distillation": {"kl_as": "loss", "top_k": 8, "divergence": "forward"}},
            {
                "distillation": {
                    "teachers": [TEACHER],
                    "kl": {"name": "top_k", "k": 8, "divergence": "forward"},
                }
            },
        ),
        ({"tracking": {"wandb": {"enabled": True}}}, {"tracking": {"wandb": "grpo-dist"}}),
        ({"health": {"garbage_above": 0.5}}, {"health": {"degenerate_above": 0.5}}),
        (
            {"health": {"action": "rollback", "max_rollbacks": 5}},
            {"health": {"action": {"kind": "rollback", "max_rollbacks": 5}}},
        ),
        ({"rollout": {"speculation": {"tokens": 4}}}, {"rollout": {"speculation": {"tokens": 4}}}),
        (
            {"sft": {"noise": 0.4, "examples": 100, "threads": 1}},
            {"sft": {"model": "demo:tiny", "data": [{"path": "demo:add3", "noise": 0.4, "examples": 100}]}},
        ),
    ],
)
def test_a_checkpoint_of_an_earlier_version_has_the_settings_that_it_says(was, now):
    """Sections in which keys went or became tagged unions, as that version wrote them with its defaults."""
    set_now = config(**now)
    written = set_now.model_dump(mode="json")
    for name, earlier in SECTIONS.items():
        changed = was.get(name, {})
        for key, value in earlier.items():
            nested = isinstance(value, dict)
            old = value | changed.get(key, {}) if nested else changed.get(key, value)
            kept = written[name].get(key)
            written[name][key] = (kept if nested and isinstance(kept, dict) else {}) | old if nested else old
    written["distillation"].pop("kl")
    for key in ("degenerate_above", "truncated_above"):
        written["health"].pop(key)
    written["cluster"]["timeouts"].pop("placement_timeout_s")
    if "sft" in was:
        (source,) = written["sft"]["data"]
        source |= {"noise": None}
        del source["examples"]
        written["sft"] |= was["sft"]
    assert changes(yaml.safe_dump(written), set_now) == []
    assert translate(set_now.model_dump(mode="json")) == set_now.model_dump(mode="json")


def test_a_setting_that_decided_and_has_no_key_any_longer_is_not_dropped():
    """The run would go on with other samples: the checkpoint is refused with what to write."""
    old = config().model_dump(mode="json")
    old["evaluation"]["max_prompts"] = 8
    old["demonstrations"] = {"data": [{"path": "a.jsonl"}], "seed": old["seed"] + 1}
    kept = translate(old)
    assert (kept["evaluation"]["max_prompts"], kept["demonstrations"]["seed"]) == (8, old["seed"] + 1)
    assert "seed" not in translate(old | {"seed": old["seed"] + 1})["demonstrations"]


# As versions before the tagged unions wrote these sections.
REWARD_MODEL = MODEL | {
    "kind": "outcome", "format": "classifier", "reduce": "min", "step_separator": "\n\n", "step_mark": None,
    "verdict_tokens": None,
}  # fmt: skip
REWARD_FUNCTION = {"function": "a:f", "kind": "outcome", "reduce": "min", "step_separator": "\n\n"}
DATA = {
    "order": "epochs", "length_window": None, "order_kwargs": {}, "drop_solved": None, "pools": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "was", "now"),
    [
        (
            "sampling.temperature",
            {"schedule": [[0, 1.0], [9, 0.5]], "start": None, "entropy": None, "gain": 0.25, "lowest": 0.5},
            {"sampling": {"temperature": {"schedule": [[0, 1.0], [9, 0.5]]}}},
        ),
        (
            "sampling.max_new_tokens",
            {"schedule": None, "start": 8, "largest": 16, "factor": 2.0, "patience": 4},
            {"sampling": {"max_new_tokens": {"kind": "adaptive", "start": 8, "largest": 16, "patience": 4}}},
        ),
        *(
            ("data", DATA | was, {"data": {"train": [{"path": "demo:add3"}]} | now})
            for was, now in (
                ({}, {}),
                ({"drop_solved": 0.9}, {"order": {"drop_solved": 0.9}}),
                ({"order": "length", "length_window": 4}, {"order": {"name": "length", "window": 4}}),
                ({"order": "length"}, {"order": "length"}),
                ({"pools": {"by": "level", "half_life": 10.0}}, {"pools": "level"}),
                (
                    {"order": "pools", "pools": {"by": "source", "half_life": 5.0}},
                    {"order": {"name": "pools", "half_life": 5.0}, "pools": "source"},
                ),
                (
                    {"order": "a:f", "order_kwargs": {"b": 1}},
                    {"order": {"name": "a:f", "kwargs": {"b": 1}}},
                ),
            )
        ),
        (
            "dynamic_sampling",
            {"enabled": False, "metric": None, "max_extra_prompts": None, "oversample": 1.0},
            {},
        ),
        (
            "bench.lengths",
            {"kind": "fixed", "tokens": 4, "mean": None, "sigma": None, "prompt_share": None},
            {"bench": {"lengths": {"kind": "fixed", "tokens": 4}}},
        ),
        *(
            ("rewards.models", [REWARD_MODEL | was], {"rewards": {"models": [MODEL | now]}})
            for was, now in (
                ({}, {}),
                ({"kind": "process"}, {"kind": "classifier"}),
                (
                    {"kind": "process", "format": "rlhflow", "reduce": "mean", "verdict_tokens": ["a", "b"]},
                    {"kind": "rlhflow", "reduce": "mean", "verdict_tokens": ["a", "b"]},
                ),
                (
                    {"kind": "process", "format": "qwen", "step_mark": "x"},
                    {"kind": "qwen", "step_mark": "x"},
                ),
            )
        ),
        *(
            ("rewards.functions", [REWARD_FUNCTION | was], {"rewards": {"functions": [now]}})
            for was, now in (
                ({}, {"function": "a:f"}),
                ({"kind": "process"}, {"function": "a:f", "kind": "process"}),
            )
        ),
    ],
)
def test_a_value_that_an_earlier_version_wrote_means_what_it_meant(key, was, now):
    set_now = config(**now)
    written = set_now.model_dump(mode="json")
    *path, last = key.split(".")
    section = reduce(dict.__getitem__, path, written)
    section[last] = section[last] | was if isinstance(section[last], dict) and was == DATA | was else was
    assert changes(yaml.safe_dump(written), set_now) == []


def test_removing_the_layout_does_not_modify_the_settings():
    models = [MODEL | {"num_workers": 1}]
    settings = {"policy": {"num_workers": 2, "lora": None}, "rewards": {"models": models}}
    assert drop_layout(settings) == {"policy": {"lora": None}, "rewards": {"models": [MODEL]}}
    assert settings["policy"]["num_workers"] == 2


def test_a_message_names_at_most_three_changes():
    found = [Change(f"a.{i}", i, i + 1) for i in range(5)]
    assert describe(found) == "`a.0` = 1 was 0, `a.1` = 2 was 1, `a.2` = 3 was 2 and 2 more"


def test_a_checkpoint_of_another_version_is_judged_by_its_configuration(tmp_path):
    """Another version may hash other keys. A masked secret cannot be compared."""
    secret = {"rewards": {"functions": [{"function": "math", "kwargs": {"api_key": "s3cret"}}]}}
    for name, own, known in (("plain", config(), True), ("secret", fakes.config(**secret), False)):
        made_checkpoints.save(tmp_path / name, 1, config=own)
        (found,) = list_checkpoints(tmp_path / name)
        state = json.loads((found / "state.json").read_text())
        (found / "state.json").write_text(json.dumps(state | {"fingerprint": "of an earlier version"}))
        if known:
            assert load_state(found, own).step == 1
            with pytest.raises(ValueError, match=r"another configuration \(`seed` = 5 was 0: samples"):
                load_state(found, config(seed=5))
        else:
            with pytest.raises(ValueError, match="made with another configuration;"):
                load_state(found, own)
    # A stage of a pipeline: the identity names other stages, where the run had their directories.
    stage = config(model={"path": "/runs/p/01_cold_start/model"})
    made_checkpoints.save(tmp_path / "stage", 1, config=stage)
    (found,) = list_checkpoints(tmp_path / "stage")
    state = json.loads((found / "state.json").read_text())
    (found / "state.json").write_text(json.dumps(state | {"fingerprint": "of an earlier version"}))
    named = config(model={"path": "stage:cold_start"})
    assert load_state(found, named).step == 1
    with pytest.raises(ValueError, match=r"\(`model.path` = stage:start was /runs/p/01_cold_start/model: "):
        load_state(found, config(model={"path": "stage:start"}))
    with pytest.raises(ValueError, match=r"\(`seed` = 5 was 0: "):
        load_state(found, config(model={"path": "stage:cold_start"}, seed=5))


_HASHED = """
import datetime, decimal
import numpy as np
from grpo_dist.runs.identity import columns_digest
from grpo_dist.types import Prompt
columns = {"names": {"b", "a", "c"}, 1: np.arange(3), "when": datetime.date(2021, 1, 1), "own": object(),
           "price": decimal.Decimal("1.50"), "raw": b"x", "nested": [{"x": (1, 2.5, None, True)}]}
print(columns_digest([Prompt("p", np.array([1], np.int32), "1", "set", "problem", columns)]))
"""


@pytest.mark.machine
def test_the_digest_of_columns_is_the_same_in_every_process():
    def digest(seed):
        environ = os.environ | {"PYTHONHASHSEED": str(seed)}
        return subprocess.run(
            [sys.executable, "-c", _HASHED], env=environ, stdout=subprocess.PIPE, check=True, timeout=HANG_S
        ).stdout

    assert digest(1) == digest(2)


def test_the_digest_of_columns_ignores_the_order_of_keys_and_sees_the_order_of_rows():
    def digest(*columns):
        (prompt,) = fakes.prompts(1)
        return columns_digest([dataclasses.replace(prompt, columns=own) for own in columns])

    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    assert digest({"p": Path("a")}) != digest({"p": Path("b")}) and digest({"x": 1j}) != digest({"x": 2j})
    assert digest({"x": 10**5000}) != digest({"x": 10**5000 + 1})
    holds_itself = []
    holds_itself.append(holds_itself)
    assert digest({"x": holds_itself}) == digest({"x": holds_itself})
    assert len({digest({"a": 1}, {"a": 2}), digest({"a": 2}, {"a": 1}), digest({"a": "1"}, {"a": 2})}) == 3


def test_a_run_by_epochs_is_the_run_of_its_steps(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text(
        "".join(json.dumps({"problem": f"{i % 7}+1=", "answer": str(i % 7 + 1)}) + "\n" for i in range(9))
    )
    data = {"train": [{"path": str(path)}]}
    batch = {"prompts_per_step": 2, "samples_per_prompt": 2}
    said = []
    resolved = resolve_steps(config(data=data, batch=batch, epochs=3, steps=50), said.append)
    assert resolved == config(data=data, batch=batch, steps=13)
    assert said == ["`epochs` = 3 of 9 rows, 2 a step: 13 steps"]
    distinct = {**data, "deduplicate": True}
    assert resolve_steps(config(data=distinct, batch=batch, epochs=0.1), said.append).steps == 1
    assert said[1] == "`epochs` = 0.1 of 7 rows, 2 a step: 1 steps"


@pytest.mark.parametrize(("share", "length"), [(0.1, 2), (0.0, 0), (1.0, 25)])
def test_a_warm_up_by_share_is_that_of_its_updates_and_decides_with_the_steps(share, length):
    optimizer = {"warmup_share": share}
    first, longer = (config(steps=steps, policy={"optimizer": optimizer}) for steps in (25, 50))
    assert first.policy.optimizer.warmup(25) == length
    assert (fingerprint(first) == fingerprint(longer)) is (share == 0)
