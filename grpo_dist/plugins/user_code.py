"""Finds components by kind and name: a built-in one, ``my_module:name`` from `code_paths`, or an entry point
that an installed package registers in the kind's group. Resolves names without importing anything, imports,
calls functions with the inputs that they name, and lists files for a run's identity.

A built-in name always means the built-in component: a package that registers the same name does not replace
it. The module of a name is searched in `code_paths` first, also in a reward's process. Modules that it
imports later, inside functions, are found in `code_paths` after installed packages. Imports no torch: the
configuration reads this module.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from threading import RLock, Thread
from types import ModuleType
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from grpo_dist.errors import UserError, expanded, raised

_LOCK = RLock()
_HUNG_S = 60.0
_hung_at = [0.0]  # when the import that holds the lock counts as hung, by time.monotonic()
_USER_FILES: set[str] = set()  # files of top-level modules that were imported from code paths
T = TypeVar("T")

_PLAIN = {"int": int, "float": float, "str": str, "bool": bool}
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of component.

    Attributes:
        title: its name in messages.
        key: configuration key that names a component of this kind.
        group: entry point group in which installed packages register components of this kind.
    """

    title: str
    key: str
    group: str


ADVANTAGE = Kind("advantage estimator", "algorithm.advantage", "grpo_dist.advantages")
LOSS = Kind("policy loss", "algorithm.loss", "grpo_dist.losses")
KL = Kind("KL estimator", "algorithm.kl.estimator", "grpo_dist.kl_estimators")
AGGREGATION = Kind("aggregation", "algorithm.aggregation", "grpo_dist.aggregations")
METRIC = Kind("metric", "tracking.metrics", "grpo_dist.metrics")
SINK = Kind("sink", "tracking.sinks", "grpo_dist.sinks")
SOURCE = Kind("data source", "data.train.N.path", "grpo_dist.data_sources")
ORDER = Kind("prompt order", "data.order", "grpo_dist.orders")
ROLLOUT = Kind("rollout function", "rollout.function", "grpo_dist.rollouts")
ENVIRONMENT = Kind("environment", "data.environment", "grpo_dist.environments")
REWARD = Kind("reward function", "rewards.functions.N.function", "grpo_dist.rewards")


@dataclass(frozen=True, slots=True)
class UserComponent:
    """A component that is not built in.

    Attributes:
        name: as in the configuration: ``module:name`` or the name of an entry point.
        key: configuration key that names it, for messages.
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
    by_name: dict[str, list[EntryPoint]] = {}
    for point in _installed(kind.group, _search_path()):
        same = by_name.setdefault(point.name, [])
        if point.value not in {other.value for other in same}:
            same.append(point)
    return by_name


@lru_cache(maxsize=64)
def _installed(group: str, path: tuple[tuple[str, int], ...]) -> EntryPoints:
    """Return the entry points of a group in all packages on ``path``. Reading them takes 20 ms, and a
    configuration asks about ten times.
    """
    return entry_points(group=group)


def _search_path() -> tuple[tuple[str, int], ...]:
    """Return the directories of `sys.path`, each with its modification time; an installation changes it."""
    paths = []
    for name in sys.path:
        directory = name or os.getcwd()
        with suppress(OSError):  # Python skips missing directories
            paths.append((directory, os.stat(directory).st_mtime_ns))
    return tuple(paths)


def resolve_target(kind: Kind, name: str) -> str:
    """Return ``module:attribute`` of a component that is not built in.

    Raises ValueError for a malformed or unknown name, and for one that two packages register.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        if all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
            return name
        raise ValueError(f"{name!r}: expected `module:name`, e.g. my_components:mine")
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


def find_package(kind: Kind, name: str) -> str | None:
    """Return the name and version of the package that registers ``name``; None for ``module:name``."""
    points = [] if ":" in name else registered(kind).get(name, [])
    return _package(points[0]) if points else None


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def _checked(kind: Kind, name: str) -> str:
    try:
        resolve_target(kind, name)
    except ValueError as error:
        expected = "`module:name` from `code_paths`"
        if ":" not in name:
            expected += f", or a name that one installed package registers in {kind.group}"
        raise PydanticCustomError(
            "unknown_name", "Input should be {expected}", {"expected": expected}
        ) from error
    return name


# Types of configuration keys, each with a Literal of the built-in names.
AdvantageName = Annotated[str, AfterValidator(partial(_checked, ADVANTAGE))]
LossName = Annotated[str, AfterValidator(partial(_checked, LOSS))]
KLName = Annotated[str, AfterValidator(partial(_checked, KL))]
AggregationName = Annotated[str, AfterValidator(partial(_checked, AGGREGATION))]
MetricName = Annotated[str, AfterValidator(partial(_checked, METRIC))]
SinkName = Annotated[str, AfterValidator(partial(_checked, SINK))]
OrderName = Annotated[str, AfterValidator(partial(_checked, ORDER))]
RolloutName = Annotated[str, AfterValidator(partial(_checked, ROLLOUT))]


