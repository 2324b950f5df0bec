"""The Python interface: `grpo-dist train` and `grpo-dist eval` as functions, and the workers for your
own loop.

from grpo_dist import train
run = train("my.yaml", ["steps=50"])    # the run's directory: metrics.jsonl, samples/, model/, ...
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_dist.config import Config
from grpo_dist.config.files import ConfigError, apply_overrides, load_config, parser_reason, validated
from grpo_dist.config.secrets import masked_setting
from grpo_dist.errors import UserError, as_user_errors

if TYPE_CHECKING:  # imports torch
    from grpo_dist.runs.training_cluster import TrainingCluster

Source = Config | str | Path | Mapping[str, Any]


def train(config: Source, overrides: Sequence[str] = ()) -> Path:
    """Train to the end, resuming from the newest checkpoint if there is one. Returns the run's directory.

    Args:
        config: a file, a mapping with its contents, or the result of `load_config`.
        overrides: as on the command line, e.g. ``["steps=50", "+algorithm=dapo"]``; not with a Config.

    Raises:
        UserError: the input cannot be used, or the call is outside the main thread or inside an event loop.
        RunEnded: the run ended early, by SIGTERM, Ctrl-C or `health`, and resumes when called again. Or its
            ledger does not balance at the end.
    """
    settings = resolved(config, overrides)
    _check_place("train")
    # Imports torch; `import grpo_dist` must not.
    from grpo_dist.runs.preemption import ended_by_sigterm
    from grpo_dist.runs.session import train as train_to_the_end
    from grpo_dist.runtime.stage_log import stages_logged

    with ended_by_sigterm(), stages_logged(enabled=settings.tracking.console):
        return train_to_the_end(settings)


def evaluate_model(config: Source, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Evaluate `model.path` on `data.eval`, reusing samples that exist. Returns `eval/SET/pass@k` and other
    estimates, with standard errors.

    Args and UserError as for `train`.
    """
    settings = resolved(config, overrides)
    _check_place("evaluate_model")
    from grpo_dist.tools.evaluate.run import evaluate_model as evaluate  # imports torch, as above

    return evaluate(settings, print).metrics()


def cluster(config: Source, overrides: Sequence[str] = ()) -> TrainingCluster:
    """Return the workers of a configuration, with the verbs `sample`, `score`, `update` and `sync` for your
    own loop. ``with cluster(...) as workers:`` starts and ends them, as `open` and `close` do.

    Args and UserError as for `train`. Works in a notebook, too, in the main thread.
    """
    settings = resolved(config, overrides)
    if threading.current_thread() is not threading.main_thread():
        raise UserError("cluster() must be called by the main thread of a program or notebook")
    from grpo_dist.runs.start import resolve_steps  # imports torch
    from grpo_dist.runs.training_cluster import TrainingCluster

    with as_user_errors():
        settings = resolve_steps(settings, print)
    return TrainingCluster(settings)


def resolved(config: Source, overrides: Sequence[str] = ()) -> Config:
    """Return the frozen configuration. Raises ConfigError as `load_config`."""
    if isinstance(config, str | Path):
        return load_config(config, overrides)
    if isinstance(config, Config):
        if overrides:
            raise UserError(
                f"overrides {[masked_setting(text) for text in overrides]} with a Config, which is resolved "
                "already; give them to load_config"
            )
        return config
    try:
        tree = OmegaConf.create(dict(config))
    except OmegaConfBaseException as error:
        raise ConfigError(f"configuration: {parser_reason(error)}") from error
    assert isinstance(tree, DictConfig)
    return validated(apply_overrides(tree, overrides, Path("configuration.yaml")), "configuration", Config)


def _check_place(name: str) -> None:
    """Raise UserError outside the main thread, the only one to receive signals, or inside an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if threading.current_thread() is threading.main_thread():
            return
    raise UserError(
        f"{name}() must be called by the main thread of a program, outside of an event loop; in a notebook "
        "run `!grpo-dist ...`, elsewhere start a process"
    )
