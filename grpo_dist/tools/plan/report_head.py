"""The first lines of a printed plan: the model, what it samples, and what is assumed."""

from __future__ import annotations

from grpo_dist.config import DataConfig, LengthSchedule, PolicyConfig, RolloutConfig, SamplingConfig
from grpo_dist.runtime.hardware import GIB
from grpo_dist.tools.plan.delta_shares import delta_line
from grpo_dist.tools.plan.engine_memory import is_quantised
from grpo_dist.tools.plan.evaluation import first_epoch_steps
from grpo_dist.tools.plan.memory import Sizes, expert_bytes
from grpo_dist.tools.plan.models import ModelShape
from grpo_dist.tools.plan.options import Setting
from grpo_dist.tools.plan.result import Plan
from grpo_dist.tools.plan.shown_rows import shown_line
from grpo_dist.tools.plan.workload import Workload


def _turns(workload: Workload) -> list[str]:
    if workload.turns == 1:
        return []
    return [
        f"episodes: {workload.turns} turns each, {workload.tool_s:g} s of an environment between two; "
        "engines sample other episodes meanwhile"
    ]


def _drafts(setting: Setting, rollout: RolloutConfig) -> list[str]:
    """Describe what drafts gain, where engines draft."""
    drafts, right = rollout.speculation, setting.reached.accepted - 1
    if not drafts.tokens:
        return []
    assumed, whence = "", ""
    if setting.accepted is not None:
        whence = " (--accepted)"
    elif setting.calibration and right:
        whence = " (measured)"
    else:
        assumed, whence = "assumed: ", " (--accepted)"
    return [
        f"{assumed}drafts of {drafts.tokens} tokens, in every pass of an engine with at most "
        f"{drafts.max_sequences} sequences; {right:g} of them are right{whence}"
    ]


def _experts(policy: PolicyConfig, rollout: RolloutConfig, model: ModelShape, itemsize: int) -> list[str]:
    """Describe the experts of a mixture: their share of the memory of a policy rank and of an engine."""
    s = model.shape
    if not s.experts:
        return []
    engine = model.expert_parameters * (1 if is_quantised(rollout) else itemsize)
    trained = expert_bytes(policy, model, itemsize) / GIB
    held = engine / rollout.tensor_parallel_size / GIB
    return [
        f"experts: {model.expert_parameters / 1e9:,.3f} billion of these parameters, {s.experts} in each of "
        f"{s.layers} layers, {s.experts_per_token} of them for a token; they take {trained:,.1f} GiB of a "
        f"policy rank and {held:,.1f} GiB of each device of an engine"
    ]


def head_lines(plan: Plan) -> list[str]:
    """Return the model, the lengths, and what is assumed of them."""
    setting = plan.setting
    model, workload, calibration = setting.model, setting.workload, setting.calibration
    shown = plan.simulated or plan.found[0]
    itemsize = Sizes.of(shown.option.config, gpu=setting.cluster.card is not None).itemsize
    lines = [
        f"{model.name}: {model.parameters / 1e9:,.3f} billion parameters on {setting.cluster}",
        *_experts(shown.option.config.policy, shown.option.config.rollout, model, itemsize),
        f"lengths: prompts of {workload.prompt_tokens}, completions of {workload.mean:,.0f} tokens on "
        f"average, at most {workload.cap:,}",
        *_turns(workload),
        *_drafts(setting, shown.option.config.rollout),
        f"times: {calibration.reached.source if calibration else 'data sheet with assumed efficiencies'}",
    ]
    lines += _longest(plan.sampling, workload.cap)
    if _is_uncounted(shown.option.config.data, shown.option.config.batch.prompts_per_step):
        lines.append(
            "assumed: the length of every prompt is known from an epoch before. In the first epoch a step "
            "takes as long as with `data.order` epochs, and the steps of an epoch cannot be counted here"
        )
    if workload.assumed:
        lines.append(f"assumed: {workload.assumed}")
    lines += shown_line(shown.option.config.demonstrations, longest=shown.option.config.max_length)
    lines += delta_line(shown.option.config.weight_sync, shown.option.config.policy.optimizer, itemsize)
    if setting.reward_models:
        lines.append(
            "assumed: reward models read as many tokens as the policy writes; their templates and step "
            "marks are left out"
        )
    return lines


def _is_uncounted(data: DataConfig, prompts_per_step: int) -> bool:
    """Return whether the first epoch of tail batching cannot be told from the others."""
    return data.order == "length" and first_epoch_steps(data, prompts_per_step) is None


def _longest(sampling: SamplingConfig, longest: int) -> list[str]:
    """Say of which steps the times are where `sampling.max_new_tokens` changes."""
    if sampling.shortest == longest:
        return []
    begins = f"`sampling.max_new_tokens` begins with {sampling.lengths[0]:,} tokens"
    if isinstance(sampling.max_new_tokens, LengthSchedule) and sampling.max_new_tokens.schedule:
        return [
            f"{begins}: a step's times are those of its longest, {longest:,}; the whole run has the steps of "
            "its schedule"
        ]
    return [f"upper bound: {begins}, but every step is planned with its longest, {longest:,}"]
