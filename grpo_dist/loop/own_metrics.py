"""Metrics of a user's own, which are computed from the groups of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from grpo_dist.config import MetricConfig
from grpo_dist.plugins.inputs import MetricInputs
from grpo_dist.plugins.user_code import METRIC, call, call_in_time, load

_NOT_AGAIN = "the run continues without it"


class OwnMetrics:
    """Calls every metric of `tracking.metrics`. One that fails is reported once and left out: it is no reason
    to lose a run. One that takes longer than ``limit_s`` seconds is not called again.
    """

    def __init__(
        self,
        metrics: Sequence[MetricConfig],
        code_paths: Sequence[str],
        warn: Callable[[str], None],
        *,
        limit_s: float,
    ) -> None:
        self._metrics, self._code_paths, self._warn = metrics, code_paths, warn
        self._limit_s, self._hung = limit_s, set[str]()
        self._failed: set[str] = set()

    def __call__(self, inputs: MetricInputs) -> dict[str, float]:
        """Return the metrics by name, each with ``own/`` in front."""
        found: dict[str, float] = {}
        for metric in self._metrics:
            if metric.label in self._hung:
                continue
            measure = partial(
                own_metric, metric.function, self._code_paths, metric.kwargs, inputs, metric.label
            )
            what = f"metric {metric.name or metric.function}"
            try:
                found |= call_in_time(measure, self._limit_s, what, _NOT_AGAIN)
            except TimeoutError as error:
                self._hung.add(metric.label)
                self._warn(f"{' '.join(str(error).split())} (step {inputs.step})")
            except Exception as error:  # a user's function may raise anything
                if metric.label not in self._failed:
                    self._failed.add(metric.label)
                    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
                    self._warn(f"{what} failed in step {inputs.step} ({reason}); the run "
                               "continues, and this is not repeated for later steps")  # fmt: skip
        return found


def own_metric(
    name: str, code_paths: Sequence[str], kwargs: Mapping[str, Any], inputs: MetricInputs, label: str
) -> dict[str, float]:
    """Call the function ``name``: 0.5 -> {"own/LABEL": 0.5}, {"a": 1} -> {"own/LABEL/a": 1.0}. Raises
    ValueError or TypeError for what is neither a number nor numbers by name.
    """
    value = call(load(METRIC, name, code_paths), inputs, kwargs)
    if isinstance(value, Mapping):
        return {f"own/{label}/{key}": float(each) for key, each in value.items()}
    return {f"own/{label}": float(value)}
