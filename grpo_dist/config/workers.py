"""Engines, reference, policy, and the weights between them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from grpo_dist.config.base import Count, Fraction, NonNegative, Section


class RolloutConfig(Section):
    """The vLLM engines."""

    num_workers: PositiveInt = Field(1, description="engines, each with a whole model")
    tensor_parallel_size: PositiveInt = Field(1, description="GPUs an engine is split over")
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
    engine: dict[str, Any] = Field(
        {},
        description="further arguments of vLLM's engine; those that other keys set, and those that change "
        "what its log-probs are of, are refused",
    )


class ReferenceConfig(Section):
    """The frozen model of the KL term; none is made while `algorithm.kl.coef` is 0."""

    num_workers: PositiveInt = Field(1, description="actors, each with a whole model")
    threads: Count = Field(0, description="CPU threads of a worker; 0: one")
    micro_batch_tokens: PositiveInt | None = Field(
        None, description="tokens in one forward; null: 16384 on a GPU, 4096 elsewhere"
    )
    refresh_every: Count = Field(
        0, description="steps after which it takes on the policy (launched batches finish first); 0: never"
    )
    refresh_mix: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the policy it takes on; 1: all, less: a moving average"
    )


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    lr: PositiveFloat = Field(1e-6, description="with policy.lora about ten times as much, e.g. 1e-5")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="decay of AdamW's two averages")
    eps: PositiveFloat = Field(1e-8, description="added to AdamW's denominator")
    weight_decay: NonNegative = Field(0.0, description="decoupled, times the learning rate")
    max_grad_norm: PositiveFloat = Field(1.0, description="a gradient of larger norm is scaled down to it")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how the learning rate falls after warm-up, over all updates of the run"
    )
    warmup_steps: Count = Field(0, description="optimiser updates over which the learning rate rises")
    min_lr_ratio: Fraction = Field(0.0, description="final learning rate as a share of lr")


class LoRAConfig(Section):
    """Low-rank adapters: they alone are trained."""

    rank: PositiveInt = Field(16, description="inner dimension of an adapter")
    alpha: PositiveFloat = Field(32.0, description="the adapters' product counts alpha / rank times")
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        "all-linear",
        description="linear layers, e.g. [q_proj, v_proj]; all-linear: all but the LM head and fused experts",
    )
    sync: Literal["merged", "adapter"] = Field(
        "merged",
        description="what travels to the engines. merged: whole weights; adapter: the adapters alone, which "
        "each engine merges into the checkpoint it was started from",
    )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class OffloadConfig(Section):
    """Where the trainer's state lies while it is not computed with."""

    optimizer: Literal["none", "cpu", "nvme"] = Field(
        "none", description="optimiser state; its update then runs on the CPU. nvme needs zero_stage 3"
    )
    parameters: Literal["none", "cpu", "nvme"] = Field("none", description="weights; needs zero_stage 3")
    nvme_path: str | None = Field(
        None, description="directory of this run alone, on a local NVMe disk of every policy node"
    )


class PolicyConfig(Section):
    """The DeepSpeed ranks that train."""

    num_workers: PositiveInt = Field(1, description="ZeRO ranks, one actor each")
    zero_stage: Annotated[int, Field(ge=0, le=3)] = Field(
        2, description="what ranks share out: 1 optimiser state, 2 gradients too, 3 weights too; 0: nothing"
    )
    sequence_parallel: PositiveInt = Field(
        1, description="ranks that share each sequence (Ulysses), for long completions; 1: none do"
    )
    compile: bool = Field(
        False, description="torch.compile of each layer, for long GPU runs: minutes of start; no ZeRO-3"
    )
    threads: Count = Field(0, description="CPU threads of a rank; 0: what is left to it")
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoRAConfig | None = Field(None, description="train low-rank adapters; null: all weights")
    offload: OffloadConfig = OffloadConfig()
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


class WeightSyncConfig(Section):
    """How new weights get from the policy to the engines."""

    backend: Literal["auto", "gloo", "nccl", "shared_memory", "ipc"] = Field(
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
        "keep: they pause, and continue with the new weights",
    )
    probe_every: Count = Field(
        20,
        description="steps between two probes of all engines: the trainer's log-probs of tokens just sampled "
        "against the engine's. An engine is probed in any case when a run starts or resumes and when it was "
        "restarted itself; 0: only then",
    )
    probe_above: PositiveFloat | None = Field(
        None,
        description="mean difference of a probe, nats a token, that ends the run with exit code 3, whatever "
        "`health.action` is; null: 1e-3 in float32, 0.15 in bfloat16",
    )
