"""The files behind own pieces: what a run's identity and a submitted job need of them."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from grpo_dist.errors import expanded
from grpo_dist.plugins.names import OwnPiece, package_of, target_of


def code_files(code_paths: Iterable[str], modules: Iterable[str]) -> Iterator[Path]:
    """Yield the source files of ``modules`` in the directories ``code_paths``; all files of a package."""
    tops = sorted({module.split(".")[0] for module in modules})
    for directory in code_paths:
        for top in tops:
            yield from _module_files(expanded(directory), top)


def code_digest(pieces: Iterable[OwnPiece], code_paths: Sequence[str]) -> dict[str, str]:
    """Return a hash of every file of own code by name, and the version of packages that register a piece.

    Of a module in ``code_paths`` these are its files and those of modules there that it imports, by their
    path below that directory, so that a moved directory is no change. A module on PYTHONPATH is read in the
    same way; of an installed package these are its own files.
    """
    found: dict[str, str] = {}
    modules: set[str] = set()
    for piece in pieces:
        if (package := package_of(piece.kind, piece.name)) is not None:
            found[f"entry point {piece.name} of {piece.kind.group}"] = package
        else:
            modules.add(target_of(piece.kind, piece.name).split(":")[0].split(".")[0])
    files = _with_imports(modules, [expanded(path) for path in code_paths])
    for module in sorted(modules):
        if not any(label.split("/")[0] in (module, f"{module}.py") for label in files):
            files |= _elsewhere(module)
    return found | {label: hashlib.sha256(file.read_bytes()).hexdigest() for label, file in files.items()}


def changed_code(was: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return what differs between two results of `code_digest`, e.g. ["mine.py (changed)"]."""
    found = []
    for label in sorted({*was, *now}):
        if was.get(label) != now.get(label):
            how = "new" if label not in was else "gone" if label not in now else "changed"
            found.append(f"{label} ({how})")
    return found


def _with_imports(modules: Collection[str], directories: Sequence[Path]) -> dict[str, Path]:
    """Return the files of ``modules`` and of what they import, all in ``directories``, by relative path."""
    found: dict[str, Path] = {}
    seen = {"grpo_dist", "actors"}  # a directory may hold them, too: they have a version of their own
    left = sorted(modules)
    while left:
        top = left.pop()
        seen.add(top)
        # The first directory that has the module is the one that is imported.
        files, root = next(
            ((own, path) for path in directories if (own := list(_module_files(path, top)))), ([], None)
        )
        for file in files:
            assert root is not None
            found[file.relative_to(root).as_posix()] = file
            left += [name for name in _imports(file) if name not in seen and name not in left]
    return found


def _module_files(directory: Path, top: str) -> Iterator[Path]:
    single = directory / f"{top}.py"
    yield from (file for file in [single] if file.is_file())
    yield from sorted((directory / top).rglob("*.py"))


def _imports(file: Path) -> list[str]:
    """Return the top-level modules that a file imports by absolute names; [] where it is no valid Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # importing it says so
        return []
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    absolute = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level and n.module]
    return sorted({name.split(".")[0] for name in (*names, *(str(node.module) for node in absolute))})


def _elsewhere(module: str) -> dict[str, Path]:
    """Return the files of a module that is installed, or on PYTHONPATH with those that it imports there."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return {}
    file = Path(spec.origin)
    root = file.parents[1] if spec.submodule_search_locations else file.parent
    if root.name in ("site-packages", "dist-packages"):
        own = list(_module_files(root, module)) or [file]
        files = {path.relative_to(root).as_posix(): path for path in own}
    else:
        files = _with_imports([module], [root]) or {file.name: file}
    return {f"module {label}": path for label, path in files.items()}
