"""The models and files that a run reads."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.config.distillation import REFERENCE
from grpo_dist.config.root import Config


def input_paths(config: Config) -> Iterator[tuple[str, str, bool]]:
    """Yield key, value and True for every path of a model; key, value and False for every path of data.

    A value is a path or the id of a hub. What the run itself makes has none: the result of a cold start, the
    reference as teacher, and rows of a function of the user's own.
    """
    if config.model.path != "sft":
        yield "model.path", config.model.path, True
    if config.model.adapter is not None:
        yield "model.adapter", config.model.adapter, True
    yield from ((f"rewards.models.{i}.path", m.path, True) for i, m in enumerate(config.rewards.models))
    for name, sources in (("train", config.data.train), ("eval", config.data.eval)):
        paths = (
            (f"data.{name}.{i}.path", source.path) for i, source in enumerate(sources) if not source.is_own
        )
        yield from ((key, path, False) for key, path in paths if path is not None)
    if config.sft is not None:
        yield "sft.model", config.sft.model, True
        yield from ((f"sft.data.{i}.path", source.path, False) for i, source in enumerate(config.sft.data))
    for i, teacher in enumerate(config.distillation.teachers):
        if teacher.model != REFERENCE:
            yield f"distillation.teachers.{i}.model", teacher.model, True
    for i, source in enumerate(config.demonstrations.data if config.demonstrations else ()):
        yield f"demonstrations.data.{i}.path", source.path, False
