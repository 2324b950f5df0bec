"""Algorithm presets: their differences from the defaults, and the preset of a configuration."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from grpo_dist.config import AlgorithmConfig, BatchConfig, Config, DynamicSamplingConfig
from grpo_dist.config.differences import flat, listed

PRESETS = Path(__file__).resolve().parents[2] / "configs" / "algorithms"
KEY = "algorithm.preset"
_DEFAULTS = {
    "algorithm": AlgorithmConfig().model_dump(mode="json"),
    "batch": BatchConfig().model_dump(mode="json"),
    "dynamic_sampling": DynamicSamplingConfig().model_dump(mode="json"),
}
# The meaning of null with the default loss and estimator: a preset with these values does not differ.
_FILLED = {"algorithm.std": "group", "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2}


def names() -> list[str]:
    """Return the names of this project's presets."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


@cache
def settings(name: str) -> dict[str, Any]:
    """Return the settings of a preset of this project by dotted key; {} for a user's preset."""
    file = PRESETS / f"{name}.yaml"
    if not file.is_file():
        return {}
    found = flat(yaml.safe_load(file.read_text()))
    return {key: value for key, value in found.items() if key != KEY}


def differences(name: str) -> dict[str, Any]:
    """Return the settings of the preset ``name`` that differ from the defaults."""
    own, defaults = settings(name), flat(_DEFAULTS)
    filled = _FILLED if own.get("algorithm.policy_loss") == _DEFAULTS["algorithm"]["policy_loss"] else {}
    return {k: v for k, v in own.items() if v not in (defaults.get(k), filled.get(k))}


def described(config: Config) -> str:
    """Describe in one line the preset, its settings outside `algorithm`, and the changes to it."""
    name = config.algorithm.preset
    if name is None:
        own = sorted(config.algorithm.model_dump(exclude_unset=True))
        more = f" with {listed(own)} set in the configuration" if own else ""
        return f"algorithm: no preset, the defaults{more}"
    wanted, now = settings(name), flat(config.model_dump(mode="json"))
    others = [f"{k}={_word(v)}" for k, v in wanted.items() if not k.startswith("algorithm.")]
    also = f", which also sets {', '.join(others)}" if others else ""
    changed = [f"{k}={_word(now[k])}" for k, v in wanted.items() if now.get(k) != v]
    then = f"; changed from it: {listed(changed)}" if changed else ""
    return f"algorithm: preset {name}{also}{then}"


def table() -> str:
    """Return a markdown table of the default and of every preset's differences from it."""
    a = AlgorithmConfig()
    default = (
        f"`advantage` {a.advantage}, `std` group, `policy_loss` {a.policy_loss} with `clip_low` and "
        f"`clip_high` 0.2, `aggregation` {a.aggregation}, `kl.coef` {a.kl.coef:g}; no `dynamic_sampling`"
    )
    rows = [f"| none (the default) | {default} |"]
    for name in names():
        own = [f"`{key.removeprefix('algorithm.')}` {_word(v)}" for key, v in differences(name).items()]
        rows.append(f"| `{name}` | {', '.join(own) or 'nothing'} |")
    return "\n".join(["| preset | differences from the default |", "|---|---|", *rows])


def _word(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
