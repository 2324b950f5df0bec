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

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Model(Section):
    path: str = Field(description="local directory, hub id, or `demo:<name>` for a model this project makes")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 where the accelerator supports it, else float32"
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto", description="trainer attention"
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
    overlap: Literal["refuse", "warn"] = Field(
        "warn", description="evaluation problems found in the training set"
    )


class Batch(Section):
    prompts_per_step: PositiveInt = 16
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    updates_per_step: PositiveInt = Field(
        1, description="optimiser updates a step is split into; 1 is on-policy"
    )
    micro_batch_tokens: PositiveInt = Field(16384, description="padded tokens a rank holds in one forward")


class Sampling(Section):
    temperature: PositiveFloat = 1.0
    max_new_tokens: PositiveInt = 512


class KL(Section):
    coef: NonNegative = Field(0.0, description="weight of the KL term; 0: no reference worker is created")
    estimator: Literal["k1", "k2", "k3"] = "k3"


class Correction(Section):
    kind: Literal["none", "tis", "mis", "icepop"] = "tis"
    level: Literal["token", "sequence", "geometric"] = "token"
    low: NonNegative = 0.0
    high: PositiveFloat = 2.0

    @model_validator(mode="after")
    def _ordered(self) -> Correction:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        return self


class Algorithm(Section):
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    std: Literal["group", "batch", "none"] = Field("group", description="what a centred reward is divided by")
    advantage_eps: PositiveFloat = 1e-6
    policy_loss: Literal["ppo_clip"] = "ppo_clip"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: PositiveFloat = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "token-mean"
    kl: KL = KL()
    correction: Correction = Correction()


class Reward(Section):
    name: str = Field("", description="label in metrics; empty: the function's name")
    function: str = Field(description="`math`, `format`, or `module:function`")
    weight: float = 1.0
    kwargs: dict[str, Any] = {}


class Rewards(Section):
    functions: tuple[Reward, ...] = Field((Reward(function="math"),), min_length=1)
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
        names = [r.name or r.function for r in self.functions]
        if len(set(names)) != len(names):
            raise ValueError(f"two rewards share a name: {names}; set `name` of each")
        return self


class Rollout(Section):
    num_workers: PositiveInt = 1
    tensor_parallel_size: PositiveInt = 1
    gpu_memory_utilization: Fraction = 0.85
    kv_cache_gib: PositiveFloat = Field(1.0, description="key-value cache of an engine without a GPU, GiB")
    max_num_seqs: PositiveInt = Field(256, description="sequences an engine decodes at once")
    threads: Count = Field(0, description="CPU threads of an engine; 0: what is left to it")
    enforce_eager: bool = Field(
        False, description="skip compilation and graphs: faster start, slower decoding"
    )
    engine: dict[str, Any] = Field({}, description="further vLLM engine arguments")


class Reference(Section):
    num_workers: PositiveInt = 1
    threads: Count = 0
    micro_batch_tokens: PositiveInt = 16384


class Optimizer(Section):
    lr: PositiveFloat = 1e-6
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegative = 0.0
    max_grad_norm: PositiveFloat = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Count = 0
    min_lr_ratio: Fraction = Field(0.0, description="final learning rate as a share of lr")


class Policy(Section):
    num_workers: PositiveInt = Field(1, description="ZeRO ranks, one actor each")
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 2
    threads: Count = Field(0, description="CPU threads of a rank; 0: what is left to it")
    optimizer: Optimizer = Optimizer()
    logprob_chunk_tokens: PositiveInt = Field(2048, description="rows of logits that exist at once")
    deepspeed: dict[str, Any] = Field(
        {}, description="merged into the DeepSpeed configuration (offload, buckets)"
    )


class WeightSync(Section):
    backend: Literal["auto", "gloo", "nccl"] = Field("auto", description="auto: nccl on GPUs, gloo on CPUs")
    bucket_mb: PositiveInt = 256
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


class Checkpoint(Section):
    every: Count = Field(0, description="steps between checkpoints; 0: only the last")
    keep: PositiveInt = Field(2, description="newest checkpoints kept")
    resume: Literal["auto", "never"] = Field(
        "auto", description="auto: go on from the newest checkpoint, if any"
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


class Timeouts(Section):
    start_s: PositiveFloat = Field(600.0, description="all actors up, models loaded")
    sample_s: PositiveFloat = Field(1800.0, description="one batch sampled and scored")
    update_s: PositiveFloat = Field(1800.0, description="one step of the policy, or of the reference worker")
    sync_s: PositiveFloat = Field(300.0, description="one weight sync")
    save_s: PositiveFloat = Field(1800.0, description="one checkpoint or export")


class Cluster(Section):
    address: str | None = Field(
        None, description="Ray cluster to join; null: RAY_ADDRESS, else a private local one"
    )
    num_cpus: PositiveInt | None = Field(None, description="CPUs of a private local cluster; null: all")
    timeouts: Timeouts = Timeouts()


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
    sampling: Sampling = Sampling()
    algorithm: Algorithm = Algorithm()
    rewards: Rewards = Rewards()
    rollout: Rollout = Rollout()
    reference: Reference = Reference()
    policy: Policy = Policy()
    weight_sync: WeightSync = WeightSync()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    tracking: Tracking = Tracking()
    cluster: Cluster = Cluster()
    sft: SFT | None = Field(None, description="the supervised cold start that `model.path: sft` refers to")
    rejection: Rejection = Field(
        default_factory=lambda: Rejection(), description="how `grpo-dist sample` draws and keeps samples"
    )

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.kl.coef > 0

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
        b, ranks = self.batch, self.policy.num_workers
        if b.prompts_per_step % b.updates_per_step:
            raise ValueError(
                f"`batch.prompts_per_step` = {b.prompts_per_step} must be divisible by "
                f"`batch.updates_per_step` = "
                f"{b.updates_per_step}; use {_divisors_near(b.prompts_per_step, b.updates_per_step)}"
            )
        samples = b.prompts_per_step * b.samples_per_prompt // b.updates_per_step
        if samples % ranks:
            per_update = " / `batch.updates_per_step`" if b.updates_per_step > 1 else ""
            raise ValueError(
                f"`batch.prompts_per_step` * `batch.samples_per_prompt`{per_update} = {samples} must be "
                f"divisible by "
                f"`policy.num_workers` = {ranks}; use {_divisors_near(samples, ranks)}"
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
    def _deviation_is_used(self) -> Config:
        algorithm = self.algorithm
        asked_for = "std" in algorithm.model_fields_set and algorithm.std != "none"
        if algorithm.advantage != "grpo" and asked_for:
            raise ValueError(
                f"`algorithm.std` = {algorithm.std} contradicts `algorithm.advantage` = "
                f"{algorithm.advantage}, which does not divide by a deviation; remove `algorithm.std` or "
                "use advantage grpo"
            )
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


class Demonstrations(Section):
    """One source of (prompt, completion) pairs; null takes what the `sft` section says."""

    path: str = Field(description="JSONL file with `prompt` and `completion`, or `demo:<name>`")
    examples: PositiveInt | None = Field(None, description="use the first so many")
    noise: Fraction | None = Field(
        None, description="share of generated demonstrations that carry one wrong step"
    )


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
