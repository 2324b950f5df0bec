"""Charts of the report and their metrics. Any other metric gets a chart of its own at the end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from grpo_dist.observe.catalogue import patterns


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart.

    ``metrics``: regular expressions of whole names, in syntax common to Python and browsers. ``kind``: lines,
    stack, or accuracy (a chart per metric, with error bars from NAME_stderr). Units come from the catalogue.
    """

    title: str
    metrics: tuple[str, ...]
    kind: str = "lines"


@dataclass(frozen=True, slots=True)
class ChartSection:
    title: str
    charts: tuple[Chart, ...]


SECTIONS = (
    ChartSection(
        "Accuracy",
        (
            Chart(
                "accuracy",
                (r"eval/(?:[^/]+)/(?:pass|avg|maj|cons)@\d+",),
                "accuracy",
            ),
            Chart("episodes with a tool call in evaluation", (r"eval/[^/]+/tool_call_share",)),
            Chart("length in evaluation", (r"eval/[^/]+/length_tokens",)),
            Chart("unscored in evaluation", (r"eval/[^/]+/unscored",)),
        ),
    ),
    ChartSection(
        "Reward",
        (
            Chart("reward", (r"reward/mean",)),
            Chart("reward, parts", (r"reward/(?!mean$|std$|unscored$)(?!.*_unscored$).+",)),
            Chart("reward, standard deviation", (r"reward/std",)),
            Chart("unscored", (r"reward/(?:.*_)?unscored",)),
            Chart("outcomes", (r"outcome/.+",)),
            Chart("groups without signal", (r"group/no_signal_share",)),
            Chart("extra prompts drawn", (r"group/extra_prompts",)),
            Chart("length bias of first-come batches", (r"rollout/length_bias",)),
            Chart("groups carried over", (r"group/carried_over",)),
            Chart("drawn for each trained", (r"group/(?:samples|tokens)_per_trained",)),
            Chart("share of each pool", (r"pool/.+/share",)),
            Chart("pass rate of each pool", (r"pool/.+/pass_rate",)),
            Chart("usefulness of each pool", (r"pool/.+/usefulness",)),
            Chart("tokens of each pool", (r"pool/.+/tokens",)),
        ),
    ),
    ChartSection(
        "Completions",
        (
            Chart("length", (r"rollout/length_tokens", r"rollout/length_max_tokens")),
            Chart("truncated, degenerate text", (r"rollout/truncated_share", r"rollout/degenerate_share")),
            Chart("sampling temperature", (r"sampling/temperature",)),
            Chart("longest completion allowed", (r"sampling/max_new_tokens",)),
            Chart("staleness", (r"rollout/staleness_mean", r"rollout/staleness_max")),
            Chart("tokens sampled", (r"rollout/tokens",)),
            Chart("tokens of a pass with a draft", (r"rollout/acceptance_length",)),
            Chart("tokens in the loss", (r"train/loss_tokens",)),
        ),
    ),
    ChartSection(
        "Episodes",
        (
            Chart("turns, tool calls", (r"episode/turns", r"episode/tool_calls")),
            Chart("ends of episodes", (r"episode/end/.+",)),
            Chart("failed calls", (r"episode/tool_error_share",)),
            Chart("given tokens, rewritten history", (r"episode/given_share", r"episode/rewritten")),
            Chart("rows of an episode", (r"episode/rows",)),
            Chart("wait for an environment", (r"time/tool_wait_s",)),
            Chart("time of a tool call", (r"time/tool_call_.+",)),
            Chart("later prompts from the cache", (r"throughput/episode_cached_share",)),
        ),
    ),
    ChartSection(
        "Policy",
        (
            Chart("KL to the reference", (r"ref/kl",)),
            Chart("KL to the previous policy", (r"policy/approx_kl",)),
            Chart("entropy", (r"policy/entropy", r"rollout/entropy")),
            Chart("clipped", (r"policy/(?:clip_low|clip_high|dual_clip)_share",)),
            Chart("ratio", (r"policy/ratio_mean", r"policy/ratio_max")),
            Chart("loss", (r"loss/.+", r"validation/loss")),
            Chart("gradient norm", (r"policy/grad_norm",)),
            Chart("learning rate", (r"policy/lr",)),
            Chart("weight of the KL term", (r"ref/kl_coef",)),
        ),
    ),
    ChartSection(
        "Engine against trainer",
        (
            Chart("log-prob mismatch", (r"mismatch/logprob_diff_mean", r"mismatch/logprob_diff_max")),
            Chart("sync probe", (r"probe/logprob_diff_mean", r"probe/logprob_diff_max")),
            Chart("mismatch, KL", (r"mismatch/kl",)),
            Chart("effective samples", (r"(?:mismatch|correction)/ess_share",)),
            Chart("correction weights", (r"correction/weight_.+",)),
            Chart("corrected", (r"correction/(?:outside|dropped)_share",)),
        ),
    ),
    ChartSection(
        "Time and memory",
        (
            Chart(
                "stages of a step",
                (r"time/(?:sample|stage|probe|update|drain|sync|reference)_s",),
                "stack",
            ),
            Chart("step", (r"time/step_s",)),
            Chart("workers busy", (r"time/.+_busy_s",)),
            Chart("throughput, tokens", (r"throughput/(?:completion_)?tokens_per_s",)),
            Chart("throughput, samples", (r"throughput/samples_per_s",)),
            Chart("packing efficiency", (r"throughput/packing_efficiency",)),
            Chart("memory of a worker", (r"memory/.+",)),
        ),
    ),
    ChartSection("Health", (Chart("health", (r"health/.+",)), Chart("restarts", (r"restarts/.+",)))),
)


def layout() -> list[dict[str, Any]]:
    """Return `SECTIONS` as JSON values."""
    return [asdict(section) for section in SECTIONS]


def catalogue() -> list[tuple[str, str, str, str]]:
    """Return (regular expression, unit, meaning, what to look for) of each metric, most specific first.

    Backticks, the only markdown in the catalogue, are removed.
    """
    return [
        (pattern.pattern, own.unit, own.meaning.replace("`", ""), own.look_for.replace("`", ""))
        for pattern, own in patterns()
    ]