def load(kind: Kind, name: str, code_paths: Sequence[str] = ()) -> Any:
    """Return the function or class ``name``; a process imports it once.

    Raises ValueError for an unknown name, or a module that cannot be imported. Runs user code.
    """
    directories = tuple(str(expanded(path).absolute()) for path in code_paths)
    with _import_lock():
        return _load(kind, name, directories)


@contextmanager
def _import_lock() -> Iterator[None]:
    """Import one module at a time, as each changes `sys.path`. An import that takes longer than `_HUNG_S`
    blocks no other.
    """
    acquired = _LOCK.acquire(timeout=max(0.0, _hung_at[0] - time.monotonic()))
    if acquired:
        _hung_at[0] = time.monotonic() + _HUNG_S
    try:
        yield
    finally:
        if acquired:
            _LOCK.release()


@lru_cache(maxsize=128)
def _load(kind: Kind, name: str, directories: tuple[str, ...]) -> Any:
    module_name, _, attribute = resolve_target(kind, name).partition(":")
    try:
        module = _import_module(module_name, directories)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(
            f"{kind.title} {name}: module `{module_name}` cannot be imported ({raised(error)}); expected "
            f"`module:name` in a directory of `code_paths` ({', '.join(directories) or 'empty'}) or an "
            "installed package"
        ) from error
    component: Any = module
    for part in attribute.split("."):
        component = getattr(component, part, None)
    if not callable(component):
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
        what = f"`{attribute}` is no function or class" if component is not None else f"has no `{attribute}`"
        raise ValueError(f"{kind.title} {name}: module `{module_name}` {what}{hint}")
    return component


def _import_module(name: str, directories: tuple[str, ...]) -> ModuleType:
    top = name.partition(".")[0]
    spec = PathFinder.find_spec(top, list(directories)) if directories else None
    if spec is None:
        return importlib.import_module(name)
    file = spec.origin or ""
    module = sys.modules.get(top)
    before = getattr(module, "__file__", None) or ""
    if module is not None and Path(before).resolve() != Path(file).resolve():
        if before not in _USER_FILES:
            raise ImportError(f"{file} has the name of a module in use, {before}; rename yours")
        for loaded in [m for m in sys.modules if m == top or m.startswith(f"{top}.")]:
            del sys.modules[loaded]
    _USER_FILES.add(file)
    importlib.invalidate_caches()
    sys.path[:0] = directories
    try:
        return importlib.import_module(name)
    finally:
        for directory in directories:  # the first entry; another import may have changed the list
            with suppress(ValueError):
                sys.path.remove(directory)
        sys.path += [directory for directory in directories if directory not in sys.path]


class UserCodeFailed(UserError):
    """User code raised an exception, which is the cause of this one."""


@contextmanager
def failures_named(kind: Kind, name: str) -> Iterator[None]:
    """Turn an exception of the block, which only calls user code, into UserCodeFailed: it names the
    component, the exception, and its file and line.
    """
    try:
        yield
    except Exception as error:  # user code may raise anything
        raise UserCodeFailed(f"{kind.title} {name} failed: {raised(error)}; correct it") from error


