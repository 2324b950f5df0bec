"""Ray, deadlines and restarts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from grpo_dist.config.base import Count, Section


class TimeoutsConfig(Section):
    """Deadlines in seconds. When one passes, the message names what was waited for."""

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


class RestartsConfig(Section):
    """Of actors, each alone, or, where it held what only a checkpoint has, with all policy ranks."""

    max_per_worker: Count = Field(3, description="of one actor within window_s; 0: its loss ends the run")
    window_s: PositiveFloat = Field(3600.0, description="restarts longer ago than this do not count")
    backoff_s: PositiveFloat = Field(
        1.0, description="before the first restart; doubles with each further, up to 60"
    )
    health_s: PositiveFloat = Field(3.0, description="between two questions whether an actor is well")
    hang_s: PositiveFloat = Field(
        13.0, description="an actor that neither answers nor makes progress within it is replaced"
    )

    @model_validator(mode="after")
    def _asked_before_it_is_late(self) -> RestartsConfig:
        if self.hang_s <= self.health_s:
            raise ValueError(
                f"hang_s = {self.hang_s:g} must be above health_s = {self.health_s:g}, at which actors are "
                "asked; raise the one or lower the other"
            )
        return self


class AutoscalingConfig(Section):
    """What an autoscaler makes of the cluster: nodes of one kind."""

    nodes: PositiveInt = Field(description="in all, those among them that are there and have as many GPUs")
    gpus: PositiveInt = Field(description="of each")
    cpus: PositiveInt = Field(description="of each")


class ClusterConfig(Section):
    """Ray, and the placement of workers on devices."""

    address: str | None = Field(
        None, description="Ray cluster to join; null: RAY_ADDRESS, else a private local one"
    )
    num_cpus: PositiveInt | None = Field(None, description="CPUs of a private local cluster; null: all")
    placement: Literal["auto", "colocated", "separate"] = Field(
        "auto",
        description="colocated: engines and policy ranks take turns on the same GPUs, or on all CPU threads; "
        "separate: each has its own; auto: separate where the GPUs suffice, on CPUs where max_staleness > 0",
    )
    grows_to: AutoscalingConfig | None = Field(
        None,
        description="an autoscaler adds nodes up to this when actors request resources: they are "
        "counted as if they were there, and waited for, `timeouts.room_s` at most; null: it is as it is",
    )
    timeouts: TimeoutsConfig = TimeoutsConfig()
    restarts: RestartsConfig = RestartsConfig()
