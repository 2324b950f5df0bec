"""Which metrics stand together in which chart. What no line names has a chart of its own at the end."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Chart:
    """``metrics``: regular expressions of whole names, in what Python and browsers have in common. ``kind``:
    lines, stack, or accuracy: one chart for each metric, with error bars from NAME_stderr. The axis of a
    ``share`` begins at 0.
    """

    title: str
    metrics: tuple[str, ...]
    unit: str = ""
    kind: str = "lines"


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    charts: tuple[Chart, ...]


SECTIONS = (
    Section(
        "Accuracy",
        (
            Chart(
                "accuracy",
                (r"eval/(?:[^/]+)/(?:pass|avg|maj|cons)@\d+",),
                "share, bars: 95%",
                "accuracy",
            ),
            Chart("length in evaluation", (r"eval/[^/]+/length_tokens",), "tokens"),
            Chart("not scored in evaluation", (r"eval/[^/]+/unscored",), "samples"),
        ),
    ),
    Section(
        "Reward",
        (
            Chart("reward", (r"reward/mean",)),
            Chart("reward, parts", (r"reward/(?!mean$|std$|unscored$)(?!.*_unscored$).+",)),
            Chart("reward, deviation", (r"reward/std",)),
            Chart("not scored", (r"reward/(?:.*_)?unscored",), "samples"),
            Chart("outcomes", (r"outcome/.+",), "samples"),
            Chart("groups without signal", (r"group/no_signal_share",), "share"),
            Chart("further prompts drawn", (r"group/extra_prompts",), "prompts"),
        ),
    ),
    Section(
        "Completions",
        (
            Chart("length", (r"rollout/length_tokens", r"rollout/length_max_tokens"), "tokens"),
            Chart("cut off, garbage", (r"rollout/truncated_share", r"rollout/garbage_share"), "share"),
            Chart("staleness", (r"rollout/staleness_mean", r"rollout/staleness_max"), "updates"),
            Chart("tokens sampled", (r"rollout/tokens",), "tokens"),
        ),
    ),
    Section(
        "Policy",
        (
            Chart("KL to the reference", (r"ref/kl",), "nats a token"),
            Chart("KL to the policy before", (r"policy/approx_kl",), "nats a token"),
            Chart("entropy", (r"policy/entropy",), "nats a token"),
            Chart("clipped", (r"policy/(?:clip_low|clip_high|dual_clip)_share",), "share"),
            Chart("ratio", (r"policy/ratio_mean", r"policy/ratio_max")),
            Chart("loss", (r"loss/.+",)),
            Chart("gradient norm", (r"policy/grad_norm",)),
            Chart("learning rate", (r"policy/lr",)),
            Chart("weight of the KL term", (r"ref/kl_coef",)),
        ),
    ),
    Section(
        "Engine against trainer",
        (
            Chart(
                "mismatch of log-probs", (r"mismatch/logprob_diff_mean", r"mismatch/logprob_diff_max"), "nats"
            ),
            Chart("mismatch, KL", (r"mismatch/kl",), "nats a token"),
            Chart("effective samples", (r"(?:mismatch|correction)/ess_share",), "share"),
            Chart("correction weights", (r"correction/weight_.+",)),
            Chart("corrected", (r"correction/(?:outside|dropped)_share",), "share"),
        ),
    ),
    Section(
        "Time and room",
        (
            Chart(
                "stages of a step",
                (r"time/(?:sample|stage|update|drain|sync|reference)_s",),
                "seconds",
                "stack",
            ),
            Chart("step", (r"time/step_s",), "seconds"),
            Chart("workers busy", (r"time/.+_busy_s",), "seconds a step"),
            Chart("throughput, tokens", (r"throughput/(?:completion_)?tokens_per_s",), "tokens a second"),
            Chart("throughput, samples", (r"throughput/samples_per_s",), "samples a second"),
            Chart("memory of a worker", (r"memory/.+",), "GiB"),
        ),
    ),
    Section("Health", (Chart("health", (r"health/.+",)), Chart("restarts", (r"restarts/.+",)))),
)


def layout() -> list[dict[str, Any]]:
    """`SECTIONS` for the page."""
    return [asdict(section) for section in SECTIONS]
