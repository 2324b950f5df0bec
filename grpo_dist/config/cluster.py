"""Ray, deadlines and restarts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from grpo_dist.config.base import Count, Section

HEALTH_S = 3.0  # seconds between health checks of an actor
_HANG_S = {False: 13.0, True: 60.0}  # by whether the actor computes on a GPU


class TimeoutsConfig(Section):
    """Deadlines in seconds. When one passes, the message names what the run waited for."""

    placement_timeout_s: PositiveFloat = Field(
        300.0, description="until a shared cluster has resources for all actors"
    )
    start_s: PositiveFloat = Field(600.0, description="until all actors have started and loaded their models")
    sample_s: PositiveFloat = Field(1800.0, description="one batch sampled and scored")
    update_s: PositiveFloat = Field(1800.0, description="one step of the policy or of a reference worker")
    sync_s: PositiveFloat = Field(300.0, description="one weight sync")
    save_s: PositiveFloat = Field(1800.0, description="one checkpoint or export")
    user_code_s: PositiveFloat = Field(60.0, description="one call of a user-supplied metric or prompt order")

    @property
    def up_s(self) -> float:
        """Seconds until all actors have started, including the wait for resources."""
        return self.placement_timeout_s + self.start_s

    @property
    def collective_s(self) -> float:
        """Deadline of a collective of the policy's ranks: in no stage does it pass before the driver's, whose
        message names the stage.
        """
        return max(self.up_s, self.update_s, self.sync_s, self.save_s)


class RestartsConfig(Section):
    """Restarts of failed actors: only the failed actor, or all policy ranks if their state is lost."""

    max_per_worker: Count = Field(
        3, description="restarts of one actor within an hour; 0: its failure ends the run"
    )
    backoff_s: PositiveFloat = Field(
        1.0, description="wait before the first restart; doubles with each further restart, up to 60"
    )
    hang_s: Annotated[float, Field(gt=HEALTH_S)] | None = Field(
        None,
        description="an actor without answer or progress for this long is replaced; null: 60 on GPUs, 13 "
        "elsewhere",
    )

    def hangs_after(self, *, on_gpu: bool) -> float:
        """Return the seconds without an answer or progress after which an actor is replaced."""
        return self.hang_s or _HANG_S[on_gpu]


class AutoscalingConfig(Section):
    """The cluster that an autoscaler can create: nodes of one kind."""

    nodes: PositiveInt = Field(description="nodes in all, including existing nodes with this many GPUs")
    gpus: PositiveInt = Field(description="GPUs per node")
    cpus: PositiveInt = Field(description="CPUs per node")


class ClusterConfig(Section):
    """Ray cluster, placement of workers on devices, deadlines and restarts."""

    address: str | None = Field(
        None, description="Ray cluster to join; null: RAY_ADDRESS, else a private local one"
    )
    num_cpus: PositiveInt | None = Field(None, description="CPUs of a private local cluster; null: all")
    placement: Literal["auto", "colocated", "separate"] = Field(
        "auto",
        description="colocated: all roles share the policy's GPUs or the same cores; separate: each has "
        "its own; auto: separate where the GPUs suffice, on CPUs where max_staleness > 0",
    )
    grows_to: AutoscalingConfig | None = Field(
        None,
        description="size to which an autoscaler grows the cluster, waited for "
        "`timeouts.placement_timeout_s`; null: fixed size",
    )
    timeouts: TimeoutsConfig = Field(default_factory=TimeoutsConfig)
    restarts: RestartsConfig = Field(default_factory=RestartsConfig)
