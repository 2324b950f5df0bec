"""The uploaded files of a Ray job: this code, the resolved configuration and user code."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import NoReturn

from grpo_dist.config import Config
from grpo_dist.config.differences import listed
from grpo_dist.config.files import to_yaml
from grpo_dist.errors import UserError, expanded, searched
from grpo_dist.runtime import __version__

CONFIG = "config.yaml"
# Names of files and directories that often hold keys; also listed in `launch/ray_runtime_env.yaml`.
KEYS = (
    "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key", "*.ppk", "*.p12", "*.pfx", "*.jks",
    "*.keystore", "*.kdbx", "*.gpg", "*.asc", ".env", ".env.*", "*.env", ".netrc", "_netrc", ".pgpass",
    ".git-credentials", ".npmrc", ".pypirc", ".htpasswd", "credentials", "credentials.json",
    "credentials.y*ml", "credentials.toml", "credentials.ini", "credentials.csv", "credentials.txt",
    "secrets.json", "secrets.y*ml", "secrets.toml", "secrets.txt", "client_secret*.json",
    "service[-_]account*.json", "kubeconfig", "kubeconfig.y*ml", "*.kubeconfig", "auth_token", "token.txt",
    ".ssh", ".aws", ".azure", ".gcloud", ".kube", ".gnupg", ".docker",
)  # fmt: skip
_PRIVATE_KEY = b"-----BEGIN "
LIMIT_MIB = 100  # Ray's default limit for a working directory
_PACKAGES = ("grpo_dist", "actors")
# Lets engine processes find the vLLM plug-in if grpo-dist is not installed.
_METADATA = {
    "METADATA": f"Metadata-Version: 2.1\nName: grpo-dist\nVersion: {__version__}\n",
    "entry_points.txt": "[vllm.general_plugins]\ngrpo_dist = actors.transfer.vllm_plugin:register\n",
}


@dataclass(frozen=True)
class Carried:
    """A directory and its files, in bytes by path.

    ``left_out``: reason per user file or directory that must not travel: it looks like a key, is a link or
        not a file, or holds the runs.
    ``excluded``: other user files and directories that do not travel, by the pattern that they match.
    """

    directory: Path
    files: dict[str, int]
    left_out: dict[str, str] = field(default_factory=dict)
    excluded: dict[str, set[str]] = field(default_factory=dict)

    def notices(self) -> list[str]:
        """Return lines such as ``left out: rewards/id_rsa (its name looks like a key)``."""
        lines = sorted(self.left_out.items())
        excluded = sorted(self.excluded.items())
        lines += [(listed(sorted(names)), f"excluded by {pattern}") for pattern, names in excluded]
        return [f"left out: {json.dumps(names)[1:-1]} ({why})" for names, why in lines]

    def summary(self) -> str:
        """Return a line such as ``config.yaml, grpo_dist/ (130 files), actors/ (26 files): 0.9 MiB``."""
        tops: dict[str, int] = {}
        for name in self.files:
            top = name.split("/")[0] + ("/" if "/" in name else "")
            tops[top] = tops.get(top, 0) + 1
        entries = (f"{top} ({count} files)" if top.endswith("/") else top for top, count in tops.items())
        return f"{', '.join(entries)}: {sum(self.files.values()) / 2**20:.1f} MiB"


def resolved(config: Config, *, grows: bool) -> str:
    """Return the configuration as YAML with all defaults, set to join the job's cluster.

    ``grows``: that cluster may grow, so keep `cluster.grows_to`.
    """
    plain = config.model_dump(mode="json")
    plain["cluster"] |= {"address": None} | ({} if grows else {"grows_to": None})
    return to_yaml(plain)


def gather(config: Config, into: Path, excludes: Sequence[str]) -> Carried:
    """Copy all files into the empty directory ``into``.

    ``excludes``: name patterns to leave out, as in `launch/ray_runtime_env.yaml`.

    Raises UserError for code that cannot be uploaded, or too large files.
    """
    left_out: dict[str, str] = {}
    excluded: dict[str, set[str]] = {}
    files: dict[str, Path] = {}  # by path in the job's directory
    output = expanded(config.output_dir).resolve()
    for directory in map(Path, _code_directories(config.code_paths)):
        user_files = _files(directory, excludes, left_out, excluded, output=output)
        files |= {os.path.normpath(file): file for file in user_files}
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        root = Path(spec.origin).parent
        files = {name: file for name, file in files.items() if not name.startswith(f"{package}/")}
        package_files = _files(root, ("__pycache__",), {}, {})
        files |= {f"{package}/{file.relative_to(root)}": file for file in package_files}
    texts = {f"grpo_dist-{__version__}.dist-info/{name}": text for name, text in _METADATA.items()}
    texts[CONFIG] = resolved(config, grows=True)
    sizes = {name: file.stat().st_size for name, file in files.items()}
    sizes |= {name: len(text.encode()) for name, text in texts.items()}
    _check_size(sizes)
    for name in sizes:
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        if name in texts:
            (into / name).write_text(texts[name], encoding="utf-8")
        else:
            shutil.copy2(files[name], into / name)
    return Carried(into, dict(sorted(sizes.items())), left_out, excluded)


def _code_directories(code_paths: Sequence[str]) -> Iterator[str]:
    """Yield the distinct directories of user code, relative to this directory."""
    directories: set[str] = set()
    for path_text in code_paths:
        path = expanded(path_text)
        if path.is_absolute():
            continue  # a path on the cluster
        relative = os.path.relpath(path)
        if relative.startswith("..") or not path.resolve().is_relative_to(Path.cwd().resolve()):
            raise UserError(
                f"`code_paths`: {path_text} is outside of the current directory, and only that travels "
                "with the job; submit from a parent directory, or give an absolute path on the cluster"
            )
        if not path.is_dir():
            raise UserError(f"`code_paths`: {path_text}: no such directory{searched(path_text)}")
        if relative not in directories:
            directories.add(relative)
            yield relative


def _files(
    source: Path,
    excludes: Sequence[str],
    left_out: dict[str, str],
    excluded: dict[str, set[str]],
    *,
    output: Path | None = None,
) -> Iterator[Path]:
    """Yield a directory's files to upload; add the others, and the directory ``output``, to ``left_out`` and
    ``excluded``.
    """
    top = source.resolve()
    for directory, folders, names in os.walk(source, onerror=_unreadable, followlinks=True):
        at_top = Path(directory).resolve() == Path.cwd()
        patterns = [p for p in excludes if at_top or not p.startswith("/")]
        fit = set()
        for name in (*folders, *names):
            path = Path(directory) / name
            both = {name, path.resolve().name}  # a link is also excluded by its target's name
            if why := _unfit(path, top):
                left_out[os.path.relpath(path)] = why
            elif path.resolve() == output:
                left_out[os.path.relpath(path)] = "`output_dir`"
            elif matched := [p for p in patterns if any(fnmatch(each, p.strip("/")) for each in both)]:
                excluded.setdefault(matched[0], set()).add(os.path.relpath(path))
            else:
                fit.add(name)
        folders[:] = fit.intersection(folders)
        yield from (Path(directory) / name for name in names if name in fit)


def _unreadable(error: OSError) -> NoReturn:
    raise UserError(
        f"`code_paths`: {error.filename} cannot be read ({error.strerror}), so its files could not travel; "
        "make it readable, or name directories without it"
    ) from error


def _unfit(path: Path, top: Path) -> str:
    """Return why ``path`` in the directory ``top`` must not be uploaded, or ""."""
    real = path.resolve()
    if path.is_symlink():
        if not path.exists():
            return "a link that leads nowhere"
        if not real.is_relative_to(top):
            return "a link that leads out of its directory"
        if path.parent.resolve().is_relative_to(real):
            return "a link to a directory that it is in"
    names = {path.name.lower(), *(part.lower() for part in real.relative_to(top).parts)}
    if any(fnmatch(name, pattern) for name in names for pattern in KEYS):
        return "its name looks like a key"
    kind = os.stat(path).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        return "neither a file nor a directory"
    return "a private key" if stat.S_ISREG(kind) and _is_private_key(path) else ""


def _is_private_key(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            line = file.readline(200)
    except OSError:  # copying reports the error
        return False
    return line.startswith(_PRIVATE_KEY) and b"PRIVATE KEY" in line


def _check_size(sizes: Mapping[str, int]) -> None:
    """Raise UserError if the files, in bytes by path, exceed a cluster's limit."""
    mib = sum(sizes.values()) / 2**20
    if mib > LIMIT_MIB:
        largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
        largest_files = ", ".join(f"{name} ({size / 2**20:.1f} MiB)" for name, size in largest)
        raise UserError(
            f"`code_paths`: {mib:.0f} MiB would travel with the job, and a Ray cluster accepts "
            f"{LIMIT_MIB}; name directories with only that code. Largest files: {largest_files}"
        )
