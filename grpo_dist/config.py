"""The typed configuration tree. Every section is frozen, refuses unknown keys, and is handed whole to the
part it names.

Reading files, defaults, interpolation and command-line overrides is `config_files.load_config`; this module
is only the shape, the ranges and the cross-checks. It imports neither torch nor ray, so that ``grpo-dist
--help`` stays instant.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from grpo_dist.config_checks import contradictions

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Model(Section):
    path: str = Field(
        description="local directory, hub id, `demo:<name>` for a model this project makes, or "
        "`random:<config.json>` for random weights of that shape"
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 where the accelerator supports it, else float32"
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto", description="trainer attention"
    )
    packing: bool = Field(
        True,
        description="trainer and reference see rows end to end without padding, the prompt of a group once; "
        "false: padded rows",
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    trust_remote_code: bool = Field(False, description="run Python code that ships with the model")
    max_length: PositiveInt | None = Field(
        None,
        description="longest prompt + completion; null: data.max_prompt_tokens + sampling.max_new_tokens",
    )


class DataSource(Section):
    path: str = Field(description="JSONL or Parquet file, local data set directory, hub id, or `demo:<name>`")
    split: str = Field("train", description="split of a data set that has several")
    name: str | None = Field(
        None,
        pattern="^[^/]+$",
        description="label in metrics and samples; null: the file's or data set's name",
    )
    subset: str | None = Field(None, description="configuration name of a hub data set")
    problem_column: str = "problem"
    answer_column: str = "answer"
    answer_pattern: str | None = Field(None, description="regular expression whose group 1 is the answer")
    columns: tuple[str, ...] = Field((), description="further columns handed to rewards")
    max_rows: PositiveInt | None = None

    @model_validator(mode="after")
    def _pattern_has_a_group(self) -> DataSource:
        try:
            groups = re.compile(self.answer_pattern or "()").groups
        except re.error as error:
            raise ValueError(
                f"answer_pattern {self.answer_pattern!r} is not a regular expression: {error}"
            ) from error
        if groups < 1:
            raise ValueError(
                f"answer_pattern {self.answer_pattern!r} has no group; put ( ) around the answer"
            )
        return self


class Data(Section):
    train: tuple[DataSource, ...] = Field(min_length=1)
    eval: tuple[DataSource, ...] = ()
    system_prompt: str | None = None
    instruction: str | None = Field(None, description="appended to every problem")
    chat_template: Literal["model", "none"] = Field("model", description="none: the problem text as it is")
    template_kwargs: dict[str, Any] = Field({}, description="further arguments of the chat template")
    max_prompt_tokens: PositiveInt = 512
    overlong: Literal["refuse", "drop"] = Field("refuse", description="what to do with longer prompts")
    order: Literal["epochs", "pass_rate"] = Field(
        "epochs", description="pass_rate: prompts that are solved now and then come more often"
    )
    overlap: Literal["refuse", "warn"] = Field(
        "warn", description="evaluation problems found in the training set"
    )


class Batch(Section):
    prompts_per_step: PositiveInt = 16
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    updates_per_step: PositiveInt = Field(
        1, description="optimiser updates a step is split into; 1 is on-policy"
    )
    epochs_per_batch: PositiveInt = Field(1, description="times a step goes through its samples")
    micro_batch_tokens: PositiveInt | None = Field(
        None, description="tokens a rank holds in one forward; null: 16384 on a GPU, 4096 elsewhere"
    )


class DynamicSampling(Section):
    """DAPO: groups whose rewards are all equal are replaced by further prompts."""

    enabled: bool = False
    max_extra_prompts: PositiveInt | None = Field(
        None, description="most further prompts a step; null: three times batch.prompts_per_step"
    )
    oversample: Annotated[float, Field(ge=1)] = Field(
        1.0, description="further prompts asked at once for every group that is missing"
    )


class Sampling(Section):
    temperature: PositiveFloat = 1.0
    max_new_tokens: PositiveInt = 512


class KL(Section):
    coef: NonNegative = Field(0.0, description="weight of the KL term; 0: no reference worker is created")
    estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] = Field(
        "k3", description="k1+, k3+: value of k1, k3 and gradient of k2"
    )
    target: PositiveFloat | None = Field(
        None, description="KL in nats a token that `coef` is steered to; null: `coef` stays"
    )
    gain: Fraction = Field(0.1, description="largest change of `coef` a step, as a share of 0.2")


class Correction(Section):
    kind: Literal["none", "tis", "mis", "icepop"] | None = Field(
        None, description="null: tis, or none where ratios are to the engine's log-probs already"
    )
    level: Literal["token", "sequence", "geometric"] = "token"
    low: NonNegative = 0.0
    high: PositiveFloat = 2.0
    veto: NonNegative = Field(
        0.0, description="a token whose ratio is below this drops its sequence, e.g. 1e-4; 0: none does"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Correction:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        return self


class Algorithm(Section):
    advantage: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "opo", "pass_at_k",
        "gdpo", "process",
    ] = "grpo"  # fmt: skip
    std: Literal["group", "batch", "none"] | None = Field(
        None, description="what a centred reward is divided by; null: group, where the estimator divides"
    )
    advantage_eps: PositiveFloat = 1e-6
    pass_k: PositiveInt = Field(4, description="k of advantage pass_at_k; below batch.samples_per_prompt")
    reward_clip: PositiveFloat | None = Field(None, description="rewards are held within +- this")
    reward_norm: Literal["none", "group", "batch"] = Field(
        "none", description="normalise rewards over their group or the batch before the estimator"
    )
    reward_shift: bool = Field(True, description="reward_norm subtracts the mean")
    reward_scale: bool = Field(True, description="reward_norm divides by the deviation")
    whiten_advantages: bool | None = Field(
        None, description="mean 0, deviation 1 over all tokens; null: with reinforce_pp and its baseline form"
    )
    advantage_clip: PositiveFloat | None = Field(None, description="advantages are held within +- this")
    add_token_level_kl: bool = Field(False, description="the KL term is part of the reward, not of the loss")
    policy_loss: Literal["policy_gradient", "ppo_clip", "cispo", "sapo", "dppo_tv", "gspo", "gmpo"] = (
        "ppo_clip"
    )
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="bounds of the policy loss; null: its own, e.g. 0.2 for ppo_clip"
    )
    clip_high: PositiveFloat | None = None
    dual_clip: Annotated[float, Field(gt=1)] | None = Field(None, description="of ppo_clip; null: off")
    tau_positive: PositiveFloat | None = Field(None, description="of sapo; null: 1.0")
    tau_negative: PositiveFloat | None = Field(None, description="of sapo; null: 1.05")
    ratio_cap: PositiveFloat | None = Field(None, description="of dppo_tv; null: 20")
    old_logprobs: Literal["trainer", "rollout"] = Field(
        "trainer",
        description="what ratios are taken to; rollout: the engine's, and no forward pass computes others",
    )
    entropy_coef: NonNegative = Field(0.0, description="weight of the entropy bonus")
    top_entropy_share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="train on this share of an update's tokens, those of the highest entropy"
    )
    mask_truncated: bool = Field(False, description="train nothing of completions cut at max_new_tokens")
    skip_idle_rows: bool = Field(
        True, description="leave samples out of training that add nothing to the gradient"
    )
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "token-mean"
    kl: KL = KL()
    correction: Correction = Correction()


class Gated(Section):
    """How a part of the reward counts."""

    weight: float = 1.0
    gate: str | None = Field(
        None, description="name of another reward; this one is 0 where that is not above `gate_above`"
    )
    gate_above: float = 0.0


class Reward(Gated):
    name: str = Field("", description="label in metrics; empty: the function's name")
    function: str = Field(
        description="a built-in reward (grpo_dist/rewards/README.md lists them), or `module:function`"
    )
    kwargs: dict[str, Any] = Field({}, description="settings of the function")


class RewardModel(Gated):
    name: str = Field(min_length=1, description="label in metrics")
    path: str = Field(description="local directory or hub id of a sequence or token classifier")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    kind: Literal["outcome", "process"] = Field(
        "outcome", description="outcome: one score a completion; process: one a step"
    )
    reduce: Literal["min", "mean", "last"] = Field(
        "min", description="process: what the scores of the steps come to"
    )
    step_separator: str = Field("\n\n", min_length=1, description="process: text between two steps")
    step_mark: str | None = Field(
        None,
        description="process: text put behind each step, at whose last token the score is read; null: "
        "step_separator",
    )
    num_workers: PositiveInt = 1
    micro_batch_tokens: PositiveInt = 16384
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _settings_of_its_kind(self) -> RewardModel:
        of_process = ("reduce", "step_mark", "step_separator")
        foreign = [n for n in of_process if getattr(self, n) != type(self).model_fields[n].default]
        if self.kind == "outcome" and foreign:
            raise ValueError(
                f"{', '.join(foreign)}: settings of kind process, but `kind` is outcome; remove them "
                "or set kind: process"
            )
        return self


class Rewards(Section):
    functions: tuple[Reward, ...] = (Reward(function="math"),)
    models: tuple[RewardModel, ...] = Field((), description="reward models, workers of their own")
    num_workers: PositiveInt = Field(1, description="reward actors")
    processes_per_worker: PositiveInt = Field(2, description="killable grader processes of each actor")
    timeout_s: PositiveFloat = Field(5.0, description="deadline of one answer, seconds")
    memory_mb: PositiveInt = Field(
        1024, description="address space a grader process may take beyond its start"
    )
    code_paths: tuple[str, ...] = Field((), description="directories added to the path of custom reward code")
    shuffle: bool = Field(False, description="control: deal each step's rewards among its samples at random")

    @model_validator(mode="after")
    def _distinct(self) -> Rewards:
        names = [r.name or r.function for r in self.functions] + [m.name for m in self.models]
        if len(set(names)) != len(names):
            raise ValueError(f"two rewards share a name: {names}; set `name` of each")
        if not names:
            raise ValueError("neither functions nor models; name at least one reward")
        if sum(m.kind == "process" for m in self.models) > 1:
            raise ValueError("two models of kind process, but a sample has one list of steps; keep one")
        if self.shuffle and any(m.kind == "process" for m in self.models):
            raise ValueError(
                "shuffle = true deals out whole rewards, and a model of kind process also gives rewards of "
                "steps, which would keep their meaning; remove the one or the other"
            )
        return self

    @model_validator(mode="after")
    def _gates_end(self) -> Rewards:
        gates = {r.name or r.function: r.gate for r in self.functions} | {m.name: m.gate for m in self.models}
        for name in gates:
            path = [name]
            while (gate := gates[path[-1]]) is not None:
                if gate not in gates:
                    raise ValueError(
                        f"gate = {gate} of reward {path[-1]}: no such reward; expected one of "
                        f"{', '.join(gates)}"
                    )
                if gate in path:
                    raise ValueError(f"gates go in a circle: {' -> '.join([*path, gate])}; remove one")
                path.append(gate)
        return self


class Rollout(Section):
    num_workers: PositiveInt = 1
    tensor_parallel_size: PositiveInt = 1
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="share of a GPU an engine takes; null: 0.85, or 0.6 where a policy rank is too"
    )
    kv_cache_gib: PositiveFloat | None = Field(
        None,
        description="key-value cache of an engine without a GPU, GiB; null: what max_num_seqs sequences of "
        "full length take, all engines together at most a quarter of the free memory",
    )
    max_num_seqs: PositiveInt | None = Field(
        None, description="sequences an engine decodes at once; null: what may be in flight, 256 to 1024"
    )
    threads: Count = Field(0, description="CPU threads of an engine; 0: what is left to it")
    enforce_eager: bool = Field(
        False, description="skip compilation and graphs: faster start, slower decoding"
    )
    engine: dict[str, Any] = Field({}, description="further vLLM engine arguments")


class Reference(Section):
    num_workers: PositiveInt = 1
    threads: Count = 0
    micro_batch_tokens: PositiveInt | None = Field(None, description="null: 16384 on a GPU, 4096 elsewhere")
    refresh_every: Count = Field(
        0, description="steps after which it takes on the policy (launched batches finish first); 0: never"
    )
    refresh_mix: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the policy it takes on; 1: all, less: a moving average"
    )


class Optimizer(Section):
    lr: PositiveFloat = Field(1e-6, description="with policy.lora about ten times as much, e.g. 1e-5")
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegative = 0.0
    max_grad_norm: PositiveFloat = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = 0
    min_lr_ratio: Fraction = Field(0.0, description="final learning rate as a share of lr")


class LoRA(Section):
    """Low-rank adapters: they alone are trained."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = Field(32.0, description="the adapters' product counts alpha / rank times")
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        "all-linear", description="linear layers, e.g. [q_proj, v_proj]; all-linear: all but the LM head"
    )
    sync: Literal["merged", "adapter"] = Field(
        "merged",
        description="what travels to the engines. merged: whole weights; adapter: the adapters alone, which "
        "each engine merges into the checkpoint it was started from",
    )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Offload(Section):
    """Where the trainer's state lies while it is not computed with."""

    optimizer: Literal["none", "cpu", "nvme"] = Field(
        "none", description="optimiser state; its update then runs on the CPU. nvme needs zero_stage 3"
    )
    parameters: Literal["none", "cpu", "nvme"] = Field("none", description="weights; needs zero_stage 3")
    nvme_path: str | None = Field(
        None, description="directory of this run alone, on a local NVMe disk of every policy node"
    )


