"""Sizes of the model of a configuration, for tests of the plan."""

from grpo_dist.config import Config
from grpo_dist.tools.plan import models


def model_of(config: Config) -> models.ModelShape:
    return models.model_of(config.model, config.sft, config.seed)
