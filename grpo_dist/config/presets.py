"""Algorithm presets: their differences from the defaults, and the preset of a configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from grpo_dist.config import AlgorithmConfig, BatchConfig, Config, RewardsConfig
from grpo_dist.config.algorithm import PPOClipLoss
from grpo_dist.config.base import member_called, tagged_unions
from grpo_dist.config.data import NoDynamicSampling
from grpo_dist.config.differences import flat, listed

PRESETS = Path(__file__).resolve().parents[2] / "configs" / "algorithms"
KEY = "algorithm.preset"
_DEFAULTS = {
    "algorithm": AlgorithmConfig().model_dump(mode="json"),
    "batch": BatchConfig().model_dump(mode="json"),
    "dynamic_sampling": NoDynamicSampling().model_dump(mode="json"),
    "rewards": RewardsConfig().model_dump(mode="json"),
}


def names() -> list[str]:
    """Return the names of this project's presets."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


@cache
def _tree(name: str) -> dict[str, Any]:
    """Read a preset of this project; {} for a user's preset."""
    return yaml.safe_load((PRESETS / f"{name}.yaml").read_text()) if name in names() else {}


@cache
def _algorithm(name: str) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(_tree(name)["algorithm"])


def settings(name: str) -> dict[str, Any]:
    """Return the settings of a preset of this project by dotted key; {} for a user's preset."""
    if not _tree(name):
        return {}
    algorithm = _algorithm(name).model_dump(mode="json", exclude_unset=True)
    return {key: value for key, value in flat(_tree(name) | {"algorithm": algorithm}).items() if key != KEY}


@cache
def _elsewhere() -> dict[str, Any]:
    """Return the defaults, by dotted key, of the settings outside `algorithm` that any preset has."""
    defaults = flat(_DEFAULTS)
    keys = {key for name in names() for key in settings(name) if not key.startswith("algorithm.")}
    return {key: defaults[key] for key in sorted(keys)}


def differences(name: str) -> dict[str, Any]:
    """Return the settings of the preset ``name`` that differ from the defaults."""
    algorithm = _algorithm(name).model_dump(mode="json", exclude_defaults=True)
    defaults = flat(_DEFAULTS)
    return {k: v for k, v in flat(_tree(name) | {"algorithm": algorithm}).items() if v != defaults.get(k)}


def changed(name: str, now: Mapping[str, Any]) -> list[str]:
    """Return ``key=value`` of the settings that differ from this project's preset ``name``.

    ``now``: settings by dotted key. Keys of `algorithm`, and keys that any preset sets, have their defaults
    where this preset does not set them; keys missing in ``now`` are skipped. Empty for a user's preset.
    """
    if not settings(name):
        return []
    preset = flat(_tree(name) | {"algorithm": _algorithm(name).model_dump(mode="json")})
    expected = preset | {key: value for key, value in _elsewhere().items() if key not in preset}
    different = [key for key in expected if key != KEY and key in now and now[key] != expected[key]]
    renamed = tuple(f"{section}." for key in different if (section := _tagged(key)) != key)
    if renamed:
        others = [key for key in now if key.startswith(renamed) and key not in expected]
        different += [key for key in others if not _is_default(key, now)]
    return [f"{_tagged(key)}={_word(now[key])}" for key in different]


def _tagged(key: str) -> str:
    """Return the key of a tagged section if ``key`` is its tag: algorithm.loss.name -> algorithm.loss"""
    return key.rpartition(".")[0] if key in _tags() else key


def _is_default(key: str, now: Mapping[str, Any]) -> bool:
    """Return whether a setting of a tagged section has the default of the member that ``now`` names."""
    section, _, name = key.rpartition(".")
    for path, union in tagged_unions(Config):
        if ".".join(path) == section:
            member = member_called(union, str(now[f"{section}.{union[0].tag}"]).lower())
            return member is not None and member.model_fields[name].get_default() == now[key]
    return False


@cache
def _tags() -> frozenset[str]:
    """Return the keys that choose a member of a tagged union."""
    return frozenset(".".join((*path, union[0].tag)) for path, union in tagged_unions(Config))


def label(now: Mapping[str, Any]) -> str | None:
    """Return the preset's name with the changes to it; None for settings (by dotted key) without a preset.

    {"algorithm.preset": "dapo", "algorithm.kl.coef": 0.3, ...} -> "dapo, changed: algorithm.kl.coef=0.3"
    """
    name = now.get(KEY)
    if not isinstance(name, str):
        return None
    different = changed(name, now)
    return f"{name}, changed: {listed(different)}" if different else name


def described(config: Config) -> str:
    """Describe in one line the preset, its settings outside `algorithm`, and the changes to it."""
    name = config.algorithm.preset
    if name is None:
        chosen = sorted(config.algorithm.model_dump(exclude_unset=True))
        more = f" with {listed(chosen)} set in the configuration" if chosen else ""
        return f"algorithm: no preset, the defaults{more}"
    now = flat(config.model_dump(mode="json"))
    others = [f"{_tagged(k)}={_word(v)}" for k, v in settings(name).items()
              if not k.startswith("algorithm.") and now.get(k) == v]  # fmt: skip
    also = f", which also sets {', '.join(others)}" if others else ""
    origin = "" if settings(name) else " (not one of this project's)"
    different = changed(name, now)
    then = f"; changed from it: {listed(different)}" if different else ""
    return f"algorithm: preset {name}{origin}{also}{then}"


def table() -> str:
    """Return a markdown table of the default and of every preset's paper and differences from it."""
    a, loss = AlgorithmConfig(), PPOClipLoss()
    default = (
        f"`advantage` {a.advantage.name}, `advantage.std` group, `loss` {loss.name} with `clip_low` "
        f"{loss.clip_low} and `clip_high` {loss.clip_high}, `aggregation` {a.aggregation.name}, `kl.coef` "
        f"{a.kl.coef:g}; no `dynamic_sampling`"
    )
    rows = [f"| none (the default) | | {default} |"]
    for name in names():
        cells = [
            f"`{_tagged(key).removeprefix('algorithm.')}` {_word(v)}" for key, v in differences(name).items()
        ]
        papers = re.findall(r"arXiv:([\d.]+\d)", (PRESETS / f"{name}.yaml").read_text())
        rows.append(f"| `{name}` | {', '.join(papers)} | {', '.join(cells) or 'nothing'} |")
    return "\n".join(["| preset | arXiv | differences from the default |", "|---|---|---|", *rows])


def _word(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
