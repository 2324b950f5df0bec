"""Checks across sections: find contradicting settings before anything runs."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.algorithms.estimators import estimator_of
from grpo_dist.config.algorithm import AlgorithmConfig
from grpo_dist.config.algorithm_checks import algorithm_contradictions
from grpo_dist.config.distillation_checks import distillation_contradictions
from grpo_dist.config.episode_checks import episode_contradictions
from grpo_dist.config.group_checks import group_contradictions
from grpo_dist.config.own_checks import own_contradictions
from grpo_dist.config.sections import Sections
from grpo_dist.config.step_checks import step_contradictions


def learns_from_equal_rewards(config: Sections) -> bool:
    """Return whether a step can learn from groups of equal rewards, or has another source to learn from."""
    other_streams = bool(config.distillation.teachers) or config.demonstrations is not None
    estimates = estimator_of(config.algorithm.advantage).learns_from_equal_rewards
    estimates = estimates or config.algorithm.process_coef > 0
    return estimates or config.rewards.shuffle or other_streams


def corrects(algorithm: AlgorithmConfig) -> bool:
    """Return whether the loss corrects the mismatch between engine and trainer."""
    return algorithm.correction.kind != "none" or algorithm.old_logprobs == "rollout"


def contradictions(config: Sections) -> Iterator[str]:
    """Yield a message for settings that contradict each other, and for settings that a run would ignore."""
    yield from _batch_divides(config)
    yield from _lengths_fit(config)
    yield from _bench_lengths_fit(config)
    yield from algorithm_contradictions(config)
    yield from episode_contradictions(config)
    yield from distillation_contradictions(config)
    yield from own_contradictions(config)
    yield from _of_the_samples(config)
    yield from group_contradictions(config)
    yield from step_contradictions(config)
    yield from _of_the_ranks(config)
    yield from _of_the_offload(config)
    yield from _without_effect(config)
    yield from _of_the_placement(config)
    yield from _of_the_engines(config)
    if late := [step for step in config.profile.steps if step > config.steps]:
        yield (
            f"`profile.steps` has {late[0]}, but the run ends after `steps` = {config.steps}; name earlier "
            "steps, or raise `steps`"
        )
    if config.health.min_signal_groups > config.batch.prompts_per_step:
        yield (
            f"`health.min_signal_groups` = {config.health.min_signal_groups} is above "
            f"`batch.prompts_per_step` = {config.batch.prompts_per_step}, so no step would be trained on; "
            "lower the first or raise the second"
        )
    if config.data.order == "pools" and config.data.pools is None:
        yield "`data.order` = pools needs `data.pools`, e.g. data.pools={by: source}; set it"
    if config.model.path == "sft" and config.sft is None:
        yield "`model.path` = sft needs an `sft` section that configures that model's training"
    if config.model.adapter is not None and config.model.path == "sft":
        yield (
            f"`model.adapter` = {config.model.adapter} adapts a model that exists, and `model.path` = sft is "
            "trained first; remove it, or name the adapter's base as `model.path`"
        )


def _of_the_ranks(config: Sections) -> Iterator[str]:
    policy, model = config.policy, config.model
    if policy.num_workers % policy.sequence_parallel:
        yield (
            f"`policy.num_workers` = {policy.num_workers} must be a multiple of `policy.sequence_parallel` = "
            f"{policy.sequence_parallel}; change one of them"
        )
    if policy.sequence_parallel > 1 and not model.packing:
        yield (
            f"`policy.sequence_parallel` = {policy.sequence_parallel} splits packed rows over ranks, but "
            "`model.packing` = false; remove one of them"
        )
    if policy.compile and policy.zero_stage == 3:
        yield (
            "`policy.compile` = true cannot be used with `policy.zero_stage` = 3, which gathers the weights "
            "of a layer inside the compiled region; remove `policy.compile`, or use stage 2"
        )
    if policy.compile and model.kernels == "liger":
        yield (
            "`policy.compile` = true cannot compile the kernels of `model.kernels` = liger; remove one of "
            "them"
        )
    if policy.router_replay and policy.compile:
        yield (
            "`policy.router_replay` = true chooses experts outside of the compiled region, but "
            "`policy.compile` = true compiles the routers; remove one of them"
        )
    if policy.router_replay and config.rollout.speculation.tokens:
        yield (
            "`policy.router_replay` = true needs the routes of every token, but `rollout.speculation` drafts "
            f"{config.rollout.speculation.tokens} at once, and engines that verify drafts may not return "
            "routes of these; set `rollout.speculation.tokens` to 0, or remove `policy.router_replay`"
        )
    if policy.router_replay and config.weight_sync.mode == "keep":
        yield (
            "`policy.router_replay` = true needs samples of one model, but `weight_sync.mode` = keep "
            "continues samples with new weights, which route earlier tokens differently; set it to drain"
        )
    if model.packing and model.attention == "eager":
        yield (
            "`model.attention` = eager does not support packed rows; use `model.attention` = auto, or set "
            "`model.packing` = false"
        )


def _of_the_placement(config: Sections) -> Iterator[str]:
    if config.weight_sync.deltas is True and config.policy.lora and config.policy.lora.sync == "adapter":
        yield (
            "`weight_sync.deltas` = true sends changes of whole weights, but `policy.lora.sync` = adapter "
            "sends adapters alone; set `weight_sync.deltas` to auto, or `policy.lora.sync` to merged"
        )
    if config.cluster.placement == "colocated" and config.weight_sync.backend == "nccl":
        yield (
            "`weight_sync.backend` = nccl cannot connect two processes on one GPU, but "
            "`cluster.placement` = colocated puts engines and policy ranks on the same GPUs; set it to auto"
        )


def _of_the_engines(config: Sections) -> Iterator[str]:
    quantization = config.rollout.quantization
    if quantization != "none" and not corrects(config.algorithm):
        yield (
            f"`rollout.quantization` = {quantization} makes the engine's log-probs differ from the "
            "trainer's, uncorrected; set algorithm.correction.kind (tis is the default), or remove "
            "rollout.quantization"
        )
    if quantization != "none" and config.model.dtype == "float32":
        yield (
            f"`rollout.quantization` = {quantization} multiplies in bfloat16 around it, but `model.dtype` = "
            "float32; set model.dtype to auto or bfloat16, or remove `rollout.quantization`"
        )
    if config.policy.router_replay and config.rollout.may_grow:
        yield (
            "`policy.router_replay` = true trains with routes that are lost with their engine, but "
            f"`rollout.num_workers` = {config.rollout.num_workers} with `rollout.max_workers` = "
            f"{config.rollout.max_workers} lets engines leave before their samples are trained on; set a "
            "fixed number of engines, or remove `policy.router_replay`"
        )


def _of_the_samples(config: Sections) -> Iterator[str]:
    a, dynamic = config.algorithm, config.dynamic_sampling.enabled
    estimator = estimator_of(a.advantage)
    others = estimator.other_rewards
    if others is not None and not estimator.clips_other_rewards and a.reward_clip is not None:
        yield (
            f"`algorithm.reward_clip` = {a.reward_clip} clips total rewards, but `algorithm.advantage` = "
            f"{a.advantage} uses {others}; remove `algorithm.reward_clip`"
        )
    if others is not None and a.reward_norm != "none":
        yield (
            f"`algorithm.reward_norm` = {a.reward_norm} normalises total rewards, but "
            f"`algorithm.advantage` = {a.advantage} uses {others}; remove `algorithm.reward_norm`"
        )
    reads_unshuffled = {
        f"`algorithm.advantage` = {a.advantage}": others is not None,
        "`algorithm.process_coef`": a.process_coef > 0,
        "`dynamic_sampling.enabled`": dynamic,
        "`data.drop_solved`": config.data.drop_solved is not None,
        f"`data.order` = {config.data.order}": config.data.order not in ("epochs", "length"),
    }
    for setting in (name for name, is_set in reads_unshuffled.items() if is_set and config.rewards.shuffle):
        yield (
            f"`rewards.shuffle` = true shuffles only the total rewards of a step, but {setting} reads other "
            "rewards, which stay unshuffled, so the run is no control; remove one of the two"
        )


def _of_the_offload(config: Sections) -> Iterator[str]:
    offload, stage = config.policy.offload, config.policy.zero_stage
    if offload.optimizer != "none" and stage == 0:
        yield (
            f"`policy.offload.optimizer` = {offload.optimizer} needs ZeRO, but `policy.zero_stage` = 0 "
            "disables it; set `policy.zero_stage` to 1, 2 or 3"
        )
    elif offload.optimizer == "nvme" and stage != 3:
        yield (
            f"`policy.offload.optimizer` = nvme needs `policy.zero_stage` = 3, not {stage}; set stage 3, or "
            "offload to cpu"
        )
    if offload.parameters != "none" and stage != 3:
        yield (
            f"`policy.offload.parameters` = {offload.parameters} needs `policy.zero_stage` = 3, not {stage}, "
            "which keeps whole parameters on every rank; set stage 3, or set the offload to none"
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
        (
            "algorithm.pass_k",
            a.pass_k != 4 and "k" not in estimator_of(a.advantage).inputs,
            "algorithm.advantage=pass_at_k",
        ),
        (
            "algorithm.turn_discount",
            a.turn_discount != 1.0 and a.advantage != "turn",
            "algorithm.advantage=turn",
        ),
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
    evaluates = config.data.eval and (config.evaluation.before or config.evaluation.every)
    idle.append((
        "evaluation.num_workers",
        config.evaluation.num_workers > 0 and not evaluates,
        "`data.eval` and evaluations during training (`evaluation.every` or `evaluation.before`)",
    ))  # fmt: skip
    for name, is_idle, needed in idle:
        if is_idle:
            yield f"`{name}` has no effect without {needed}; set that, or remove `{name}`"


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
            f"longest completion = {needed}; raise `model.max_length` or lower the others"
        )


def _bench_lengths_fit(config: Sections) -> Iterator[str]:
    tokens = config.bench.lengths.tokens or 0
    if tokens > config.sampling.longest:
        yield (
            f"`bench.lengths.tokens` = {tokens} is above `sampling.max_new_tokens` = "
            f"{config.sampling.longest}; lower the first or raise the second"
        )


def _divisors_near(total: int, wanted: int) -> str:
    """Return the divisors of ``total`` closest to ``wanted``, for a message: (512, 3) -> "2 or 4"."""
    below = [d for d in range(1, wanted) if total % d == 0]
    above = [d for d in range(wanted + 1, total + 1) if total % d == 0]
    return " or ".join(str(d) for d in below[-1:] + above[:1])
