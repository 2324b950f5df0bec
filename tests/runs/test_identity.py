"""The identity of a run: settings that may change on resume, and settings that may not."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grpo_dist.config.differences import flat
from grpo_dist.config.files import dump_config
from grpo_dist.runs.checkpoint import list_checkpoints, load_state
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
from grpo_dist.runs.start import resolve_steps
from tests.support import fakes, made_checkpoints
from tests.support.patience import HANG_S

MODEL = {"name": "quality", "path": "p"}
TEACHER = {"name": "large", "model": "p"}
ADD3 = [{"path": "demo:add3"}]
HELD = [ADD3[0] | {"name": "held.out"}]
EXACT = {"functions": ["exact"]}
FROM_A_FILE = [ADD3[0] | {"environment": "calculator", "environment_kwargs": {"path": "tables"}}]


def config(**changed):
    return fakes.config(**{"rewards": {"models": [MODEL]}} | changed)


def test_the_keys_that_may_change_exist():
    """A renamed key would silently return to the identity."""
    all_keys = flat(config(distillation={"teachers": [TEACHER]}).model_dump(mode="json"))
    for pattern in _LAYOUT:
        key_name = pattern.replace("*", "0")
        assert key_name in all_keys and Change(key_name, 1, 2).is_layout, pattern
    sections = {key.split(".")[0] for key in all_keys}
    assert set(_FREE) <= sections and {key for key in _FREE_KEYS if "*" not in key} <= all_keys.keys()


@pytest.mark.parametrize(
    ("changed", "key", "decides"),
    [
        ({"seed": 7}, "seed", True),
        ({"steps": 9}, "steps", False),
        ({"data": {"train": ADD3, "eval": ADD3}}, "data.eval", False),
        ({"data": {"train": [{"path": "moved/add3.jsonl"}]}}, "data.train.0.path", False),
        ({"data": {"train": FROM_A_FILE}}, "data.train.0.environment_kwargs.path", True),
        ({"policy": {"num_workers": 2}}, "policy.num_workers", False),
        ({"policy": {"optimizer": {"lr": 1.0}}}, "policy.optimizer.lr", True),
        ({"rewards": {"models": [MODEL | {"num_workers": 2}]}}, "rewards.models.0.num_workers", False),
        ({"rewards": {"models": [MODEL | {"weight": 2}]}}, "rewards.models.0.weight", True),
        ({"rewards": {"models": [MODEL], "timeout_s": 9}}, "rewards.timeout_s", True),
        ({"rewards": {"models": [MODEL], "by_source": {"add3": EXACT}}}, "rewards.by_source.add3", True),
        (
            {
                "data": {"train": ADD3, "eval": HELD},
                "rewards": {"models": [MODEL], "by_source": {"held.out": EXACT}},
            },
            "rewards.by_source",
            False,
        ),
        ({"bench": {"steps": 9}}, "bench.steps", False),
        ({"distillation": {"teachers": [TEACHER]}}, "distillation.teachers.0.model", True),
        ({"demonstrations": {"data": "d.jsonl"}}, "demonstrations.coef", True),
        ({"sft": {"model": "demo:tiny", "data": "demo:add3"}}, "sft", False),
        ({"policy": {"lora": {}}}, "policy.lora", True),
        ({"health": {"min_signal_groups": 3}}, "health.min_signal_groups", True),
        ({"health": {"min_signal_groups": 0, "kl_above": 3.0}}, "health.kl_above", False),
    ],
)
def test_the_fingerprint_changes_with_settings_that_decide_the_numbers(changed, key, decides):
    other = config(**changed)
    matching = [c for c in changes(dump_config(config()), other) if f"{c.key}.".startswith(f"{key}.")]
    assert matching and {c.decides(other) for c in matching} == {decides}
    assert (fingerprint(config()) != fingerprint(other)) == decides


def test_a_decaying_schedule_makes_the_last_step_part_of_the_identity():
    falling = {"policy": {"optimizer": {"schedule": "linear"}}}
    (change,) = changes(dump_config(config(**falling)), other := config(**falling, steps=9))
    assert change == Change("steps", 6, 9) and change.decides(other)
    assert fingerprint(config(**falling)) != fingerprint(other)


def test_keys_added_by_a_later_version_are_no_change_at_their_defaults():
    old = yaml.safe_load(dump_config(config()))
    del old["rewards"]["accept_arithmetic"]
    del old["health"]["unscored_steps_above"], old["weight_sync"]["probe_every"]
    assert changes(yaml.safe_dump(old), config()) == []
    other = config(rewards={"models": [MODEL], "accept_arithmetic": True})
    (change,) = changes(yaml.safe_dump(old), other)
    assert change == Change("rewards.accept_arithmetic", None, True) and change.decides(other)


def test_removing_the_layout_does_not_modify_the_settings():
    models = [MODEL | {"num_workers": 1}]
    settings = {"policy": {"num_workers": 2, "lora": None}, "rewards": {"models": models}}
    assert drop_layout(settings) == {"policy": {"lora": None}, "rewards": {"models": [MODEL]}}
    assert settings["policy"]["num_workers"] == 2


def test_a_message_names_at_most_three_changes():
    five = [Change(f"a.{i}", i, i + 1) for i in range(5)]
    assert describe(five) == "`a.0` = 1 was 0, `a.1` = 2 was 1, `a.2` = 3 was 2 and 2 more"


@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"train": ADD3, "instruction": "*** answer in a box ***"}},
        {"tracking": {"sinks": [{"function": "m:f", "kwargs": {"api_key": "s3cret"}}]}},
    ],
)
def test_settings_beside_stars_or_a_secret_that_decides_nothing_may_change(tmp_path, sections):
    made_checkpoints.save(tmp_path, 1, config=fakes.config(**sections))
    (checkpoint,) = list_checkpoints(tmp_path)
    optimizer = {"policy": {"optimizer": {"lr": 1e-7}}}
    assert load_state(checkpoint, fakes.config(**sections | optimizer)).step == 1
    with pytest.raises(ValueError, match=r"another configuration \(`seed` = 5 was 0: samples"):
        load_state(checkpoint, fakes.config(**sections, seed=5))


def test_a_checkpoint_of_another_version_is_judged_by_its_configuration(tmp_path):
    """Another version may hash other keys. A masked secret cannot be compared."""
    secret = {"rewards": {"functions": [{"function": "math", "kwargs": {"api_key": "s3cret"}}]}}
    for name, run_config, is_plain in (("plain", config(), True), ("secret", fakes.config(**secret), False)):
        made_checkpoints.save(tmp_path / name, 1, config=run_config)
        (checkpoint,) = list_checkpoints(tmp_path / name)
        state = json.loads((checkpoint / "state.json").read_text())
        (checkpoint / "state.json").write_text(json.dumps(state | {"fingerprint": "of an earlier version"}))
        if is_plain:
            assert load_state(checkpoint, run_config).step == 1
            with pytest.raises(ValueError, match=r"another configuration \(`seed` = 5 was 0: samples"):
                load_state(checkpoint, config(seed=5))
        else:
            words = r"another configuration; .* unknown, as `rewards.*\.kwargs\.api_key` is a secret"
            with pytest.raises(ValueError, match=words):
                load_state(checkpoint, run_config)
    # A pipeline stage: the identity has the names of other stages, the run has their directories.
    stage = config(model={"path": "/runs/p/01_cold_start/model"})
    made_checkpoints.save(tmp_path / "stage", 1, config=stage)
    (checkpoint,) = list_checkpoints(tmp_path / "stage")
    state = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps(state | {"fingerprint": "of an earlier version"}))
    named = config(model={"path": "stage:cold_start"})
    assert load_state(checkpoint, named).step == 1
    with pytest.raises(ValueError, match=r"\(`model.path` = stage:start was /runs/p/01_cold_start/model: "):
        load_state(checkpoint, config(model={"path": "stage:start"}))
    with pytest.raises(ValueError, match=r"\(`seed` = 5 was 0: "):
        load_state(checkpoint, config(model={"path": "stage:cold_start"}, seed=5))


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
    def digest(*rows):
        (prompt,) = fakes.prompts(1)
        return columns_digest([dataclasses.replace(prompt, columns=row) for row in rows])

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
    messages = []
    resolved = resolve_steps(config(data=data, batch=batch, epochs=3, steps=50), messages.append)
    assert resolved == config(data=data, batch=batch, steps=13)
    assert messages == ["`epochs` = 3 of 9 rows, 2 a step: 13 steps"]
    distinct = {**data, "deduplicate": True}
    assert resolve_steps(config(data=distinct, batch=batch, epochs=0.1), messages.append).steps == 1
    assert messages[1] == "`epochs` = 0.1 of 7 rows, 2 a step: 1 steps"
    last, beyond = (config(data=data, batch=batch, epochs=3, profile={"steps": [n]}) for n in (13, 14))
    assert resolve_steps(last, messages.append).steps == 13  # checked with these, not with `steps` = 6
    with pytest.raises(ValueError, match=r"`profile.steps` = \[14\], `steps` = 13: the run ends before"):
        resolve_steps(beyond, messages.append)


@pytest.mark.parametrize(("share", "length"), [(0.1, 2), (0.0, 0), (1.0, 25)])
def test_a_warm_up_by_share_is_that_of_its_updates_and_decides_with_the_steps(share, length):
    optimizer = {"warmup_share": share}
    first, longer = (config(steps=steps, policy={"optimizer": optimizer}) for steps in (25, 50))
    assert first.policy.optimizer.warmup(25) == length
    assert (fingerprint(first) == fingerprint(longer)) is (share == 0)
