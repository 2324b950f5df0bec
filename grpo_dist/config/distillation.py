"""On-policy distillation from teachers, and demonstrations mixed into the batches of GRPO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from grpo_dist.config.base import Choice, NonNegative, Section, Tagged, repeated
from grpo_dist.config.data import ModelConfig
from grpo_dist.config.stages import DemonstrationsConfig, read_sources

REFERENCE = "reference"  # a teacher of this model is the reference itself


class TeacherConfig(Section):
    """A model whose token probabilities on the policy's samples the policy learns."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="label in metrics")
    model: str = Field(
        description="as `model.path`, with the policy's tokenizer; reference: the policy's initial weights, "
        "or the refreshed copy"
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    sources: tuple[str, ...] = Field(
        (), description="names of the sources of `data.train` whose samples it teaches; empty: all"
    )
    prompt: str | None = Field(
        None,
        description="the teacher's problem: text with {problem}, {answer} and {columns}; null: the policy's",
    )
    num_workers: PositiveInt = Field(
        1, description="actors, each with a full model; colocated on GPUs: one on each of the policy's"
    )

    @property
    def has_workers(self) -> bool:
        """Whether it has separate workers."""
        return self.model != REFERENCE

    def model_section(self, policy: ModelConfig) -> ModelConfig:
        """Return the policy's section `model` with the teacher's model, which may have no kernels."""
        kernels = "torch" if policy.kernels == "torch" else "auto"
        changes = {"path": self.model, "revision": self.revision, "adapter": None, "kernels": kernels}
        changes["chat_template"] = None
        return policy.model_copy(update=changes)

    def teaches(self, source: str) -> bool:
        """Return whether it teaches the samples of ``source``."""
        return not self.sources or source in self.sources


class AdvantageKL(Choice):
    """Add log p(teacher) - log p(policy) to a token's advantage."""

    name: Literal["advantage"] = "advantage"


class SampledKL(Choice):
    """A term of the loss: the mean of an estimate from the sampled tokens."""

    name: Literal["sampled"] = "sampled"
    estimator: Literal["k2", "k3", "k1+", "k3+"] = Field(
        "k3+", description="as `algorithm.kl.estimator`; all but k3 have the gradient of the reverse KL"
    )


class TopKKL(Choice):
    """A term of the loss: the mean divergence from the teacher's top-k per position; all other tokens count
    as one.
    """

    name: Literal["top_k"] = "top_k"
    k: PositiveInt = Field(16, description="tokens per position")
    divergence: Literal["reverse", "forward", "jensen_shannon"] = Field(
        "reverse",
        description="reverse is KL(policy, teacher), forward KL(teacher, policy), jensen_shannon half of "
        "both to their mean",
    )


class DistillationConfig(Section):
    """On-policy distillation: the policy learns the teacher's distribution on its own samples."""

    teachers: tuple[TeacherConfig, ...] = Field(
        (),
        description="teachers; a sample with several, not with kl top_k, learns the mean of their log-probs",
    )
    coef: PositiveFloat = Field(1.0, description="weight of the KL to the teacher")
    kl: Annotated[AdvantageKL | SampledKL | TopKKL, Tagged()] = Field(
        AdvantageKL(), description="how the policy learns the KL to the teacher"
    )
    reward_coef: NonNegative = Field(
        1.0,
        description="weight of the rewards' advantages, without a KL term inside them; 0: rewards are only "
        "measured",
    )

    def _contradictions(self) -> Iterator[str]:
        if doubled := repeated([teacher.name for teacher in self.teachers]):
            yield f"two teachers have the name {doubled[0]!r}; give each its own `name`"

    @property
    def kl_as(self) -> Literal["advantage", "loss"]:
        """Where the KL to the teacher is added."""
        return "advantage" if isinstance(self.kl, AdvantageKL) else "loss"

    @property
    def top_k(self) -> int:
        """Tokens per position whose probabilities a teacher returns; 0: only the sampled token."""
        return self.kl.k if isinstance(self.kl, TopKKL) else 0

    @property
    def estimator(self) -> str:
        """The estimator of the KL term in the loss."""
        return (self.kl if isinstance(self.kl, SampledKL) else SampledKL()).estimator

    @property
    def divergence(self) -> str:
        """The divergence of the KL term in the loss."""
        return (self.kl if isinstance(self.kl, TopKKL) else TopKKL()).divergence

    @property
    def teachers_with_workers(self) -> tuple[TeacherConfig, ...]:
        """Return the teachers with separate workers."""
        return tuple(teacher for teacher in self.teachers if teacher.has_workers)


class DemonstrationStreamConfig(Section):
    """Demonstrations in the batches of GRPO: cross-entropy on their completions, added to the policy loss."""

    section: ClassVar[str] = "demonstrations"

    data: Annotated[tuple[DemonstrationsConfig, ...], Field(min_length=1), BeforeValidator(read_sources)] = (
        Field(description="a path as in `sft.data.0.path`, or a list of sources to mix")
    )
    rows_per_step: PositiveInt = Field(16, description="demonstrations per step, over all of its updates")
    coef: PositiveFloat = Field(0.1, description="weight of the mean of -log p over their tokens")
