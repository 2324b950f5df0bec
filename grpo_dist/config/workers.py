"""Engines, reference workers, policy ranks, and weight sync between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from grpo_dist.config.base import Count, Fraction, NonNegative, Section
from grpo_dist.plugins.user_code import ROLLOUT, RolloutName, UserComponent


class SpeculationConfig(Section):
    """Drafts that the engine verifies in one pass: lossless. On CPUs samples stay identical. On GPUs the same
    seed gives another sample from the same distribution.
    """

    tokens: Annotated[int, Field(ge=1, le=128)] = Field(
        description="most tokens drafted for a sample at once, from earlier samples and its own text"
    )
    max_sequences: PositiveInt = Field(
        4, description="draft only while an engine decodes at most this number of sequences"
    )


class RolloutConfig(Section):
    """The vLLM engines."""

    num_workers: PositiveInt = Field(
        1,
        description="engines, each with a full model; `{min: 1, max: 8}` sets `max_workers`, too",
    )
    max_workers: PositiveInt | None = Field(
        None,
        description="engines beyond `num_workers` join, up to this number, while the cluster has free "
        "resources; null: none",
    )
    tensor_parallel_size: PositiveInt = Field(1, description="GPUs per engine")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="share of a GPU's memory an engine takes; null: 0.85, or 0.6 if colocated"
    )
    kv_cache_gib: PositiveFloat | None = Field(
        None,
        description="key-value cache of an engine without a GPU, GiB; null: for max_num_seqs full "
        "sequences, at most a quarter of the free memory",
    )
    max_num_seqs: PositiveInt | None = Field(
        None,
        description="sequences an engine decodes at once; null: the most in flight, 256 to 1024",
    )
    threads: Count = Field(
        0,
        description="CPU threads of an engine; 0: its share of the available threads",
    )
    quantization: Literal["none", "fp8"] = Field(
        "none",
        description="fp8: linear layers and experts in 8 bits; needs GPUs, bfloat16 and a correction",
    )
    enforce_eager: bool = Field(
        False, description="skip compilation and CUDA graphs: faster start, slower decoding"
    )
    speculation: SpeculationConfig | None = Field(
        None, description="lossless speculative decoding, e.g. {tokens: 4}; null: none"
    )
    function: RolloutName | None = Field(
        None,
        description="user-supplied function `module:name` that draws a sample of a prompt without "
        "environment; null: one completion",
    )
    function_kwargs: dict[str, Any] = Field({}, description="arguments of `function`")
    engine: dict[str, Any] = Field(
        {},
        description="further arguments of vLLM's engine, except those that other keys set or that change "
        "its log-probs",
    )

    @model_validator(mode="before")
    @classmethod
    def _range_of_workers(cls, values: Any) -> Any:
        """Accept `num_workers: {min: 1, max: 8}` for the two keys."""
        workers = values.get("num_workers") if isinstance(values, dict) else None
        if not isinstance(workers, dict):
            return values
        if set(workers) != {"min", "max"} or values.get("max_workers") is not None:
            raise ValueError(
                f"num_workers = {workers}: expected a whole number, or only min and max, as in "
                "`{min: 1, max: 8}`, without `max_workers`"
            )
        return values | {"num_workers": workers["min"], "max_workers": workers["max"]}

    def _contradictions(self) -> Iterator[str]:
        if self.max_workers is not None and self.max_workers < self.num_workers:
            yield (
                f"max_workers = {self.max_workers} is below num_workers = {self.num_workers}; raise it, or "
                "remove it for a fixed number of engines"
            )
        if self.function_kwargs and self.function is None:
            yield (
                f"function_kwargs = {self.function_kwargs} are arguments of `function`, which is not "
                "set; set it, or remove them"
            )

    @property
    def most_workers(self) -> int:
        """The most engines at once."""
        return self.max_workers or self.num_workers

    @property
    def may_grow(self) -> bool:
        """Whether engines may join and leave."""
        return self.most_workers > self.num_workers

    @property
    def user_components(self) -> tuple[UserComponent, ...]:
        """The rollout function, if there is one."""
        if self.function is None:
            return ()
        return (UserComponent(ROLLOUT, self.function, ROLLOUT.key, self.function_kwargs),)


class ReferenceConfig(Section):
    """The frozen model of the KL term; not created if `algorithm.kl.coef` is 0."""

    num_workers: PositiveInt = Field(
        1, description="actors, each with a full model; colocated on GPUs: one on each of the policy's"
    )
    micro_batch_tokens: PositiveInt | None = Field(
        None,
        description="tokens in one forward pass, also of a teacher; null: 16384 on a GPU, 4096 elsewhere",
    )
    refresh_every: Count = Field(
        0, description="steps between copies of the policy into it (launched batches finish first); 0: never"
    )
    refresh_mix: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="weight of the policy in a refresh; 1: a copy, below 1: a moving average"
    )


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    name: Literal["adamw", "adamw_8bit"] = Field(
        "adamw",
        description="adamw_8bit: moving averages in 8 bits, by bitsandbytes; its checkpoint keeps ZeRO "
        "stage and ranks",
    )
    lr: PositiveFloat = Field(1e-6, description="about ten times higher with policy.lora, e.g. 1e-5")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="decay of AdamW's moving averages")
    eps: PositiveFloat = Field(1e-8, description="added to AdamW's denominator")
    weight_decay: NonNegative = Field(0.0, description="decoupled weight decay, scaled by the learning rate")
    max_grad_norm: PositiveFloat = Field(1.0, description="scale gradients with a larger norm down to it")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="decay of the learning rate after warm-up, over all updates of the run"
    )
    warmup_steps: Count = Field(0, description="optimiser updates over which the learning rate rises")
    warmup_share: Fraction = Field(
        0.0, description="instead of warmup_steps: share of all updates of the run, rounded down"
    )
    min_lr_ratio: Fraction = Field(0.0, description="final learning rate as a share of lr")

    def _contradictions(self) -> Iterator[str]:
        if self.warmup_steps and self.warmup_share:
            yield (
                f"warmup_share = {self.warmup_share:g} and warmup_steps = {self.warmup_steps} both give the "
                "length of the warm-up; remove one of them"
            )

    def warmup(self, total: int) -> int:
        """Return the updates of the warm-up in a run of ``total``."""
        return self.warmup_steps or int(self.warmup_share * total)


class LoRAConfig(Section):
    """Low-rank adapters; only the adapters are trained."""

    rank: PositiveInt = Field(16, description="inner dimension of an adapter")
    alpha: PositiveFloat = Field(32.0, description="the adapters' product is scaled by alpha / rank")
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        "all-linear",
        description="linear layers, e.g. [q_proj, v_proj]; all-linear: all but the LM head and fused experts",
    )
    sync: Literal["merged", "adapter"] = Field(
        "merged",
        description="what a weight sync sends: full weights, or adapters, which each engine merges",
    )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class OffloadConfig(Section):
    """Where trainer state is stored while it is not in use."""

    optimizer: Literal["none", "cpu", "nvme"] = Field(
        "none", description="optimiser state; its update then runs on the CPU; nvme needs zero_stage 3"
    )
    parameters: Literal["none", "cpu", "nvme"] = Field("none", description="weights; needs zero_stage 3")
    nvme_path: str | None = Field(
        None, description="directory on a local NVMe disk of every policy node; only this run may use it"
    )


class PolicyConfig(Section):
    """The DeepSpeed ranks that train."""

    num_workers: PositiveInt = Field(1, description="DeepSpeed ranks, one actor each")
    zero_stage: Annotated[int, Field(ge=0, le=3)] = Field(
        2, description="what ranks partition: 1 optimiser state, 2 also gradients, 3 also weights; 0: nothing"
    )
    sequence_parallel: PositiveInt = Field(
        1, description="ranks that split each sequence (Ulysses), for long completions; 1: off"
    )
    compile: bool = Field(
        False,
        description="torch.compile each layer: for long GPU runs, as it takes minutes; not with ZeRO-3",
    )
    router_replay: bool = Field(
        False,
        description="mixtures of experts: train each token with the experts that the engine chose "
        "(arXiv:2510.11370)",
    )
    threads: Count = Field(0, description="CPU threads of a rank; 0: its share of the available threads")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    lora: LoRAConfig | None = Field(None, description="train low-rank adapters; null: all weights")
    offload: OffloadConfig = Field(default_factory=OffloadConfig)
    deepspeed: dict[str, Any] = Field(
        {}, description="merged into the DeepSpeed configuration, e.g. bucket sizes and offload details"
    )

    @property
    def replicas(self) -> int:
        """Data-parallel replicas: ranks, or sequence-parallel groups of ranks, with separate rows."""
        return max(1, self.num_workers // self.sequence_parallel)


TransferBackend = Literal["gloo", "nccl", "shared_memory", "ipc"]


class WeightSyncConfig(Section):
    """Transfer of new weights from the policy to the engines."""

    backend: Literal["auto", TransferBackend] = Field(
        "auto",
        description="auto: nccl between GPUs, ipc between processes that share GPUs; on CPUs shared_memory "
        "within a host, gloo across hosts",
    )
    bucket_mb: PositiveInt | None = Field(
        None,
        description="size of each of two buckets in which weights are sent, MB; null: 256 on GPUs, else 32",
    )
    deltas: Literal["auto"] | bool = Field(
        False,
        description="send only changed words of the weights; ranks and engines hold a copy in host memory. "
        "auto: 16-bit weights, engines on other hosts, and copies of at most a quarter of the free memory",
    )
    mode: Literal["drain", "keep"] = Field(
        "drain",
        description="drain: launched samples finish first; keep: they pause, and continue with the new "
        "weights",
    )
    probe_every: Count = Field(
        20,
        description="steps between probes, which compare the log-probs of the trainer and every engine of "
        "training; 0: only at a start, resume or restart",
    )
    probe_above: PositiveFloat | None = Field(
        None,
        description="end the run with exit code 3 if the mean difference of a probe is above this, nats "
        "per token; null: 1e-3 in float32, 0.15 in bfloat16, 1 with fp8 engines",
    )
