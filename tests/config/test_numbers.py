"""The numbers that each preset, configuration and `algorithm` setting gives for a fixed batch.

`numbers.jsonl` was recorded at commit 646791e4, where `algorithm` was a flat list of keys. A case has the
other sections that a preset sets; rows, loss, advantages and gradient (two projections of each) per update;
and the metrics of the last update. All are float64 from the advantages on.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from grpo_dist.batch.rows import sampled_tokens
from grpo_dist.batch.signal import SignalRule
from grpo_dist.config.files import load_config
from grpo_dist.loop.groups import ScoredGroup
from grpo_dist.loop.sampling_schedule import KLController
from grpo_dist.loop.updates import make_updates
from grpo_dist.policy.loss import Objective, batch_loss, finish_stats
from grpo_dist.policy.preparation import EntropyBonus, Preparation
from tests.support import made_groups
from tests.support.documents import ROOT

RECORDED = (ROOT / "tests/config/numbers.jsonl").read_text().splitlines()
METRICS = json.loads(RECORDED[0])
CASES = {name: numbers for name, *numbers in map(json.loads, RECORDED[1:])}
SMALL = (
    "batch.prompts_per_step=4", "batch.samples_per_prompt=6", "policy.num_workers=1",
    "policy.sequence_parallel=1",
)  # fmt: skip
TWO = "batch.updates_per_step=2"
TWO_REWARDS = "rewards.functions=[{function: math},{function: format, weight: 0.5}]"
EPISODES = "data.environment=calculator"  # for estimators of step or turn rewards


def algorithm(**settings):
    """Return overrides for two updates with these settings, all others at their defaults."""
    return ["algorithm={}", f"algorithm={json.dumps(settings)}", TWO]


LOSSES = {
    "ppo_clip": {"clip_low": 0.05, "clip_high": 0.1, "dual_clip": 1.1},
    "cispo": {"clip_low": 0.1, "clip_high": 0.05, "unified_mask": True},
    "sapo": {"tau_positive": 2, "tau_negative": 3},
    "dppo_tv": {"clip_low": 0.01, "clip_high": 0.02, "ratio_cap": 1.05},
    "gspo": {"clip_low": 0.02, "clip_high": 0.01},
    "gmpo": {"clip_low": 0.05, "clip_high": 0.03},
    "dro": {"beta": 0.7},
    "kimi15": {"tau": 0.7},
    "reinforce_is": {"ratio_cap": 1.1},
    "vespo": {"k_positive": 1, "lambda_positive": 1.5, "k_negative": 0.5, "lambda_negative": 2.5},
    "clip_cov": {"clip_low": 0.1, "clip_high": 0.3, "cov_share": 0.1, "cov_low": -1, "cov_high": 0.5},
    "kl_cov": {"cov_share": 0.1, "cov_kl_coef": 0.3},
}
RULES = [{"rule": "token_k1", "low": 0.9, "high": 1.2}, {"rule": "seq_mean_k3", "high": 0.01}]
BATCH_NORM = {"name": "batch", "scale": False}
SETTINGS = {
    **{f"{name} settings": {"loss": {"name": name, **settings}} for name, settings in LOSSES.items()},
    "grpo batch": {"advantage": {"std": "batch", "eps": 0.1}},
    "grpo batch_raw": {"advantage": {"std": "batch_raw"}},
    "grpo none": {"advantage": {"std": "none"}},
    "grpo_passk batch": {"advantage": {"name": "grpo_passk", "std": "batch"}},
    "gdpo none": {"advantage": {"name": "gdpo", "std": "none", "eps": 0.5}},
    "process batch": {"advantage": {"name": "process", "std": "batch", "eps": 0.01}},
    "turn settings": {"advantage": {"name": "turn", "discount": 0.5, "std": "none"}},
    "pass_at_k 3": {"advantage": {"name": "pass_at_k", "k": 3, "eps": 0.3}},
    "gamma": {"advantage": {"name": "reinforce_pp", "gamma": 0.9}},
    "no whitening": {"advantage": {"name": "reinforce_pp", "whiten": False}},
    "whitening": {"advantage": {"whiten": True}},
    "clip and lengths": {"advantage_clip": 0.5, "length_weights": True},
    "reward clip": {"reward_clip": 0.6},
    "norm group": {"reward_norm": "group", "advantage": "dr_grpo"},
    "norm batch shift": {"reward_norm": BATCH_NORM, "advantage": "reinforce_pp"},
    "norm batch scale": {"reward_norm": {"name": "batch", "shift": False, "eps": 0.2},
                         "advantage": {"name": "reinforce_pp", "whiten": False}},
    "norm running": {"reward_norm": "running", "advantage": "reinforce_pp"},
    "process added": {"process": {"coef": 0.5, "outcome_coef": 0.3}},
    **{f"kl {name}": {"kl": {"coef": 0.1, "estimator": name}} for name in ("k1", "k2", "k1+", "k3+", "abs")},
    "kl k3": {"kl": {"coef": 0.1, "target": 0.3}},
    "kl unbiased": {"kl": {"coef": 0.1, "bias_correction": True}},
    "kl in the reward": {
        "kl": {"coef": 0.1, "estimator": "k1", "target": 0.2, "gain": 0.5, "in_reward": True}
    },
    "kl in a discounted reward": {
        "kl": {"coef": 0.1, "in_reward": True}, "advantage": {"name": "reinforce_pp", "gamma": 0.8},
    },
    "none": {"correction": "none"},
    "bypass": {"correction": "bypass"},
    "none with a veto and rules": {"correction": {"kind": "none", "veto": 0.95, "reject": RULES}},
    "bypass with rules": {
        "correction": {"kind": "bypass", "reject": [{"rule": "segment_mean_tv", "high": 0.05}]}
    },
    **{
        f"{kind} {level}": {"correction": {"kind": kind, "level": level, "low": 0.9, "high": 1.05}}
        for kind in ("tis", "mis", "icepop")
        for level in ("token", "sequence", "geometric", "segment")
    },
    "tis normalised": {"correction": {"normalize": True, "high": 1.05, "veto": 0.86}},
    "entropy": {"entropy": {"coef": 0.01}},
    "entropy steered": {
        "entropy": {"kind": "adaptive", "coef": 0.02, "target": 1.2, "delta": 0.1, "low": 0.01, "high": 0.5}
    },
    "top entropy": {"top_entropy_share": 0.3},
    "off-policy mask": {"off_policy_mask_threshold": 0.001},
    "truncated": {"mask_truncated": True},
    "zero variance": {"zero_variance_filter": True},
    "idle rows": {"skip_idle_rows": False},
}  # fmt: skip


def overrides(name):
    kind, _, preset = name.partition(" ")
    if kind == "preset":
        return [f"+algorithm={preset}", *_needs(preset)]
    if kind == "loss":
        one = ["batch.updates_per_step=1"] if preset == "policy_gradient" else []
        return [*algorithm(loss=preset), *one]
    if kind == "advantage":
        k = {"k": 2} if preset == "pass_at_k" else {}
        return [*algorithm(advantage={"name": preset, **k})[:2], *_needs(preset)]
    return [*algorithm(**SETTINGS.get(name, {"aggregation": name})), *_needs(kind)]


def _needs(name):
    return {"gdpo": [TWO_REWARDS], "process": [EPISODES], "turn": [EPISODES]}.get(name, [])


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory):
    store = tmp_path_factory.mktemp("rank") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CASES)
def test_the_settings_reach_the_maths_as_they_did(name):
    file = ROOT / "configs" / (name.removeprefix("file ") if name.startswith("file ") else "demo.yaml")
    config = load_config(file, [*([] if name.startswith("file ") else overrides(name)), *SMALL])
    if not name.startswith(("file ", "preset ")):
        assert config.algorithm.preset is None
    actual, expected = numbers(config), CASES[name]
    assert actual[0] == expected[0]
    for (rows, *values), (recorded_rows, *recorded) in zip(actual[1], expected[1], strict=True):
        assert rows == recorded_rows
        for value, other in zip(values, recorded, strict=True):
            assert value == pytest.approx(other, rel=1e-11, abs=1e-13)
    assert actual[2] == pytest.approx(
        {name: value for name, value in zip(METRICS, expected[2], strict=True) if value is not None},
        rel=1e-11, abs=1e-13,
    )  # fmt: skip


def test_every_preset_is_recorded():
    presets = {f"preset {file.stem}" for file in (ROOT / "configs/algorithms").glob("*.yaml")}
    assert presets == {name for name in CASES if name.startswith("preset ")}


def numbers(config):
    """Return the numbers of a configuration in the form of `numbers.jsonl`."""
    batch_groups = groups("maxrl" in str(config.algorithm.advantage))
    rng = np.random.default_rng(9)
    reference = [
        [-2 * rng.random(len(row.completion_ids), dtype=np.float32) for r in g.rollouts for row in r.rows]
        for g in batch_groups
    ]
    scored = [ScoredGroup(g, logprobs) for g, logprobs in zip(batch_groups, reference, strict=True)]
    shape = sampled_tokens(batch_groups).shape
    norms = 0.5 + 0.4 * torch.sin(torch.arange(shape.numel())).view(shape)
    updates, later = make_updates(config, scored, 1, kl_coef=config.algorithm.kl.coef, score_norms=norms)
    settings = Objective(config.algorithm)
    bonus, controller = EntropyBonus(config.algorithm.entropy), KLController(config.algorithm.kl)
    moved = [0.0]

    def logprobs(batch):
        values = batch.policy.rollout_logprobs.nan_to_num().double() + 0.15 * waves(batch, 1)
        return values + moved[0] * waves(batch, 2), 1 + 0.5 * waves(batch, 4)

    prepare, results = Preparation(logprobs, torch.device("cpu"), True), []
    epochs = config.batch.epochs_per_batch
    updates = [in_float64(update) for update in updates]
    steps = [
        prepare.prepare_step(u, config.algorithm, moves=i > 0 or epochs > 1) for i, u in enumerate(updates)
    ]
    for number, update in enumerate(steps * epochs):
        moved[0] = 0.2 * number
        unmoved = number == 0 and not config.algorithm.correction.bypasses
        ready = prepare.prepare_update(update, config.algorithm, number=number, unmoved=unmoved)
        now, entropy = (values.requires_grad_() for values in logprobs(update))
        loss, stats = batch_loss(now, ready, settings, entropy=entropy, entropy_coef=bonus.weight)
        gradients = torch.autograd.grad(loss, (now, entropy), allow_unused=True)
        metrics = finish_stats(stats)
        metrics |= bonus.observe(metrics) | controller.observe(metrics)
        results.append((
            len(update), loss.item(), projections(update.policy.advantages, update),
            [x for gradient in gradients if gradient is not None for x in projections(gradient, update)],
        ))  # fmt: skip
    rule = SignalRule(config.algorithm, weights=config.rewards.weights)
    overlong = config.rewards.overlong_buffer
    other = [
        [bool(rule(g)) for g in batch_groups], [epochs, config.batch.updates_per_step, len(later)],
        config.dynamic_sampling.enabled, [0.2, overlong.penalty],
    ]  # fmt: skip
    return other, results, metrics


def groups(right_or_wrong):
    """Return four groups of episodes: one of equal rewards, one with a sample without a score."""
    rng = np.random.default_rng(7)
    rewards = [[1, 0, 0, 1, 0, 0], [1] * 6, [0, 0, np.nan, 1, 0, 0], [1, 0, 1, 1, 1, 0]]
    if not right_or_wrong:
        rewards = [
            [1.5, 0.2, -0.7, 1, 0, 0.4], [0.5] * 6, [0.1, 0, np.nan, 0.9, 0.6, -1], [-0.4, 0.3, 1, 0.8, 1, 0]
        ]  # fmt: skip
    result = [made_groups.episode_group(i, rng, samples=6, rewards=r) for i, r in enumerate(rewards)]
    cut = replace(result[0].rollouts[1], finish_reason="length")
    result[0] = replace(result[0], rollouts=(result[0].rollouts[0], cut, *result[0].rollouts[2:]))
    form = [np.array([0.5, 1, 0.25 * i, 0, 0.75, 0.1], np.float32) for i in range(4)]
    return [
        replace(g, reward_parts={"math": g.rewards, "format": f}, baseline_reward=0.25 + 0.1 * i)
        for i, (g, f) in enumerate(zip(result, form, strict=True))
    ]


def in_float64(batch):
    stream = batch.policy
    reference = None if stream.ref_logprobs is None else stream.ref_logprobs.double()
    stream = replace(
        stream, advantages=stream.advantages.double(), rollout_logprobs=stream.rollout_logprobs.double(),
        ref_logprobs=reference,
    )  # fmt: skip
    return replace(batch, policy=stream)


def waves(batch, number):
    """Return a smooth number in [-1, 1] per token, a function of the row's id, float64 [B, T]."""
    columns = torch.arange(batch.tokens.shape[1], dtype=torch.float64)
    return torch.sin(number + 0.7 * number * columns + 1.3 * batch.row_ids[:, None].double())


def projections(values, batch):
    kept = torch.where(batch.policy.mask, values.double(), 0.0)
    return [float((kept * waves(batch, number)).sum()) for number in (3, 5)]
