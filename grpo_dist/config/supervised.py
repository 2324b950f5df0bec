"""Supervised training on the policy's ranks, the sft stage of a pipeline, as the configuration of a run."""

from __future__ import annotations

from grpo_dist.config.checks import Config
from grpo_dist.config.files import checked
from grpo_dist.plugins.user_code import UserComponent

# Keys of `policy.optimizer` that `sft` has, too.
OPTIMIZER = {"lr", "weight_decay", "schedule", "warmup_steps", "min_lr_ratio"}


class SupervisedConfig(Config):
    """A run without engines, rewards and reference: `sft` gives its data, steps and optimiser."""

    @classmethod
    def from_config(cls, config: Config, *, steps: int | None = None) -> SupervisedConfig:
        """Return the supervised training that ``config`` describes. ``steps``: from `SFTConfig.steps_for`;
        None: `sft.steps`. Raises ConfigError for settings that contradict each other.
        """
        sft = config.sft
        assert sft is not None, "supervised training needs an `sft` section"
        plain = config.model_dump()
        batch = plain["batch"] | {"updates_per_step": 1, "epochs_per_batch": 1, "shuffle_epochs": False}
        # Sampling settings are unused but checked: the default estimator needs two samples per prompt, which
        # keeps the number of rows divisible by the number of ranks.
        batch |= {"order": "launched"}
        batch |= {"samples_per_prompt": max(2, config.batch.samples_per_prompt)}
        changes = {
            "seed": sft.seed,
            "epochs": None,
            "steps": steps or sft.steps,
            "max_staleness": 0,
            "batch": batch,
            "data": plain["data"] | {"train": [s | {"algorithm": None} for s in plain["data"]["train"]]},
            "sampling": plain["sampling"] | {"temperature": 1.0},
            "policy": plain["policy"]
            | {
                "optimizer": plain["policy"]["optimizer"]
                | {"warmup_share": 0.0}
                | sft.model_dump(include=OPTIMIZER)
            },
            "health": plain["health"] | {"min_signal_groups": 0},
            # Metrics of evaluations, which supervised training has not.
            "checkpoint": plain["checkpoint"] | {"keep_best": None, "patience": None, "target": None},
        }
        unused = {
            "algorithm",
            "rewards",
            "distillation",
            "demonstrations",
            "dynamic_sampling",
            "reference",
            "weight_sync",
            "bench",
        }
        used = {key: value for key, value in plain.items() if key not in unused}
        return checked(used | changes, f"{config.name}: supervised training", cls)

    @property
    def user_components(self) -> tuple[UserComponent, ...]:
        """Empty: supervised training calls no user-supplied component."""
        return ()

    @property
    def is_supervised(self) -> bool:
        return True
