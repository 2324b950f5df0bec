"""Every metric that a run can log. A test finds missing entries, and entries that nothing logs.

`<name>` is a placeholder: `reward/<name>` covers `reward/math`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. ``reducer``: how the values of a step become one number. ``look_for``: the healthy range, or
    the meaning of a change. Both are markdown.
    """

    name: str
    unit: str
    reducer: str
    meaning: str
    look_for: str


_SAMPLES = "mean over scored samples"
_TOKENS = "mean over trained tokens"
_UPDATES = "; mean over updates"
_STEP = "of the step"

METRICS = (
    # What was sampled
    Metric("reward/mean", "reward", _SAMPLES, "total reward: the sum of weight times part, after gates",
           "rises; a lasting fall is a collapse (`health.reward_below_share`)"),
    Metric("reward/std", "reward", "population deviation over scored samples", "spread of the total reward",
           "above 0: equal rewards give no gradient"),
    Metric("reward/unscored", "samples", "count", "samples without a total reward, which is not reward 0",
           "near 0; many: see the warnings, `outcome/timeout`, `outcome/error`"),
    Metric("reward/<name>", "reward", _SAMPLES, "one part of the reward, before its weight and gate",
           "all parts that count rise; one that rises while the others fall is being gamed"),
    Metric("reward/<name>_unscored", "samples", "count", "samples that this part could not score",
           "near 0; all samples: its function or server fails"),
    Metric("outcome/correct", "samples", "count", "answers that the math grader calls right", "rises"),
    Metric("outcome/wrong", "samples", "count", "answers that the math grader calls wrong", "falls"),
    Metric("outcome/no_answer", "samples", "count", "completions without an answer that the grader can read",
           "falls within the first steps; if not: the prompt does not ask for the format, or completions are "
           "truncated"),
    Metric("outcome/timeout", "samples", "count", "answers not judged within `rewards.timeout_s`",
           "near 0; such samples are not trained on"),
    Metric("outcome/error", "samples", "count", "answers on which a grader process died", "near 0"),
    Metric("group/no_signal_share", "share", "mean over groups", "groups whose rewards are all equal",
           "below 0.5; near 1: problems too easy or too hard (`data.order`, `dynamic_sampling`, other "
           "data)"),
    Metric("group/extra_prompts", "prompts", "count",
           "extra prompts that dynamic sampling drew and dropped",
           "below `dynamic_sampling.max_extra_prompts`"),
    Metric("rollout/length_tokens", "tokens", "mean over samples", "length of a completion",
           "slow change; growth up to the limit without more reward: add a length reward"),
    Metric("rollout/length_max_tokens", "tokens", "maximum over samples", "the longest completion",
           "at most `sampling.max_new_tokens`"),
    Metric("rollout/truncated_share", "share", "mean over samples",
           "completions cut off at `sampling.max_new_tokens`",
           "below 0.1; more: raise the limit or use `algorithm.mask_truncated`"),
    Metric("rollout/nan_logprobs", "samples", "count",
           "samples with a token whose log-prob the engine gave as NaN or infinite; they are not trained on",
           "0; else the engine computes NaN: another dtype or attention backend (`rollout.engine`)"),
    Metric("rollout/garbage_share", "share", "mean over samples",
           "degenerate completions: they end in a loop or are unreadable",
           "0 for a model that was trained before (`health.garbage_above`)"),
    Metric("rollout/tokens", "tokens", "sum over samples", "all completion tokens of the step", ""),
    Metric("rollout/staleness_mean", "steps", "mean over tokens",
           "updates between the weights that produced a token and the trained policy",
           "at most `max_staleness`; 0 on-policy"),
    Metric("rollout/staleness_max", "steps", "maximum over tokens", "the same, of the stalest token",
           "at most `max_staleness`"),
    Metric("train/rows", "samples", "count", "samples that were trained on",
           "the rest adds nothing to the gradient (`algorithm.skip_idle_rows`)"),
    Metric("train/tokens", "tokens", "sum over rows", "prompt and completion tokens of those", ""),
    Metric("train/loss_tokens", "tokens", "sum over rows", "completion tokens in the loss, before idle rows "
           "are left out", "above 0; the run ends after `health.idle_steps_above` steps without any"),
    Metric("train/epoch", "passes", _STEP, "supervised training: passes over the demonstrations so far", ""),
    Metric("validation/loss", "nats", "mean over all tokens of the held-out completions",
           "supervised training: -log p of held-out demonstrations (`sft.validation_share`)",
           "falls; a rise while `loss/total` falls: too many passes"),
    # The update
    Metric("loss/total", "loss", "sum over the update's rows" + _UPDATES, "the objective that is minimised",
           "finite; its value says little, as advantages are centred"),
    Metric("loss/policy", "loss", "sum over the update's rows" + _UPDATES, "its policy term", "finite"),
    Metric("loss/kl", "loss", "sum over the update's rows" + _UPDATES, "its KL term, weighted",
           "small relative to `loss/policy`; not larger for long"),
    Metric("loss/entropy", "loss", "sum over the update's rows" + _UPDATES, "its entropy bonus, weighted",
           "below 0"),
    Metric("policy/entropy", "nats", _TOKENS + _UPDATES, "uncertainty of the policy about a token",
           "falls slowly; near 0 early: collapse (raise `clip_high`, `entropy_coef`); rising: falling "
           "apart"),
    Metric("policy/ratio_mean", "ratio", _TOKENS + _UPDATES,
           "probability of a token over that before the step", "1 within a few percent"),
    Metric("policy/ratio_max", "ratio", "maximum over trained tokens and updates", "the largest of these",
           "below 10"),
    Metric("policy/clip_low_share", "share", _TOKENS + _UPDATES,
           "tokens whose gradient the lower bound removed", "0 to 0.2; 0 with one update a step"),
    Metric("policy/clip_high_share", "share", _TOKENS + _UPDATES,
           "tokens whose gradient the upper bound removed",
           "0 to 0.2; more: lower `lr` or the number of updates a step"),
    Metric("policy/dual_clip_share", "share", _TOKENS + _UPDATES, "tokens held by `algorithm.dual_clip`",
           "near 0"),
    Metric("policy/approx_kl", "nats", _TOKENS + _UPDATES, "change of the policy within the step (k3)",
           "below 0.05"),
    Metric("policy/grad_norm", "norm", "of the whole gradient, before clipping; mean over updates",
           "size of the gradient",
           "steady; spikes: `health.grad_norm_spike`; always above `max_grad_norm`: every step is clipped"),
    Metric("policy/lr", "1", "mean over updates", "learning rate", "as scheduled"),
    Metric("first_update/<metric>", "of the metric", "of the step's first update",
           "`policy/ratio_mean`, `policy/ratio_max` and `ref/kl` before anything moved",
           "ratio exactly 1 with `old_logprobs: trainer`; KL 0 at step 1"),
    Metric("ref/kl", "nats", _TOKENS + _UPDATES,
           "divergence from the reference, by `algorithm.kl.estimator`",
           "grows slowly, below 1 (`health.kl_above`); only with a reference"),
    Metric("ref/kl_coef", "1", _STEP, "weight of the KL term", "constant, or as `kl.target` steers it"),
    # Engine against trainer
    Metric("mismatch/logprob_diff_mean", "nats", _TOKENS,
           "absolute difference of a token's log-prob, engine to trainer",
           "float32 1e-6, bfloat16 0.01 to 0.05, plus what staleness adds (`health.mismatch_above`)"),
    Metric("mismatch/logprob_diff_max", "nats", "maximum over trained tokens", "the largest of these",
           "float32 1e-4, bfloat16 around 1"),
    Metric("probe/logprob_diff_mean", "nats", "mean over the tokens of a probe; largest engine",
           "absolute difference of a log-prob, engine to trainer at the same version, of tokens sampled for "
           "the probe, every `weight_sync.probe_every` steps",
           "float32 1e-6, bfloat16 below 0.07; the run stops above `weight_sync.probe_above`"),
    Metric("probe/logprob_diff_max", "nats", "maximum over the tokens of a probe and engines",
           "the largest of these", "float32 1e-4, bfloat16 around 1"),
    Metric("mismatch/kl", "nats", _TOKENS,
           "divergence of the trainer from the engine on what was sampled (k3)", "below 0.01"),
    Metric("mismatch/ess_share", "share", "(sum w)^2 / (n sum w^2) over trained tokens",
           "effective sample size of the weights trainer / engine",
           "above 0.9; below 0.5: lower `max_staleness`, or look for another engine setting"),
    Metric("correction/weight_mean", "ratio", _TOKENS + _UPDATES, "importance weight before its bounds",
           "near 1"),
    Metric("correction/weight_max", "ratio", "maximum over trained tokens and updates",
           "the largest of these", "around `correction.high`"),
    Metric("correction/outside_share", "share", _TOKENS + _UPDATES,
           "tokens whose weight lay outside the bounds", "below 0.05"),
    Metric("correction/dropped_share", "share", _TOKENS + _UPDATES, "tokens whose weight became 0",
           "below 0.05; 0 with kind tis and no veto"),
    Metric("correction/ess_share", "share", "(sum w)^2 / (n sum w^2) over trained tokens" + _UPDATES,
           "effective sample size of the weights before their bounds", "above 0.9"),
    # Health
    Metric("health/low_signal", "0 or 1", _STEP,
           "the step was skipped, as too few groups had a signal",
           "0; often 1: other data (`health.min_signal_groups`)"),
    Metric("health/skipped_updates", "updates", "count", "skipped updates", "0"),
    Metric("health/skipped_in_a_row", "steps", _STEP, "consecutive steps with a skipped update",
           "0; the run ends above `health.skipped_steps_above`"),
    Metric("health/idle_in_a_row", "steps", _STEP, "consecutive steps that trained on no token",
           "0; the run ends above `health.idle_steps_above`"),
    Metric("health/refused_<key>", "updates", "count", "updates skipped because of the bound `health.<key>`",
           "absent"),
    Metric("health/bad_weights", "0 or 1", _STEP, "non-finite weights after the step",
           "0, else the run ends"),
    Metric("health/alarms", "bounds", "count", "bounds of `health` that the step violated", "0"),
    Metric("health/drifting", "metrics", "count",
           "of `reward/mean`, `policy/entropy`, `rollout/truncated_share` and `rollout/garbage_share` those "
           "whose moving average is far from the run's best, that of the first 5 steps, or the least",
           "0; a warning at the start of a drift names the baseline"),
    Metric("restarts/<role>", "workers", "count", "workers of the role replaced since the last step", "0"),
    # Evaluation
    Metric("eval/<set>/pass@<k>", "share", "mean over problems",
           "unbiased estimate that one of k samples is right",
           "rises; pass@1 up and pass@k down: the policy only sharpens what it could already do"),
    Metric("eval/<set>/avg@<n>", "share", "mean over problems", "share of right samples among n per problem",
           "rises"),
    Metric("eval/<set>/<measure>_stderr", "share", "standard error over problems",
           "uncertainty of that measure", "a difference below two of them is noise"),
    Metric("eval/<set>/tool_call_share", "share", "mean over problems",
           "episodes with a tool call, in sets with an environment", "rises where the tool helps"),
    Metric("eval/<set>/length_tokens", "tokens", "mean over samples", "length of an evaluated completion",
           ""),
    Metric("eval/<set>/unscored", "samples", "count", "evaluated samples without a verdict, left out",
           "near 0"),
    # The machine
    Metric("time/step_s", "s", _STEP, "wall clock of a step without evaluation and checkpoint", "steady"),
    Metric("time/sample_s", "s", "of the driver", "waiting for the step's samples, scored",
           "near 0 when sampling ahead hides it (`max_staleness`)"),
    Metric("time/stage_s", "s", "of the driver",
           "preparing the part of the batch that was not prepared ahead", "near 0"),
    Metric("time/probe_s", "s", "of the driver",
           "the sync probe, at steps that have one: waiting for its samples, log-probs of the policy",
           "below 1 percent of the steps that it covers"),
    Metric("time/update_s", "s", "of the driver", "the update of the policy", ""),
    Metric("time/drain_s", "s", "of the driver",
           "waiting for launched samples to finish before a weight sync",
           "0 with `max_staleness: 0` or `weight_sync.mode: keep`"),
    Metric("time/sync_s", "s", "of the driver", "the weight sync", "a few percent of the step"),
    Metric("time/reference_s", "s", "of the driver", "refreshing the reference, at steps that do", ""),
    Metric("time/driver_cpu_s", "s", "of the driver", "processor time of the driver's process",
           "well below `time/step_s`: else the driver limits the run"),
    Metric("time/sync_stop_s", "s", "of the driver", "part of the sync: engines stop", "near 0"),
    Metric("time/sync_travel_s", "s", "of the driver", "part of the sync: weight transfer", ""),
    Metric("time/sync_take_s", "s", "of the driver", "part of the sync: engines load and check the weights",
           ""),
    Metric("time/turn_<change>_s", "s", "of the driver",
           "where roles take turns on the same GPUs: engines, reference and reward_model sleep and wake, "
           "policy offload and reload; all of the step",
           "a few percent of the step"),
    Metric("time/sync_wait_s", "s", "of the sending rank", "waiting for engines to accept a bucket",
           "most of the travel: the engines are slower than the sender"),
    Metric("time/sync_gather_s", "s", "of the sending rank", "gathering parameters (ZeRO-3, adapters)", ""),
    Metric("time/sync_pack_s", "s", "of the sending rank", "packing buckets", "near 0"),
    Metric("time/sync_checksum_s", "s", "of the sending rank", "checksums of the buckets", "near 0"),
    Metric("sync/bytes", "bytes", "of the sending rank", "weights sent to the engines", "constant"),
    Metric("time/<role>_<stage>_busy_s", "s", "mean over workers of the role",
           "seconds the workers were busy: rollout sample and sync, reward score, reward_model score, "
           "reference logprobs, policy update and sync",
           "near `time/step_s` for the role that limits the run; small: it waits for another role"),
    Metric("throughput/completion_tokens_per_s", "tokens/s", _STEP,
           "completion tokens of a step over its seconds", "steady; higher is faster"),
    Metric("throughput/tokens_per_s", "tokens/s", _STEP, "the same with prompts, once a sample", ""),
    Metric("throughput/samples_per_s", "samples/s", _STEP, "samples of a step over its seconds", ""),
    Metric("throughput/<role>_<count>", "of the count", "sum over workers",
           "counts of the workers since the last step: `rollout_tokens`, completion tokens as they are "
           "produced", "steady"),
    Metric("memory/<role>_gib", "GiB", "largest worker", "peak memory of a worker with all its processes",
           "constant after a few steps; growth is a leak"),
    Metric("memory/<role>_gpu_gib", "GiB", "largest worker", "peak GPU memory of a worker",
           "below the capacity of the GPU, with room for longer batches"),
)  # fmt: skip
