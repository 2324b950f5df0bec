"""grpo-dist: GRPO training of language models on verifiable problems. This package has the algorithm and its
tools; `actors` runs it on Ray.

    from grpo_dist import train
    run = train("my.yaml", ["steps=50"])

Names are imported on first use, so that importing the package costs nothing.
"""

from typing import TYPE_CHECKING, Any

from grpo_dist.runtime import __version__

if TYPE_CHECKING:
    from grpo_dist.api import cluster, evaluate_model, train
    from grpo_dist.config import Config
    from grpo_dist.config.files import load_config
    from grpo_dist.errors import RunEnded, UserError

__all__ = [
    "Config",
    "RunEnded",
    "UserError",
    "__version__",
    "cluster",
    "evaluate_model",
    "load_config",
    "train",
]

_HOMES = {
    "train": "api",
    "cluster": "api",
    "evaluate_model": "api",
    "Config": "config",
    "load_config": "config.files",
    "RunEnded": "errors",
    "UserError": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # local: it must not become a name of the package

    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
