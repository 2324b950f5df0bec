"""Names of pieces: a built-in one, ``my_module:name`` from `code_paths`, or one that an installed package
registers as an entry point of the kind's group. Imports nothing of the user's.

A built-in name always means the built-in piece. A package that registers the same name does not replace it,
and `shadowing` reports it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from grpo_dist.plugins.kinds import ADVANTAGE, AGGREGATION, KL, LOSS, METRIC, ORDER, ROLLOUT, SINK, Kind


@dataclass(frozen=True, slots=True)
class OwnPiece:
    """A piece that is not built in.

    Attributes:
        name: as the configuration has it: ``module:name`` or that of an entry point.
        key: of the configuration that has it, for messages.
        kwargs: its arguments.
    """

    kind: Kind
    name: str
    key: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"`{self.key}` = {self.name}"


def registered(kind: Kind) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a kind's group by name: more than one where packages disagree."""
    found: dict[str, list[EntryPoint]] = {}
    for point in _installed(kind.group, _search_path()):
        same = found.setdefault(point.name, [])
        if point.value not in {other.value for other in same}:
            same.append(point)
    return found


@lru_cache(maxsize=64)
def _installed(group: str, path: tuple[tuple[str, int], ...]) -> EntryPoints:
    """Return the entry points of a group in all packages on ``path``. Reading them takes 20 ms, and a
    configuration asks about ten times.
    """
    return entry_points(group=group)


def _search_path() -> tuple[tuple[str, int], ...]:
    """Return the directories of `sys.path`, each with the time of its last change, as of an installation."""
    found = []
    for name in sys.path:
        directory = name or os.getcwd()
        with suppress(OSError):  # Python passes over what is not there
            found.append((directory, os.stat(directory).st_mtime_ns))
    return tuple(found)


def target_of(kind: Kind, name: str) -> str:
    """Return ``module:attribute`` of a piece that is not built in.

    Raises ValueError for a malformed or unknown name, and for one that two packages register.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        if all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
            return name
        raise ValueError(f"{name!r}: expected `module:name`, e.g. my_pieces:mine")
    points = registered(kind).get(name, [])
    if len(points) == 1:
        return points[0].value.partition("[")[0].replace(" ", "")
    if not points:
        raise ValueError(
            f"{name!r}: expected a built-in {kind.title}, `module:name` from `code_paths`, or a name that an "
            f"installed package registers as entry point of {kind.group}"
        )
    packages = " and ".join(_package(point) for point in points)
    raise ValueError(
        f"{name!r} is registered by {packages} in {kind.group}; name one by its `module:name` "
        f"({', '.join(point.value for point in points)})"
    )


def package_of(kind: Kind, name: str) -> str | None:
    """Return name and version of the package that registers ``name``; None for ``module:name``."""
    points = [] if ":" in name else registered(kind).get(name, [])
    return _package(points[0]) if points else None


def shadowing(kind: Kind, builtin: Collection[str]) -> Iterator[str]:
    """Yield a message for every package that registers the name of a built-in piece."""
    for name, points in registered(kind).items():
        for point in points:
            if name in builtin:
                yield (
                    f"{_package(point)} registers the {kind.title} {name!r}, which is a name of grpo-dist "
                    f"and means the built-in one here; name the package's `{point.value}`"
                )


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def _checked(kind: Kind, name: str) -> str:
    try:
        target_of(kind, name)
    except ValueError as error:
        expected = "`module:name` from `code_paths`"
        if ":" not in name:
            expected += f", or a name that one installed package registers in {kind.group}"
        raise PydanticCustomError("own_name", "Input should be {expected}", {"expected": expected}) from error
    return name


# Types of configuration keys, each with a Literal of the built-in names.
OwnAdvantage = Annotated[str, AfterValidator(partial(_checked, ADVANTAGE))]
OwnLoss = Annotated[str, AfterValidator(partial(_checked, LOSS))]
OwnKL = Annotated[str, AfterValidator(partial(_checked, KL))]
OwnAggregation = Annotated[str, AfterValidator(partial(_checked, AGGREGATION))]
OwnMetric = Annotated[str, AfterValidator(partial(_checked, METRIC))]
OwnSink = Annotated[str, AfterValidator(partial(_checked, SINK))]
OwnOrder = Annotated[str, AfterValidator(partial(_checked, ORDER))]
OwnRollout = Annotated[str, AfterValidator(partial(_checked, ROLLOUT))]
