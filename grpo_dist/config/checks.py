"""Settings that contradict each other, found before anything runs."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.algorithms.loss_settings import POLICY_LOSS_SETTINGS
from grpo_dist.config.sections import Sections

# What each choice of `algorithm` reads; any other setting would be ignored silently.
_USE_STD = ("grpo", "gdpo", "process")
# Estimators that can learn from a group of equal rewards, which dynamic sampling would drop.
_EQUAL_REWARDS_TEACH = ("remax", "gdpo", "process", "reinforce_pp")
# Estimators that read something other than the sample's own reward as it is.
_OTHER_REWARDS = {
    "gdpo": "each reward on its own",
    "process": "those of steps",
    "remax": "the greedy answer's too",
}


def equal_rewards_teach(config: Sections) -> bool:
    """Return whether a group of equal rewards can have advantages other than 0."""
    return config.algorithm.advantage in _EQUAL_REWARDS_TEACH or config.rewards.shuffle


def contradictions(config: Sections) -> Iterator[str]:
    """Yield a message for every pair of settings that cannot hold together, or that a run would ignore."""
    yield from _batch_divides(config)
    yield from _lengths_fit(config)
    yield from _bench_lengths_fit(config)
    yield from _of_the_algorithm(config)
    yield from _of_the_updates(config)
    yield from _of_the_samples(config)
    yield from _of_the_ranks(config)
    yield from _of_the_offload(config)
    yield from _without_effect(config)
    yield from _of_the_placement(config)
    if late := [step for step in config.profile.steps if step > config.steps]:
        yield (
            f"`profile.steps` has {late[0]}, and the run ends after `steps` = {config.steps}; name earlier "
            "ones, or raise `steps`"
        )
    if config.health.min_signal_groups > config.batch.prompts_per_step:
        yield (
            f"`health.min_signal_groups` = {config.health.min_signal_groups} is above "
            f"`batch.prompts_per_step` = {config.batch.prompts_per_step}, so that no step would be trained "
            "on; lower the one or raise the other"
        )
    if config.model.path == "sft" and config.sft is None:
        yield "`model.path` = sft needs an `sft` section that configures that model's training"


def _of_the_ranks(config: Sections) -> Iterator[str]:
    policy, model = config.policy, config.model
    if policy.num_workers % policy.sequence_parallel:
        yield (
            f"`policy.num_workers` = {policy.num_workers} must be a multiple of `policy.sequence_parallel` = "
            f"{policy.sequence_parallel}; raise the one or lower the other"
        )
    if policy.sequence_parallel > 1 and not model.packing:
        yield (
            f"`policy.sequence_parallel` = {policy.sequence_parallel} shares out packed rows, and "
            "`model.packing` = false; remove the one or the other"
        )
    if policy.compile and policy.zero_stage == 3:
        yield (
            "`policy.compile` = true with `policy.zero_stage` = 3, which gathers the weights of a layer in "
            "the midst of what would be compiled; remove the one, or use stage 2"
        )
    if model.packing and model.attention == "eager":
        yield (
            "`model.attention` = eager reads no packed rows; use `model.attention` = auto, or set "
            "`model.packing` = false"
        )


def _of_the_updates(config: Sections) -> Iterator[str]:
    a, b = config.algorithm, config.batch
    if a.policy_loss != "policy_gradient":
        return
    if b.updates_per_step * b.epochs_per_batch > 1:
        yield (
            "`algorithm.policy_loss` = policy_gradient has no ratio, and so nothing that bounds a second "
            f"update on the same samples: `batch.updates_per_step` = {b.updates_per_step}, "
            f"`batch.epochs_per_batch` = {b.epochs_per_batch}; set both to 1, or use ppo_clip"
        )
    if a.old_logprobs == "rollout":
        yield (
            "`algorithm.old_logprobs` = rollout is what ratios are taken to, and `algorithm.policy_loss` = "
            "policy_gradient has none; remove it (`algorithm.correction` weighs the mismatch)"
        )


def _of_the_placement(config: Sections) -> Iterator[str]:
    if config.cluster.placement == "colocated" and config.weight_sync.backend == "nccl":
        yield (
            "`weight_sync.backend` = nccl cannot join two processes on one GPU, which is where "
            "`cluster.placement` = colocated puts engines and policy ranks; set it to auto"
        )


def _of_the_samples(config: Sections) -> Iterator[str]:
    a, dynamic = config.algorithm, config.dynamic_sampling.enabled
    if dynamic and a.advantage in _EQUAL_REWARDS_TEACH:
        yield (
            f"`dynamic_sampling.enabled` drops groups of equal rewards, and `algorithm.advantage` = "
            f"{a.advantage} can learn from them; set it to false"
        )
    if a.advantage in ("gdpo", "process") and a.reward_clip is not None:
        yield (
            f"`algorithm.reward_clip` = {a.reward_clip} is of whole rewards, and `algorithm.advantage` = "
            f"{a.advantage} takes {_OTHER_REWARDS[a.advantage]}; remove it"
        )
    if a.advantage in _OTHER_REWARDS and a.reward_norm != "none":
        yield (
            f"`algorithm.reward_norm` = {a.reward_norm} is of a sample's whole reward, and "
            f"`algorithm.advantage` = {a.advantage} takes {_OTHER_REWARDS[a.advantage]}; remove it"
        )
    seen_unshuffled = {
        "`algorithm.advantage` = gdpo": a.advantage == "gdpo",
        "`algorithm.advantage` = remax": a.advantage == "remax",
        "`dynamic_sampling.enabled`": dynamic,
        "`data.order` = pass_rate": config.data.order == "pass_rate",
    }
    for setting in (name for name, is_set in seen_unshuffled.items() if is_set and config.rewards.shuffle):
        yield (
            f"`rewards.shuffle` = true deals out a step's rewards, and {setting} looks at others, which "
            "would stay as they are; a control is none then: remove one of the two"
        )


def _of_the_offload(config: Sections) -> Iterator[str]:
    offload, stage = config.policy.offload, config.policy.zero_stage
    if offload.optimizer != "none" and stage == 0:
        yield (
            f"`policy.offload.optimizer` = {offload.optimizer} needs ZeRO, and `policy.zero_stage` = 0 is "
            "without; set it to 1, 2 or 3"
        )
    elif offload.optimizer == "nvme" and stage != 3:
        yield (
            f"`policy.offload.optimizer` = nvme needs `policy.zero_stage` = 3, not {stage}; set that, or use "
            "cpu"
        )
    if offload.parameters != "none" and stage != 3:
        yield (
            f"`policy.offload.parameters` = {offload.parameters} needs `policy.zero_stage` = 3, not {stage}, "
            "which keeps whole parameters on every rank; set that, or set it to none"
        )
    on_disk = "nvme" in (offload.optimizer, offload.parameters)
    if on_disk and offload.nvme_path is None:
        yield "`policy.offload` = nvme needs `policy.offload.nvme_path`, a directory on a local NVMe disk"


def _without_effect(config: Sections) -> Iterator[str]:
    """Yield a message for every value that differs from its default where nothing reads it."""
    a, dynamic = config.algorithm, config.dynamic_sampling
    idle = [
        (
            "algorithm.reward_shift" if a.reward_shift is not None else "algorithm.reward_scale",
            a.reward_norm == "none" and a.shifts_rewards != a.scales_rewards,
            "algorithm.reward_norm",
        ),
        ("algorithm.pass_k", a.pass_k != 4 and a.advantage != "pass_at_k", "algorithm.advantage=pass_at_k"),
        ("algorithm.kl.gain", a.kl.gain != 0.1 and a.kl.target is None, "algorithm.kl.target"),
        (
            "policy.offload.nvme_path",
            config.policy.offload.nvme_path is not None
            and "nvme" not in (config.policy.offload.optimizer, config.policy.offload.parameters),
            "policy.offload.optimizer=nvme or policy.offload.parameters=nvme",
        ),
        (
            "reference.refresh_mix",
            config.reference.refresh_mix != 1.0 and not config.reference.refresh_every,
            "reference.refresh_every",
        ),
        (
            "algorithm.correction.veto",
            a.correction.veto > 0 and (a.correction.kind == "none" or a.old_logprobs == "rollout"),
            "a kind of correction",
        ),
        (
            "dynamic_sampling.max_extra_prompts",
            dynamic.max_extra_prompts is not None and not dynamic.enabled,
            "dynamic_sampling.enabled=true",
        ),
        (
            "dynamic_sampling.oversample",
            dynamic.oversample != 1.0 and not dynamic.enabled,
            "dynamic_sampling.enabled=true",
        ),
    ]
    for name, is_idle, needed in idle:
        if is_idle:
            yield f"`{name}` does nothing without {needed}; set that, or remove `{name}`"


def _of_the_algorithm(config: Sections) -> Iterator[str]:
    a, loss = config.algorithm, config.algorithm.policy_loss
    if a.advantage not in _USE_STD and a.std not in (None, "none"):
        yield (
            f"`algorithm.std` = {a.std} contradicts `algorithm.advantage` = {a.advantage}, which does not "
            "divide by a deviation; remove `algorithm.std` or use advantage grpo"
        )
    own = POLICY_LOSS_SETTINGS.get(loss, ())
    for name in sorted({n for names in POLICY_LOSS_SETTINGS.values() for n in names} - set(own)):
        if getattr(a, name) is not None:
            yield (
                f"`algorithm.{name}` = {getattr(a, name)} is no setting of `algorithm.policy_loss` = {loss}, "
                f"which has {', '.join(own) or 'none'}; remove it"
            )
    if a.advantage == "pass_at_k" and a.pass_k >= config.batch.samples_per_prompt:
        yield (
            f"`algorithm.pass_k` = {a.pass_k} must be below `batch.samples_per_prompt` = "
            f"{config.batch.samples_per_prompt}: with k of k samples every try is the same"
        )
    if a.old_logprobs == "rollout" and a.correction.kind not in (None, "none"):
        yield (
            "`algorithm.old_logprobs` = rollout takes ratios to the engine's log-probs, which leaves "
            f"`algorithm.correction.kind` = {a.correction.kind} nothing to correct; set it to none"
        )
    if (a.add_token_level_kl or a.kl.target is not None) and a.kl.coef == 0:
        yield (
            "`algorithm.kl.coef` = 0 leaves `add_token_level_kl` and `kl.target` nothing to do; set it above "
            "0"
        )
    rewards = config.rewards
    if a.advantage == "process" and not any(m.kind == "process" for m in rewards.models):
        yield (
            "`algorithm.advantage` = process needs the scores of steps, and `rewards.models` has no model of "
            "`kind: process`; add one"
        )
    gated = [r.gate for r in (*rewards.functions, *rewards.models) if r.gate is not None]
    if a.advantage == "gdpo" and gated:
        yield (
            "`algorithm.advantage` = gdpo normalises every reward on its own, which a gate between two of "
            f"them contradicts; remove `gate` = {gated[0]}"
        )
    if config.reference.refresh_every and a.kl.coef == 0:
        yield "`reference.refresh_every` needs a reference, and `algorithm.kl.coef` = 0 asks for none"
    if a.add_token_level_kl and a.kl.estimator.endswith("+"):
        yield (
            f"`algorithm.kl.estimator` = {a.kl.estimator} differs from {a.kl.estimator[:-1]} in its gradient "
            "alone, and a KL term in the reward has none; remove the +"
        )


def _batch_divides(config: Sections) -> Iterator[str]:
    b, ranks = config.batch, config.policy.replicas
    if b.prompts_per_step % b.updates_per_step:
        near = _divisors_near(b.prompts_per_step, b.updates_per_step)
        yield (
            f"`batch.prompts_per_step` = {b.prompts_per_step} must be divisible by "
            f"`batch.updates_per_step` = {b.updates_per_step}; use {near}"
        )
        return
    samples = b.prompts_per_step * b.samples_per_prompt // b.updates_per_step
    if samples % ranks:
        per_update = " / `batch.updates_per_step`" if b.updates_per_step > 1 else ""
        shared = config.policy.sequence_parallel
        per_sequence = f" / `policy.sequence_parallel` = {shared}" if shared > 1 else ""
        yield (
            f"`batch.prompts_per_step` * `batch.samples_per_prompt`{per_update} = {samples} must be "
            f"divisible by `policy.num_workers` = {config.policy.num_workers}{per_sequence}; use "
            f"{_divisors_near(samples, ranks)}{' times that' if per_sequence else ''}"
        )


def _lengths_fit(config: Sections) -> Iterator[str]:
    needed = config.data.max_prompt_tokens + config.longest_completion
    if config.max_length < needed:
        yield (
            f"`model.max_length` = {config.model.max_length} is below `data.max_prompt_tokens` + the "
            f"longest completion = {needed}; raise the one or lower the others"
        )


def _bench_lengths_fit(config: Sections) -> Iterator[str]:
    tokens = config.bench.lengths.tokens or 0
    if tokens > config.sampling.max_new_tokens:
        yield (
            f"`bench.lengths.tokens` = {tokens} is above `sampling.max_new_tokens` = "
            f"{config.sampling.max_new_tokens}; lower the one or raise the other"
        )


def _divisors_near(total: int, wanted: int) -> str:
    """The divisors of ``total`` on both sides of ``wanted``, for a message: (512, 3) -> "2 or 4"."""
    below = [d for d in range(1, wanted) if total % d == 0]
    above = [d for d in range(wanted + 1, total + 1) if total % d == 0]
    return " or ".join(str(d) for d in below[-1:] + above[:1])
