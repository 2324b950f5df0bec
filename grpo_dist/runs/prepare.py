"""Everything that can be refused before an accelerator or an actor is touched: model, tokenizer, prompts, run
directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_dist.config import Config, DataSourceConfig
from grpo_dist.data.readers import DataRow, read_all, source_name
from grpo_dist.evaluation.sampling import EvalSet
from grpo_dist.rewards.models import check_model
from grpo_dist.rewards.registry import reward_problems
from grpo_dist.runs.start_checks import model_problems, readable_model, setting_problems
from grpo_dist.runtime.hardware import DeviceType, device_type, quiet_libraries
from grpo_dist.runtime.stage_log import stage
from grpo_dist.types import Prompt

if TYPE_CHECKING:
    from grpo_dist.data.prompts import Dropped

Say = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    model_dir: Path
    prompts: list[Prompt]
    eval_sets: list[EvalSet]
    dropped: list[Dropped] = field(default_factory=list)  # training rows that became no prompts
    warnings: list[str] = field(default_factory=list)  # about the data; `say` has printed them


def prepare(
    config: Config, say: Say, *, train_first: bool = True, device: DeviceType | None = None
) -> Prepared:
    """Load and check the model's files and all data. Raises ValueError with one clear message for what cannot
    be used.

    Args:
        train_first: False leaves a cold start undone: the model is then the one it would begin with.
        device: of the run's workers; None: as on this machine.
    """
    device = device or device_type()
    check_scoring(config)
    refuse(setting_problems(config, device))
    # Rows first: a mistake in them should not wait for a cold start or a download.
    with stage("data", "problems are read"):
        train_rows = read_all(config.data.train, "data.train")
        eval_rows = read_all(config.data.eval, "data.eval")
    cold = config.model.path == "sft" and train_first
    with stage("cold start" if cold else "model", "supervised, unless cached" if cold else config.model.path):
        model_dir = resolve_model(config, say, train_first=train_first)
    refuse(model_problems(config, device, model_dir))
    return prepared(config, model_dir, train_rows, eval_rows, say)


def refuse(problems: Iterable[str]) -> None:
    """Raises ValueError with all ``problems``, if there are any."""
    if found := list(problems):
        raise ValueError("; ".join(found))


def prepared(
    config: Config,
    model_dir: Path,
    train_rows: list[tuple[DataSourceConfig, list[DataRow]]],
    eval_rows: list[tuple[DataSourceConfig, list[DataRow]]],
    say: Say,
) -> Prepared:
    """Rows as prompts of the model. Raises ValueError as `prepare` does."""
    tokenizer = load_tokenizer(model_dir, config.model.trust_remote_code)
    dropped: list[Dropped] = []
    warnings: list[str] = []

    def warn(message: str) -> None:
        say(message)
        warnings.append(message)

    with stage("prompts", "are tokenized"):
        prompts = train_prompts(config, train_rows, tokenizer, warn, dropped)
    needed = config.batch.prompts_per_step
    if len(prompts) < needed:
        raise ValueError(
            f"data.train: {len(prompts)} prompts, but `batch.prompts_per_step` = {needed} must be drawn "
            f"without "
            f"repetition; add data or set batch.prompts_per_step to at most {len(prompts)}"
        )
    eval_sets = prepare_eval(config, eval_rows, tokenizer, prompts, warn)
    return Prepared(model_dir, prompts, eval_sets, dropped, warnings)


def train_prompts(
    config: Config,
    sources: list[tuple[DataSourceConfig, list[DataRow]]],
    tokenizer: Any,
    say: Say,
    dropped: list[Dropped] | None = None,
) -> list[Prompt]:
    """Prompts of all ``sources`` in order, no two of one uid. To ``dropped`` are added the rows that became
    none.
    """
    seen: dict[str, int] = {}
    return [
        prompt
        for source, rows in sources
        for prompt in load_prompts(config, source, rows, tokenizer, say, seen, dropped)
    ]


def prepare_eval(
    config: Config,
    sources: list[tuple[DataSourceConfig, list[DataRow]]],
    tokenizer: Any,
    prompts: list[Prompt],
    say: Say,
) -> list[EvalSet]:
    """Held-out sets, none of whose problems is among ``prompts`` unless the configuration allows it."""
    from grpo_dist.data.prompts import check_overlap

    eval_sets = []
    for source, rows in sources:
        eval_set = EvalSet(source_name(source), load_prompts(config, source, rows, tokenizer, say))
        overlap = check_overlap(prompts, eval_set.prompts)
        if overlap and config.data.overlap == "refuse":
            raise ValueError(f"data.eval {eval_set.name}: {overlap}; remove them, or set data.overlap=warn")
        if overlap:
            say(f"warning: data.eval {eval_set.name}: {overlap}")
        eval_sets.append(eval_set)
    names = [s.name for s in eval_sets]
    if len(set(names)) != len(names):
        raise ValueError(f"data.eval: two sets are called the same: {names}; give each a `name`")
    return eval_sets


def resolve_model(config: Config, say: Say, *, train_first: bool = True) -> Path:
    """Directory of the model: made here (`demo:`, `random:`), trained here (`sft`), local, or fetched from
    the hub.
    """
    from grpo_dist.demo.model import cached_model, random_model
    from grpo_dist.runs.cold_start import base_model, run_sft

    quiet_libraries()
    path = config.model.path
    if path == "sft":
        assert config.sft is not None  # the configuration was checked
        return run_sft(config.sft, say) if train_first else base_model(config.sft)
    if path.startswith("demo:"):
        return cached_model(path.removeprefix("demo:"), seed=config.seed)
    if path.startswith("random:"):
        return random_model(Path(path.removeprefix("random:")).expanduser(), seed=config.seed)
    local = Path(path).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ValueError(
                f"model.path = {path}: the directory has no config.json; expected a Hugging Face model "
                f"directory"
            )
        if not any(local.glob("*.safetensors")) and not any(local.glob("*.bin")):
            raise ValueError(
                f"model.path = {path}: no weights there; expected *.safetensors beside config.json"
            )
        _check_shards(local)
        return local.resolve()
    if local.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise ValueError(
            f"model.path = {path}: no such directory; expected a local model directory or a hub id owner/name"
        )
    return _download(path, config.model.revision)


def _check_shards(model_dir: Path) -> None:
    """A download that was cut off lacks some of the files that the index names."""
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_text())["weight_map"].values())
        missing = sorted(name for name in named if not (model_dir / name).is_file())
        if missing:
            raise ValueError(
                f"model.path = {model_dir}: {len(missing)} of {len(named)} weight files are missing, e.g. "
                f"{missing[0]}; fetch the model again"
            )


def _download(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(hub_id, revision=revision, ignore_patterns=["*.bin", "*.pth", "*.gguf"])
        )
    except Exception as error:
        raise ValueError(
            f"model.path = {hub_id}: no such directory here, and the hub has not given it "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); check the name, the network and "
            f"HF_TOKEN"
        ) from error


def check_scoring(config: Config) -> None:
    """Raises ValueError for a reward function or a reward model that cannot be used."""
    refuse(scoring_problems(config))


def scoring_problems(config: Config) -> Iterator[str]:
    """Of every reward function and reward model that cannot be used, why."""
    yield from reward_problems(config.rewards, max_new_tokens=config.sampling.max_new_tokens)
    for model in config.rewards.models:
        try:
            check_model(model)
        except ValueError as error:
            yield str(error)


def load_tokenizer(model_dir: Path, trust_remote_code: bool) -> Any:
    """Raises ValueError for files that cannot be read, whatever the library says of them."""
    from transformers import AutoTokenizer

    with readable_model(model_dir, "tokenizer"):
        return AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code)


def load_prompts(
    config: Config,
    source: DataSourceConfig,
    rows: list[DataRow],
    tokenizer: Any,
    say: Say,
    seen: dict[str, int] | None = None,
    all_dropped: list[Dropped] | None = None,
) -> list[Prompt]:
    """Prompts of the ``rows`` of ``source``. ``seen``: uids given out so far, so that two sources never share
    one; ``all_dropped``: gets the rows that became no prompts.
    """
    from grpo_dist.data.prompts import PromptFormat, build_prompts
    from grpo_dist.rewards.gold import count_unreadable

    data = config.data
    built = build_prompts(
        rows,
        tokenizer,
        PromptFormat.of(data),
        max_prompt_tokens=data.max_prompt_tokens,
        overlong=data.overlong,
        uid_counts=seen,
    )
    prompts, dropped = built.prompts, built.dropped
    if seen is not None:
        seen.update(built.uid_counts)
    if all_dropped is not None:
        all_dropped += dropped
    if dropped:
        say(f"{source_name(source)}: {len(dropped)} of {len(rows)} prompts dropped, e.g. {dropped[0].reason}")
    unreadable, looked_at = count_unreadable([p.answer for p in prompts], config.rewards)
    if unreadable:
        say(
            f"{source_name(source)}: {unreadable} of {looked_at} gold answers do not read as mathematics and "
            "can only be matched as text"
        )
    return prompts


def choose_run_dir(config: Config) -> Path:
    """`output_dir/name`; with ``resume: never`` and such a directory there, the first free `name-2`, `name-3`
    ...
    """
    base = Path(config.output_dir).expanduser() / config.name
    if config.checkpoint.resume == "auto" or not base.exists():
        return base
    number = 2
    while (taken := base.with_name(f"{base.name}-{number}")).exists():
        number += 1
    return taken


def check_writable(run_dir: Path) -> Path:
    """The nearest directory to ``run_dir`` that is there: itself, or one above it. Raises ValueError when it
    cannot be written. Makes nothing.
    """
    nearest = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(f"{run_dir}: cannot be written; set `output_dir` to a directory that can")
    return nearest
