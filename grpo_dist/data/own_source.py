"""A data source of a user's own: a function that yields rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_dist.config import DataSourceConfig
from grpo_dist.plugins.calling import call, check_signature
from grpo_dist.plugins.inputs import SourceInputs
from grpo_dist.plugins.kinds import SOURCE
from grpo_dist.plugins.loading import load


def own_rows(source: DataSourceConfig, code_paths: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield location and columns of every row. Raises ValueError for a function that cannot be used, that
    fails, or that yields something else.
    """
    name = str(source.path)
    function = load(SOURCE, name, code_paths)
    check_signature(function, SourceInputs, source.kwargs, f"{SOURCE.title} {name}", "data.train.N.kwargs")
    number = 0
    try:
        for number, row in enumerate(
            call(function, SourceInputs(source.split, source.max_rows), source.kwargs), 1
        ):
            if not isinstance(row, Mapping) or not all(isinstance(column, str) for column in row):
                raise TypeError(f"{row!r} is no mapping of column names to values")
            yield f"{name}/{source.split}:{number}", row
    except Exception as error:  # a user's function may raise anything
        raise ValueError(
            f"{SOURCE.title} {name} failed after row {number} ({type(error).__name__}: {error}); expected it "
            "to yield a mapping of column names to values for each row"
        ) from error