class Policy(Section):
    num_workers: PositiveInt = Field(1, description="ZeRO ranks, one actor each")
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 2
    sequence_parallel: PositiveInt = Field(
        1, description="ranks that share each sequence (Ulysses), for long completions; 1: none do"
    )
    compile: bool = Field(
        False, description="torch.compile of each layer, for long GPU runs: minutes of start; no ZeRO-3"
    )
    threads: Count = Field(0, description="CPU threads of a rank; 0: what is left to it")
    optimizer: Optimizer = Optimizer()
    lora: LoRA | None = Field(None, description="train low-rank adapters; null: all weights")
    offload: Offload = Offload()
    logprob_chunk_mib: PositiveInt | None = Field(
        None,
        description="size of a block of logits, of which two exist at once, MiB; null: 256 on a GPU, 32 "
        "elsewhere",
    )
    deepspeed: dict[str, Any] = Field(
        {}, description="merged into the DeepSpeed configuration (buckets, details of offload)"
    )

    @property
    def replicas(self) -> int:
        """Ranks, or groups of ranks, that get rows of their own."""
        return max(1, self.num_workers // self.sequence_parallel)


TransferBackend = Literal["gloo", "nccl", "shared_memory", "ipc"]


class WeightSync(Section):
    backend: Literal["auto"] | TransferBackend = Field(
        "auto",
        description="auto: nccl between GPUs, ipc between processes that share them; on CPUs shared_memory "
        "within one host, gloo across hosts",
    )
    bucket_mb: PositiveInt | None = Field(
        None, description="weights gathered and sent at once, two such buckets are held; null: 4, on GPUs 256"
    )
    mode: Literal["drain", "keep"] = Field(
        "drain",
        description="drain: all launched samples finish first, more than 1 step of staleness gains nothing; "
        "keep: they pause, and go on under the new weights",
    )


class Evaluation(Section):
    every: Count = Field(0, description="steps between evaluations; 0: none during training")
    before: bool = True
    after: bool = Field(True, description="a fresh engine samples the exported weights")
    samples_per_prompt: PositiveInt = 1
    temperature: NonNegative = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count = 0
    max_new_tokens: PositiveInt | None = Field(None, description="null: sampling.max_new_tokens")
    k: tuple[PositiveInt, ...] = Field((1,), description="pass@k to report; each at most samples_per_prompt")
    max_prompts: PositiveInt | None = Field(None, description="evaluate on the first so many of each set")

    @model_validator(mode="after")
    def _k_in_range(self) -> Evaluation:
        if max(self.k, default=1) > self.samples_per_prompt:
            raise ValueError(
                f"k = {list(self.k)} asks for more than samples_per_prompt = {self.samples_per_prompt}; "
                "raise samples_per_prompt or lower k"
            )
        return self


class Health(Section):
    """What makes a step unfit to train on, and bounds of its metrics; null: not watched."""

    action: Literal["skip", "warn", "stop", "rollback"] = Field(
        "skip",
        description="when a bound is passed; the batch is kept in any case. skip: it is not trained on, and "
        "the run stops after too many in a row; warn: it is; stop: the run ends with exit code 3; rollback: "
        "it goes on from its last checkpoint, and does not train on that batch",
    )
    max_rollbacks: PositiveInt = Field(3, description="of a run; after so many, as stop")
    min_signal_groups: Count = Field(
        1,
        description="a step with fewer groups whose rewards differ is not trained on; 0: all are. Not where "
        "equal rewards teach, too (remax, gdpo, process, reinforce_pp)",
    )
    skipped_steps_above: PositiveInt | None = Field(
        10, description="steps in a row with an update that was not made: a loss or gradient was not finite, "
        "or a bound was passed and the step skipped"
    )
    reward_below_share: Fraction | None = Field(
        None, description="mean reward, as a share of its greatest so far where that is above 0, e.g. 0.5"
    )
    entropy_below: PositiveFloat | None = Field(None, description="of the policy, nats a token")
    length_above: PositiveFloat | None = Field(None, description="mean completion, tokens")
    truncated_above: Fraction | None = Field(None, description="share of completions that were cut off")
    garbage_above: Fraction | None = Field(
        None,
        description="share of completions that end in a loop, or that nobody can read, e.g. 0.5. Not for "
        "models with random weights, which say nothing else",
    )
    mismatch_above: PositiveFloat | None = Field(
        1.0, description="mean difference of log-probs between engine and trainer, nats"
    )
    kl_above: PositiveFloat | None = Field(10.0, description="ref/kl, nats a token")
    grad_norm_spike: Annotated[float, Field(gt=1)] | None = Field(
        None, description="gradient norm, as a multiple of its median over the last 20 steps, e.g. 20"
    )


class Checkpoint(Section):
    every: Count = Field(20, description="steps between checkpoints; 0: only the last")
    keep: PositiveInt = Field(2, description="newest checkpoints kept")
    resume: Literal["auto", "never"] = Field(
        "auto", description="auto: go on from the newest checkpoint that is whole, if any"
    )
    background: bool = Field(
        True, description="written while training goes on, from a copy in the host memory of each rank"
    )
    grace_s: PositiveFloat = Field(
        60.0, description="what a run that is asked to end (SIGTERM) has for its step and a checkpoint"
    )
    export: bool = Field(True, description="write the trained model in Hugging Face format at the end")


class Wandb(Section):
    enabled: bool = False
    project: str = "grpo-dist"
    entity: str | None = None
    mode: Literal["auto", "online", "offline"] = Field(
        "auto", description="auto: offline where no key is set"
    )


class Tracking(Section):
    console: bool = True
    tensorboard: bool = True
    wandb: Wandb = Wandb()
    samples: bool = Field(
        True, description="keep every sampled completion with its rewards, one Parquet file a step"
    )
    token_values_every: Count = Field(
        10,
        description="with the samples of every so many steps keep, for each token, its advantage and its "
        "log-probs under policy and reference; 0: of none",
    )


class Profile(Section):
    """Of chosen steps; the traces are in the directory `profile` of the run."""

    steps: tuple[PositiveInt, ...] = Field((), description="whose updates every rank traces, e.g. [3, 4]")
    shapes: bool = Field(True, description="with the shapes of what each operator was given")
    memory: bool = Field(False, description="with what each operator allocated and freed")
    stacks: bool = Field(False, description="with the Python stack of each operator, at some cost")


class Timeouts(Section):
    room_s: PositiveFloat = Field(300.0, description="room for all actors in a cluster that others use, too")
    start_s: PositiveFloat = Field(600.0, description="all actors up, models loaded")
    sample_s: PositiveFloat = Field(1800.0, description="one batch sampled and scored")
    update_s: PositiveFloat = Field(1800.0, description="one step of the policy, or of the reference worker")
    sync_s: PositiveFloat = Field(300.0, description="one weight sync")
    save_s: PositiveFloat = Field(1800.0, description="one checkpoint or export")

    @property
    def up_s(self) -> float:
        """Until all actors are up: first there is room for them."""
        return self.room_s + self.start_s


class Restarts(Section):
    """Of actors, each alone, or, where it held what only a checkpoint has, with all policy ranks."""

    max_per_worker: Count = Field(3, description="of one actor within window_s; 0: its loss ends the run")
    window_s: PositiveFloat = Field(3600.0, description="restarts longer ago than this do not count")
    backoff_s: PositiveFloat = Field(
        1.0, description="before the first restart; doubles with each further, up to 60"
    )
    health_s: PositiveFloat = Field(3.0, description="between two questions whether an actor is well")
    hang_s: PositiveFloat = Field(
        13.0, description="an actor that neither answers nor goes on within it is replaced"
    )

    @model_validator(mode="after")
    def _asked_before_it_is_late(self) -> Restarts:
        if self.hang_s <= self.health_s:
            raise ValueError(
                f"hang_s = {self.hang_s:g} must be above health_s = {self.health_s:g}, at which actors are "
                "asked; raise the one or lower the other"
            )
        return self


class Lengths(Section):
    """Lengths of completions, tokens; none is above `sampling.max_new_tokens`."""

    kind: Literal["natural", "fixed", "lognormal"] = Field(
        "natural", description="natural: where the model ends; else so long, whatever it says"
    )
    tokens: PositiveInt | None = Field(None, description="of fixed; null: sampling.max_new_tokens")
    mean: PositiveFloat | None = Field(None, description="of lognormal, before it is cut off")
    sigma: PositiveFloat | None = Field(None, description="of lognormal: deviation of the log; null: 1")

    @model_validator(mode="after")
    def _settings_of_its_kind(self) -> Lengths:
        own = {"fixed": ("tokens",), "lognormal": ("mean", "sigma")}.get(self.kind, ())
        for name in sorted({"tokens", "mean", "sigma"} - set(own)):
            if getattr(self, name) is not None:
                value = getattr(self, name)
                raise ValueError(f"{name} = {value} is no setting of kind {self.kind}; remove it")
        if self.kind == "lognormal" and self.mean is None:
            raise ValueError("kind lognormal needs a mean, e.g. mean: 32")
        return self


class Bench(Section):
    """What `grpo-dist bench` does with a configuration; nothing else reads it."""

    warmup_steps: PositiveInt = Field(2, description="steps before the clock starts")
    steps: PositiveInt = Field(5, description="timed steps")
    lengths: Lengths = Lengths()
    limits: bool = Field(True, description="measure what the machine could do at best, too")


class Cluster(Section):
    address: str | None = Field(
        None, description="Ray cluster to join; null: RAY_ADDRESS, else a private local one"
    )
    num_cpus: PositiveInt | None = Field(None, description="CPUs of a private local cluster; null: all")
    placement: Literal["auto", "colocated", "separate"] = Field(
        "auto",
        description="colocated: engines and policy ranks take turns on the same GPUs, or on all CPU threads; "
        "separate: each has its own; auto: separate where the GPUs suffice, on CPUs where max_staleness > 0",
    )
    timeouts: Timeouts = Timeouts()
    restarts: Restarts = Restarts()


class Config(Section):
    """A whole run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    output_dir: str = "runs"
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    steps: PositiveInt = Field(100, description="training steps of the whole run")
    max_staleness: Count = Field(
        0, description="0: synchronous on-policy; n: sampling runs up to n steps ahead"
    )
    model: Model
    data: Data
    batch: Batch = Batch()
    dynamic_sampling: DynamicSampling = DynamicSampling()
    sampling: Sampling = Sampling()
    algorithm: Algorithm = Algorithm()
    rewards: Rewards = Rewards()
    rollout: Rollout = Rollout()
    reference: Reference = Reference()
    policy: Policy = Policy()
    weight_sync: WeightSync = WeightSync()
    evaluation: Evaluation = Evaluation()
    health: Health = Health()
    checkpoint: Checkpoint = Checkpoint()
    tracking: Tracking = Tracking()
    profile: Profile = Profile()
    cluster: Cluster = Cluster()
    bench: Bench = Bench()
    sft: SFT | None = Field(None, description="the supervised cold start that `model.path: sft` refers to")
    rejection: Rejection = Field(
        default_factory=lambda: Rejection(), description="how `grpo-dist sample` draws and keeps samples"
    )

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.kl.coef > 0

    @property
    def samples_in_flight(self) -> int:
        """Samples that may be drawn at once in training, on all engines together."""
        step = self.batch.prompts_per_step * self.batch.samples_per_prompt
        return step * (1 + self.max_staleness)

    @property
    def total_updates(self) -> int:
        """Optimiser updates of the whole run."""
        return self.steps * self.batch.updates_per_step * self.batch.epochs_per_batch

    @property
    def max_length(self) -> int:
        """Longest prompt + completion, tokens."""
        return self.model.max_length or self.data.max_prompt_tokens + self._longest_completion

    @property
    def _longest_completion(self) -> int:
        others = (self.evaluation.max_new_tokens, self.rejection.max_new_tokens)
        return max(self.sampling.max_new_tokens, *(tokens or 0 for tokens in others))

    @model_validator(mode="after")
    def _batch_divides(self) -> Config:
        b, ranks = self.batch, self.policy.replicas
        if b.prompts_per_step % b.updates_per_step:
            raise ValueError(
                f"`batch.prompts_per_step` = {b.prompts_per_step} must be divisible by "
                f"`batch.updates_per_step` = "
                f"{b.updates_per_step}; use {_divisors_near(b.prompts_per_step, b.updates_per_step)}"
            )
        samples = b.prompts_per_step * b.samples_per_prompt // b.updates_per_step
        if samples % ranks:
            per_update = " / `batch.updates_per_step`" if b.updates_per_step > 1 else ""
            shared = self.policy.sequence_parallel
            per_sequence = f" / `policy.sequence_parallel` = {shared}" if shared > 1 else ""
            raise ValueError(
                f"`batch.prompts_per_step` * `batch.samples_per_prompt`{per_update} = {samples} must be "
                f"divisible by `policy.num_workers` = {self.policy.num_workers}{per_sequence}; use "
                f"{_divisors_near(samples, ranks)}{' times that' if per_sequence else ''}"
            )
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> Config:
        needed = self.data.max_prompt_tokens + self._longest_completion
        if self.max_length < needed:
            raise ValueError(
                f"`model.max_length` = {self.model.max_length} is below `data.max_prompt_tokens` + the "
                f"longest completion = {needed}; raise the one or lower the others"
            )
        return self

    @model_validator(mode="after")
    def _bench_lengths_fit(self) -> Config:
        tokens = self.bench.lengths.tokens or 0
        if tokens > self.sampling.max_new_tokens:
            raise ValueError(
                f"`bench.lengths.tokens` = {tokens} is above `sampling.max_new_tokens` = "
                f"{self.sampling.max_new_tokens}; lower the one or raise the other"
            )
        return self

    @model_validator(mode="after")
    def _algorithm_fits(self) -> Config:
        for problem in contradictions(self):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _sft_is_there(self) -> Config:
        if self.model.path == "sft" and self.sft is None:
            raise ValueError("`model.path` = sft needs an `sft` section that says how that model is made")
        return self


class Rejection(Section):
    """Rejection sampling: completions of the prompts of `data.train`, of which the right ones are kept."""

    samples_per_prompt: PositiveInt = 8
    max_prompts: PositiveInt | None = Field(None, description="so many prompts, drawn by seed; null: all")
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Count = 0
    max_new_tokens: PositiveInt | None = Field(None, description="null: sampling.max_new_tokens")
    min_reward: float = Field(1.0, description="a sample of at least this total reward is kept")
    keep_per_prompt: PositiveInt = Field(1, description="different completions kept of a prompt, at most")
    prefer: Literal["shortest", "first", "random"] = Field(
        "shortest", description="which are kept where a prompt has more"
    )
    max_pass_rate: Fraction = Field(
        1.0, description="drop prompts whose share of kept-worthy samples is above; below 1: the too easy"
    )
    chunk_prompts: PositiveInt = Field(512, description="prompts sampled between two saves")

    @model_validator(mode="after")
    def _keeps_what_there_is(self) -> Rejection:
        if self.keep_per_prompt > self.samples_per_prompt:
            raise ValueError(
                f"keep_per_prompt = {self.keep_per_prompt} is above samples_per_prompt = "
                f"{self.samples_per_prompt}; sample more or keep fewer"
            )
        return self


class Demonstrations(Section):
    """One source of (prompt, completion) pairs; null takes what the `sft` section says."""

    path: str = Field(description="JSONL file with `prompt` and `completion`, or `demo:<name>`")
    examples: PositiveInt | None = Field(None, description="use the first so many")
    noise: Fraction | None = Field(
        None, description="share of generated demonstrations that carry one wrong step"
    )

    @model_validator(mode="after")
    def _noise_is_of_what_is_made(self) -> Demonstrations:
        if self.noise is not None and not self.path.startswith("demo:"):
            raise ValueError(
                f"noise = {self.noise:g} is of demonstrations that are generated, and path = {self.path} is "
                "not demo:...; remove it"
            )
        return self


def _as_sources(value: Any) -> Any:
    """A path alone, or a list that has some, as the mappings of Demonstrations they stand for."""
    values = [value] if isinstance(value, str | dict) else value
    if not isinstance(values, list | tuple):
        return value
    return [{"path": v} if isinstance(v, str) else v for v in values]


class SFT(Section):
    """Supervised training, as of a cold start: next-token loss on the response of (prompt, completion)
    pairs.
    """

    model: str = Field(description="local directory, or `demo:<name>` for a model made from the seed")
    data: Annotated[tuple[Demonstrations, ...], Field(min_length=1), BeforeValidator(_as_sources)] = Field(
        description="a path as in `sft.data.0.path`, or a list of sources that are mixed"
    )
    examples: PositiveInt | None = Field(None, description="use the first so many of a source; null: all")
    noise: Fraction = Field(0.0, description="share of generated demonstrations that carry one wrong step")
    steps: PositiveInt = 500
    batch_size: PositiveInt = 48
    lr: PositiveFloat = 2e-3
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    weight_decay: NonNegative = 0.01
    warmup_steps: Count = 20
    min_lr_ratio: Fraction = 0.1
    max_grad_norm: PositiveFloat = 1.0
    max_length: PositiveInt = 1024
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    threads: Count = 0


def _divisors_near(total: int, wanted: int) -> str:
    """The divisors of ``total`` on both sides of ``wanted``, for a message: (512, 3) -> "2 or 4"."""
    below = [d for d in range(1, wanted) if total % d == 0]
    above = [d for d in range(wanted + 1, total + 1) if total % d == 0]
    return " or ".join(str(d) for d in below[-1:] + above[:1])


Config.model_rebuild()
