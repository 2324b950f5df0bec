"""Reads the rows of a data source: files and directories of files, data sets of the hub or of `save_to_disk`,
generated problems, a user's function, an environment.

`files.file_rows` reads all files, also in directories and from the hub; `datasets` only assigns files to
splits. Its readers decode text in columns of mixed types (`007` becomes 7), and take about 400 microseconds
per row.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlparse
from urllib.request import getproxies

from grpo_dist.config import DataSourceConfig
from grpo_dist.config.data import DATA_FILES, data_ending
from grpo_dist.data.files import Located, count_file_rows, file_rows, table_rows
from grpo_dist.data.made_problems import SPLITS, problems
from grpo_dist.data.made_problems import Split as DemoSplit
from grpo_dist.environments.registry import load_environment
from grpo_dist.errors import expanded, searched
from grpo_dist.runtime.files import write_text
from grpo_dist.runtime.model_files import cache_dir

# Yields location and record of every row of a source without a `path`, or whose `path` is a user's function.
EnvironmentProblems = Callable[[DataSourceConfig], Iterator[Located]]

T = TypeVar("T")

_BATCH = 1000  # rows that `datasets` gives at once
_HUB_FILE = re.compile(r"hf://datasets/([^@]+)@([^/]+)/(.+)")  # repository, revision, file
_REASON = 400  # characters of a reason in a message
_CONNECT_S = 5.0
_EXPECTED = f"a data file ({' '.join(DATA_FILES)}), a data set directory, or a hub id such as openai/gsm8k"


@dataclass(frozen=True, slots=True)
class Split:
    """The rows of a split; each call of ``rows`` reads them from the start."""

    rows: Callable[[], Iterator[Located]]
    count: Callable[[], int]


def records(
    source: DataSourceConfig, own: EnvironmentProblems | None = None, columns: Sequence[str] = ()
) -> Iterator[Located]:
    """Yield location and columns of every row of ``source``, whatever its `max_rows`.

    Args:
        own: reads a source that is a user's function, or whose environment brings the problems.
        columns: the needed columns; other columns of a table may be skipped. (): all.

    Raises ValueError for a missing source, split or part of a split, and for a malformed row.
    """
    if source.path is None or source.is_own:
        if own is None:
            raise ValueError(
                f"a data source with path = {source.path}: environments and user code are not run here; name "
                "a file"
            )
        return own(source)
    if source.is_generated_by_reasoning_gym:
        # The package is optional; the environment's adapter imports it.
        adapter = load_environment(source.path)
        rows = adapter.problems(source.split, source.max_rows, **source.kwargs)
        return ((f"{source.path}/{source.split}:{i}", row) for i, row in enumerate(rows, 1))
    if source.path.startswith("demo:"):
        name = source.path.removeprefix("demo:")
        return _part(source, {split: _demo_split(name, split) for split in SPLITS})
    path = expanded(source.path)
    if os.path.isfile(path):  # False for a name that is too long
        if not data_ending(path):
            raise ValueError(f"{path}: unknown file type {path.suffix!r}; expected {', '.join(DATA_FILES)}")
        _check_no_subset(source, "a single file")
        return _part(source, _files_split([str(path)], columns, source))
    if os.path.isfile(path / "dataset_info.json") or os.path.isfile(path / "dataset_dict.json"):
        _check_no_subset(source, "a saved data set")
        return _saved(source, path, columns)
    if not os.path.isdir(path) and not _is_hub_id(source.path, path):
        raise ValueError(f"{source.path}: no such file or directory{searched(path)}; expected {_EXPECTED}")
    return _listed(source, path, columns)


def source_files(source: DataSourceConfig) -> list[Path]:
    """Return the local files of ``source``; hub files are downloaded. []: its rows come from elsewhere, or
    `records` does not read these files. Raises ValueError as `records`.
    """
    if source.path is None or source.is_own or source.is_generated_by_reasoning_gym:
        return []
    path = expanded(source.path)
    if os.path.isfile(path):
        return [path]
    if source.path.startswith("demo:") or any(
        os.path.isfile(path / name) for name in ("dataset_info.json", "dataset_dict.json")
    ):
        return []
    if not os.path.isdir(path) and not _is_hub_id(source.path, path):
        return []
    splits, _ = _split_files(source, path)
    files = [file for split in _splits(source.split) for file in splits.get(split, ())]
    if not all(map(data_ending, files)):
        return []
    return [_local(file, source) for file in files]


def _is_hub_id(name: str, path: Path) -> bool:
    return not (path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or data_ending(path))


def _splits(spec: str) -> list[str]:
    """Return the names of the splits in ``spec``: train[:5%]+test -> train, test"""
    return [re.split(r"[\[(]", part)[0].strip() for part in spec.split("+")]


def _listed(source: DataSourceConfig, path: Path, columns: Sequence[str]) -> Iterator[Located]:
    """Yield the rows of a directory or hub data set, whose files `datasets` assigns to splits."""
    import datasets  # heavy: files and generated problems do not need it

    is_local = os.path.isdir(path)
    name = str(path) if is_local else str(source.path)
    files, kind = _split_files(source, path)
    unread = [file for listed in files.values() for file in listed if not data_ending(file)]
    if files and not unread:
        return _part(
            source, {split: _files_split(listed, columns, source) for split, listed in files.items()}
        )
    if unread and kind in ("csv", "json", "parquet", "arrow"):
        raise ValueError(f"{source.path}: {unread[0]} is packed in a form that is not read; unpack it")
    # File types that only `datasets` reads; without a network, data sets that it prepared earlier.
    loaded = _guard(
        lambda: datasets.load_dataset(name, source.subset, split=source.split, streaming=is_local), source
    )
    return _table(loaded, name, columns, source).rows()


def _split_files(source: DataSourceConfig, path: Path) -> tuple[dict[str, list[str]], str]:
    """Return `_list_files` of a directory or hub data set. Raises ValueError as `records`."""
    import datasets  # heavy, as above
    from huggingface_hub import constants

    datasets.disable_progress_bars()
    is_local = os.path.isdir(path)
    if not is_local and find_hub_failure():
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True  # else each call tries for 25 s
    name = str(path) if is_local else str(source.path)
    listed = _list_files if is_local else _hub_files
    return _guard(lambda: listed(name, source.subset, keep=not is_local), source)


@lru_cache(maxsize=64)
def _hub_files(name: str, subset: str | None, *, keep: bool) -> tuple[dict[str, list[str]], str]:
    """Return `_list_files`; a process asks the hub once per data set."""
    return _list_files(name, subset, keep=keep)


def _list_files(name: str, subset: str | None, *, keep: bool) -> tuple[dict[str, list[str]], str]:
    """Return the files of each split as `datasets` finds them, and their type. {}: rows without files.

    With ``keep`` the list is cached for a later start without a network.
    """
    from datasets import load_dataset_builder  # heavy, as above

    digest = hashlib.sha256(json.dumps([name, subset]).encode()).hexdigest()[:16]
    cache_file = cache_dir() / f"hub-{digest}.json"
    try:
        builder = load_dataset_builder(name, subset)
    except Exception:
        if not keep or not cache_file.is_file():
            raise
        builder = None
    listed = builder.config.data_files if builder is not None else None
    if listed and getattr(builder.config, "field", None) is None:
        files = {str(split): list(map(str, names)) for split, names in listed.items()}
        if keep:
            write_text(cache_file, json.dumps(files))
        return files, type(builder).__module__.rpartition(".")[2]
    return (json.loads(cache_file.read_text()) if keep and cache_file.is_file() else {}), ""


@lru_cache
def find_hub_failure() -> str:
    """Return why the hub cannot be reached; "": it can, a proxy decides, or HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants  # heavy, as above

    endpoint = urlparse(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or endpoint.scheme in getproxies() or endpoint.hostname is None:
        return ""
    try:
        port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
        socket.create_connection((endpoint.hostname, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return f"{constants.ENDPOINT} cannot be reached: {error}"
    return ""


def _saved(source: DataSourceConfig, path: Path, columns: Sequence[str]) -> Iterator[Located]:
    """Yield the rows of a data set of `save_to_disk`."""
    import datasets  # heavy, as above

    loaded = _guard(lambda: datasets.load_from_disk(str(path)), source)
    if not isinstance(loaded, Mapping):
        return _part(source, _table(loaded, str(path), columns, source))
    splits = {split: _table(table, f"{path}/{split}", columns, source) for split, table in loaded.items()}
    return _part(source, splits)


def _table(table: Any, name: str, columns: Sequence[str], source: DataSourceConfig) -> Split:
    """Return a table of `datasets` as a split."""
    if needed := [name for name in columns if name in (table.column_names or ())]:
        table = table.select_columns(needed)

    def rows() -> Iterator[Located]:
        parts = iter(table.with_format("arrow").iter(_BATCH))
        # Reading is what detects a damaged file.
        yield from table_rows(iter(lambda: _guard(lambda: next(parts, None), source), None), name)

    return Split(rows, lambda: len(table))


def _files_split(files: Sequence[str], columns: Sequence[str], source: DataSourceConfig) -> Split:
    """Return the rows of local files, or of files of the hub, as a split."""
    names = [re.sub(r"^hf://datasets/([^@]*)@[^/]*", r"\1", file) for file in files]

    def paths() -> Iterator[tuple[Path, str]]:
        for file, name in zip(files, names, strict=True):
            yield _local(file, source), name

    def rows() -> Iterator[Located]:
        for path, name in paths():
            yield from file_rows(path, name, columns)

    return Split(rows, lambda: sum(count_file_rows(path, name) for path, name in paths()))


def _local(file: str, source: DataSourceConfig) -> Path:
    """Return the local copy of a file of a split."""
    return _guard(partial(_downloaded, file), source) if "://" in file else Path(file)


def _downloaded(url: str) -> Path:
    """Download a file from the hub or another server, and return its local path."""
    if (place := _HUB_FILE.fullmatch(url)) is None:
        from datasets import DownloadManager  # heavy, as above

        return Path(DownloadManager().download(url))
    from huggingface_hub import hf_hub_download  # heavy, as above

    repository, revision, file = place.groups()
    # A file in the cache needs no network: the revision is a commit.
    return Path(hf_hub_download(repository, file, repo_type="dataset", revision=unquote(revision)))


def _demo_split(name: str, split: DemoSplit) -> Split:
    def rows() -> Iterator[Located]:
        yield from ((f"{name}/{split}:{i}", row) for i, row in enumerate(problems(name, split), 1))

    return Split(rows, lambda: len(problems(name, split)))


def _part(source: DataSourceConfig, splits: Mapping[str, Split] | Split) -> Iterator[Located]:
    """Return the rows that `split` names, in the notation of `datasets`: train, train[:5%], train[10:]+test.

    ``splits``: the splits of a data set, or a data set without splits, which takes any name.
    """
    spec = source.split
    names = _splits(spec)
    if isinstance(splits, Split):
        if len(set(names)) > 1:
            raise ValueError(
                f"{source.path}: `split` = {spec}, but it has no splits; expected a part such as "
                "train[:100]+train[-100:], or several files as separate sources"
            )
        splits = {names[0]: splits}
    for name in names:
        if name not in splits:
            raise ValueError(f"{source.path}: no split `{name}`; it has {', '.join(splits)}")
    if spec in splits:
        return splits[spec].rows()
    from datasets import ReadInstruction  # heavy, as above

    lengths = {name: splits[name].count() for name in names}
    try:
        parts = ReadInstruction.from_spec(spec).to_absolute(lengths)
    except ValueError as error:
        raise ValueError(
            f"{source.path}: `split` = {spec} names no part of a split ({error}); expected for example "
            "train[:5%], train[100:200] or train[-500:]+test"
        ) from error
    return chain.from_iterable(islice(splits[part.splitname].rows(), part.from_, part.to) for part in parts)


def _check_no_subset(source: DataSourceConfig, kind: str) -> None:
    if source.subset is not None:
        raise ValueError(
            f"{source.path}: `subset` = {source.subset}, but {kind} has no configurations; remove `subset`, "
            "or name the directory or hub id that has them"
        )


def _guard(load: Callable[[], T], source: DataSourceConfig) -> T:
    try:
        return load()
    except Exception as error:
        reason = " ".join(str(error).split())[:_REASON] or type(error).__name__
        if "OfflineModeIsEnabled" in reason and (failure := find_hub_failure()):
            reason = f"{failure}, and the data set is not in the cache"
        raise ValueError(
            f"{source.path}: the data set cannot be loaded ({reason}); check the path or hub id, `split` = "
            f"{source.split}, `subset` = {source.subset} and the network"
        ) from error
