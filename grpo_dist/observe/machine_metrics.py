"""Metrics of evaluations and of the machine: time, throughput, memory, weight syncs."""

from __future__ import annotations

from grpo_dist.observe.metric import Metric

_UPDATES = "; mean over updates"
_STEP = "of the step"

OF_THE_MACHINE = (
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
    Metric("eval/step", "steps", "of the driver",
           "at wandb alone: the step of the evaluated weights, the x-axis of `eval/` and `validation/`", ""),
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
    Metric("time/evaluation_s", "s", "of the driver",
           "an evaluation on engines of its own (`evaluation.num_workers`): loading, sampling, scoring",
           "below the time until the next is due"),
    Metric("time/evaluation_wait_s", "s", "of the driver",
           "training waited so long for the evaluation before", "0"),
    Metric("time/snapshot_s", "s", "of the driver", "copying the weights for such an evaluation",
           "below 2 percent of the steps between two evaluations"),
    Metric("time/reference_s", "s", "of the driver", "refreshing the reference, at steps that do", ""),
    Metric("time/tool_call_mean_s", "s", "mean over tool calls", "seconds of a tool call", "steady"),
    Metric("time/tool_call_p95_s", "s", "95th percentile over tool calls", "the same, of slow ones",
           "below `environments.sandbox.call_s`"),
    Metric("time/driver_cpu_s", "s", "of the driver", "processor time of the driver's process",
           "well below `time/step_s`: else the driver limits the run"),
    Metric("time/sync_stop_s", "s", "of the driver", "part of the sync: engines stop", "near 0"),
    Metric("time/sync_travel_s", "s", "of the driver", "part of the sync: weight transfer", ""),
    Metric("time/sync_take_s", "s", "of the driver", "part of the sync: engines load and check the weights",
           ""),
    Metric("time/turn_<change>_s", "s", "of the driver",
           "where roles are colocated: engines, reference and reward_model sleep and wake, "
           "policy offload and reload; all of the step",
           "a few percent of the step"),
    Metric("time/sync_wait_s", "s", "of the sending rank", "waiting for engines to accept a bucket",
           "most of the travel: the engines are slower than the sender"),
    Metric("time/sync_gather_s", "s", "of the sending rank", "gathering parameters (ZeRO-3, adapters)", ""),
    Metric("time/sync_pack_s", "s", "of the sending rank", "packing buckets", "near 0"),
    Metric("time/sync_checksum_s", "s", "of the sending rank", "checksums of the buckets", "near 0"),
    Metric("time/sync_compare_s", "s", "of the sending rank", "`weight_sync.deltas`: finding changes", ""),
    Metric("sync/bytes", "bytes", "of the sending rank", "weights, or changes of them, sent to the engines",
           "constant; with deltas about 1.5 times the changed share of the weights"),
    Metric("sync/changed_share", "share", "of the sending rank", "16-bit words of the weights that changed",
           "bfloat16 about 0.01 at learning rates near 1e-6; float32 0.5, the lower halves"),
    Metric("sync/whole", "0 or 1", "of the driver", "whole weights: an engine lacked those before",
           "with `weight_sync.deltas` 1 in the first sync and after a resume, then 0"),
    Metric("sync/mismatches", "engines", "of the driver", "whose copies differed after changes, or whose "
           "transfer ended at a damaged table of sizes; whole weights followed", "0"),
    Metric("time/<role>_<stage>_busy_s", "s", "mean over workers of the role",
           "seconds the workers were busy: rollout sample and sync, reward score, reward_model score, "
           "environment act, reference logprobs, policy update and sync; sample includes the wait for "
           "environments; the parts of `time/turn_policy_offload_s` in a rank: offload_look (what holds "
           "zeros), offload_pin (new host memory), offload_copies, offload_collect (garbage), offload_free "
           "(cached memory)",
           "near `time/step_s` for the role that limits the run; small: it waits for another role"),
    Metric("throughput/completion_tokens_per_s", "tokens/s", _STEP,
           "sampled tokens of a step over its seconds", "steady; higher is faster"),
    Metric("throughput/tokens_per_s", "tokens/s", _STEP, "the same with prompts, once a sample", ""),
    Metric("throughput/samples_per_s", "samples/s", _STEP, "samples of a step over its seconds", ""),
    Metric("throughput/computed_tokens", "tokens", "sum over ranks" + _UPDATES,
           "tokens that go through the trained model, padding too", ""),
    Metric("throughput/packing_efficiency", "share", "of those" + _UPDATES,
           "tokens that are needed: each completion, and what prompts begin with once",
           "0.9; else raise `batch.micro_batch_tokens`; each rank and router replay repeat what is shared"),
    Metric("throughput/<role>_<count>", "of the count", "sum over workers",
           "since the last step: `rollout_tokens`, sampled; `rollout_preempted_tokens`, computed again for "
           "want of cache; `rollout_turns`, of episodes; `rollout_drafts`, `rollout_drafted_tokens` and "
           "`rollout_accepted_tokens` of `rollout.speculation`: drafts of one sample each that were "
           "verified, their tokens, and those that were right",
           "steady"),
    Metric("throughput/episode_cached_share", "share", "sum over turns from the second on",
           "prompt tokens of these turns that the engine found in its cache",
           "above 0.9; less: long observations, a template that rewrites the history, or a cache too small "
           "for all episodes (`rollout.kv_cache_gib`)"),
    Metric("time/tool_wait_s", "s", "mean over turns", "an episode waits for its environment's answer",
           "engines sample other episodes meanwhile; near the time of a tool: `environments.num_workers` "
           "suffice"),
    Metric("own/<name>", "its own", "its own", "a metric of `tracking.metrics`",
           "as you defined it; a function that fails is a warning of the run"),
    Metric("memory/<role>_gib", "GiB", "largest worker", "peak memory of a worker with all its processes",
           "constant after a few steps; growth is a leak"),
    Metric("memory/<role>_gpu_gib", "GiB", "largest worker", "peak GPU memory of a worker",
           "below the capacity of the GPU, with room for longer batches"),
)  # fmt: skip