def call(function: Callable[..., Any], inputs: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call ``function`` with the fields of the dataclass ``inputs`` that are its parameters."""
    accepted, takes_all = _parameters(function)
    arguments = {f.name: getattr(inputs, f.name) for f in fields(inputs) if takes_all or f.name in accepted}
    return function(**arguments, **kwargs)


def start_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Call ``function`` in a daemon thread, which may be abandoned, and return a future of its result."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:  # also sys.exit of user code: it is reported, not obeyed
            done.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return done


def call_in_time(
    function: Callable[[], T], limit_s: float, what: str, remedy: str = "correct it, or raise the deadline"
) -> T:
    """Call ``function`` in a separate thread, and return its result.

    Raises what it raises, and TimeoutError after ``limit_s`` seconds; its thread is then abandoned.
    """
    done = start_thread(function, what)
    try:
        return done.result(limit_s)
    except TimeoutError as error:
        if done.done():  # raised by the function
            raise
        raise TimeoutError(
            f"{what} did not return within `cluster.timeouts.user_code_s` = {limit_s:g} s; {remedy}"
        ) from error


def check_signature(
    function: Callable[..., Any], inputs: type[Any], kwargs: Mapping[str, Any], what: str, where: str
) -> None:
    """Raise ValueError where ``function`` cannot be called with ``inputs`` and ``kwargs``.

    Args:
        inputs: dataclass with the inputs of its kind.
        what: name of the component, for messages.
        where: configuration key of ``kwargs``, for messages.
    """
    accepted, takes_all = _parameters(function)
    offered = [f.name for f in fields(inputs)]
    for name, parameter in accepted.items():
        if parameter.kind not in _BY_NAME:
            raise ValueError(f"{what}: argument `{name}` is positional only; expected one with a name")
        if name not in offered and name not in kwargs and parameter.default is inspect.Parameter.empty:
            raise ValueError(
                f"{what} needs `{name}`, which is no input of its kind ({', '.join(offered)}) and not in "
                f"`{where}`; set `{where}.{name}`, or give it a default"
            )
    unknown = [name for name in accepted if name not in offered]
    for name, value in kwargs.items():
        if name in offered:
            raise ValueError(f"`{where}.{name}`: the run gives {what} this input; remove it")
        if name not in unknown and not takes_all:
            raise ValueError(
                f"`{where}.{name}`: {what} has no such argument; it takes {', '.join(unknown) or 'none'}"
            )
        if name in accepted and (expected := _misfit(accepted[name], value)):
            # Not the value, which may be a secret.
            kind_of_value = type(value).__name__
            raise ValueError(f"`{where}.{name}`: {what} expects {expected}, and {kind_of_value} is given")


def takes(function: Callable[..., Any], argument: str) -> bool:
    """Return whether a user's function gets ``argument``."""
    accepted, takes_all = _parameters(function)
    return takes_all or argument in accepted


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the named parameters, and whether there is a ``**kwargs``."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: p for name, p in parameters.items() if p.kind not in several}, takes_all


def _misfit(parameter: inspect.Parameter, value: Any) -> str | None:
    """Return the name of the type that ``value`` should have, by the annotation or else the default; None
    where it fits, or the type is none of int, float, str and bool.
    """
    annotation = parameter.annotation
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if annotation is inspect.Parameter.empty:
        name = type(parameter.default).__name__
        name = "float" if name == "int" else name  # a default of 1 may stand for 0.5, too
    if name not in _PLAIN:
        return None
    allowed = (int, float) if name == "float" else _PLAIN[name]
    fits = isinstance(value, allowed) and (name == "bool" or not isinstance(value, bool))
    return None if fits else name


def code_digest(
    components: Iterable[UserComponent], code_paths: Sequence[str], scripts: Mapping[str, Path] | None = None
) -> dict[str, str]:
    """Return a hash of every user file by name, and the versions of packages that register a component.

    For a module in ``code_paths``, this covers its files and the modules there that it imports, by their path
    below that directory, so that a moved directory is no change. A module on PYTHONPATH is read in the same
    way; of an installed package only its files are hashed.

    ``scripts``: Python files that run as programs, by their paths in the configuration. They count with what
    they import from their directories and ``code_paths``.
    """
    digests: dict[str, str] = {}
    modules: set[str] = set()
    for component in components:
        if (package := find_package(component.kind, component.name)) is not None:
            digests[f"entry point {component.name} of {component.kind.group}"] = package
        else:
            modules.add(resolve_target(component.kind, component.name).split(":")[0].split(".")[0])
    directories = [expanded(path) for path in code_paths]
    files = _find_imports(modules, directories)
    for module in sorted(modules):
        if not any(label.split("/")[0] in (module, f"{module}.py") for label in files):
            files |= _find_installed(module)
    known = [directory.resolve() for directory in directories]
    for name, script in (scripts or {}).items():
        for label, file in _find_imports([script.stem], [script.parent, *directories]).items():
            is_beside = file == script.parent / label and script.parent not in known
            files[f"program {Path(name).parent / label}" if is_beside else label] = file
    return digests | {label: hashlib.sha256(file.read_bytes()).hexdigest() for label, file in files.items()}


def changed_code(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return what differs between two results of `code_digest`, e.g. ["mine.py (changed)"]."""
    changed = []
    for label in sorted({*was, *now}):
        if was.get(label) != now.get(label):
            how = "new" if label not in was else "gone" if label not in now else "changed"
            changed.append(f"{label} ({how})")
    return changed


def _find_imports(modules: Collection[str], directories: Sequence[Path]) -> dict[str, Path]:
    """Return the files of ``modules`` and of their imports, all in ``directories``, by relative path."""
    paths: dict[str, Path] = {}
    seen = {"grpo_dist", "actors"}  # a directory may hold them, too, but their version counts
    left = sorted(modules)
    while left:
        top = left.pop()
        seen.add(top)
        # The first directory that has the module is the one that is imported.
        files, root = next(
            (
                (module_files, path)
                for path in directories
                if (module_files := list(_module_files(path, top)))
            ),
            ([], None),
        )
        for file in files:
            assert root is not None
            paths[file.relative_to(root).as_posix()] = file
            left += [name for name in _imports(file) if name not in seen and name not in left]
    return paths


def _module_files(directory: Path, top: str) -> Iterator[Path]:
    single = directory / f"{top}.py"
    yield from (file for file in [single] if file.is_file())
    yield from sorted((directory / top).rglob("*.py"))


def _imports(file: Path) -> list[str]:
    """Return the top-level modules that a file imports by absolute names; [] for invalid Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # importing it raises the error
        return []
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    absolute = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level and n.module]
    return sorted({name.split(".")[0] for name in (*names, *(str(node.module) for node in absolute))})


def _find_installed(module: str) -> dict[str, Path]:
    """Return the files of an installed module, or of one on PYTHONPATH with its imports there."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return {}
    file = Path(spec.origin)
    root = file.parents[1] if spec.submodule_search_locations else file.parent
    if root.name in ("site-packages", "dist-packages"):
        module_files = list(_module_files(root, module)) or [file]
        files = {path.relative_to(root).as_posix(): path for path in module_files}
    else:
        files = _find_imports([module], [root]) or {file.name: file}
    return {f"module {label}": path for label, path in files.items()}
