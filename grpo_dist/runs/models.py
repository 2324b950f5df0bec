"""Finds the directories of the models that a run reads: generated, trained, local or downloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from grpo_dist.chat.template import read_tokenizer
from grpo_dist.config import Config, ModelConfig, SFTConfig
from grpo_dist.config.files import load_recorded
from grpo_dist.data.sources import find_hub_failure
from grpo_dist.demo.model import cached_model, random_model
from grpo_dist.errors import expanded, searched
from grpo_dist.policy.full_weights import EXPORT_LIST
from grpo_dist.policy.lora import BASE, apply_start_adapter, record_base
from grpo_dist.policy.text_model import usable_model
from grpo_dist.runs.checkpoint import MANIFEST
from grpo_dist.runs.cold_start import run_sft
from grpo_dist.runs.run_directory import recorded_settings
from grpo_dist.runs.run_weights import find_checkpoint, is_supervised_run, load_weights, write_loaded
from grpo_dist.runs.start_checks import readable_model
from grpo_dist.runtime.files import write_text
from grpo_dist.runtime.hardware import quiet_libraries
from grpo_dist.runtime.model_files import cached, describe_gguf, fingerprint, is_checkpoint, split_reference

_VERSION = 2  # raise it when models exported from checkpoints change
_TEMPLATED_VERSION = 1  # raise it when the files of `set_chat_template` change
_UNREAD = ["*.bin", "*.pth", "*.gguf", "consolidated*"]  # the last: Mistral's second copy of the weights


def resolve_model(
    model: ModelConfig,
    sft: SFTConfig | None,
    seed: int,
    say: Callable[[str], None],
    *,
    train_first: bool = True,
    trains: bool = True,
    trains_adapter: bool = False,
    key: str = "model.path",
    day: date | None = None,
) -> Path:
    """Return the model's directory: generated here (`demo:`, `random:`), trained here (`sft`), local, or
    downloaded from the hub; with `model.adapter`.

    Args:
        trains: False if the model only samples, which quantised weights can do, too.
        trains_adapter: training continues `model.adapter`; else it is merged.
        key: configuration key of the model, for messages.
        day: what chat templates write as today's date in a cold start; None: today.
    """
    quiet_libraries()
    if model.path == "sft":
        assert sft is not None  # the configuration was checked
        base = sft_model(sft, model.chat_template, say)
        return run_sft(sft, base, say, day=day) if train_first else base
    if model.adapter is not None:
        _check_not_merged(model.path, model.adapter, key)
    base = _named_model(model, seed, say, trains=trains, key=key)
    if model.adapter is None:
        return set_chat_template(base, model.chat_template)
    where, local = f"model.adapter = {model.adapter}", expanded(model.adapter)
    adapter = local.resolve() if local.is_dir() else download(model.adapter, None, "model.adapter")
    merged = apply_start_adapter(base, adapter, where, continued=trains_adapter)
    if not trains_adapter:
        say(f"{where}: merged into a copy of the weights, {merged}")
    return set_chat_template(merged, model.chat_template)


def _check_not_merged(path: str, adapter: str, key: str) -> None:
    """Raise ValueError if the model ``path`` is a checkpoint or export of a run that began with ``adapter``,
    and contains it. ``key``: the model's, for messages.
    """
    runs: Sequence[Path] = ()
    if is_checkpoint(path):
        runs = [split_reference(path)[0]]
    elif (expanded(path) / EXPORT_LIST).is_file():
        runs = expanded(path).absolute().parents[:2]  # RUN/model, RUN/export/NAME
    for run in runs:
        recorded = recorded_settings(run).get("model.adapter")
        if recorded and expanded(str(recorded)).absolute() == expanded(adapter).absolute():
            raise ValueError(
                f"model.adapter = {adapter}: {key} = {path} contains it, since the run {run} began with "
                "it; set model.adapter=null"
            )


def starting_model(config: Config, run_dir: Path, say: Callable[[str], None]) -> Path:
    """Return the directory of the model with which the run of ``config`` in ``run_dir`` began. Skips the cold
    start if a checkpoint of the run holds all weights.
    """
    if config.sft is not None and is_supervised_run(run_dir):
        return sft_model(config.sft, config.model.chat_template, say)
    adapts = config.policy.lora is not None  # the checkpoint lacks the base weights
    return resolve_model(
        config.model, config.sft, config.seed, say,
        train_first=adapts, trains_adapter=adapts, day=config.data.day,
    )  # fmt: skip


def sft_model(sft: SFTConfig, chat_template: str | None, say: Callable[[str], None]) -> Path:
    """Return the directory of `sft.model`, the start of supervised training. ``chat_template``:
    `model.chat_template`.
    """
    base = _named_model(ModelConfig(path=sft.model), sft.seed, say, trains=True, key="sft.model")
    return set_chat_template(base, chat_template)


def set_chat_template(model_dir: Path, template: str | None) -> Path:
    """Return a directory with the files of ``model_dir`` and the chat template ``template``, cached, so that
    engines, rewards and exports read it like any other; None: ``model_dir`` itself.
    """
    if template is None:
        return model_dir

    def write(directory: Path) -> None:
        for entry in model_dir.iterdir():
            if not entry.name.startswith(("chat_template", "additional_chat_templates", BASE)):
                (directory / entry.name).symlink_to(entry.resolve())
        write_text(directory / "chat_template.jinja", template)
        record_base(directory, model_dir)

    decides = {
        "version": _TEMPLATED_VERSION, "model": str(model_dir), "files": fingerprint(model_dir),
        "template": template,
    }  # fmt: skip
    return cached(f"templated-{model_dir.name}", decides, write)


def _named_model(
    model: ModelConfig, seed: int, say: Callable[[str], None], *, trains: bool, key: str
) -> Path:
    """Return the directory that ``model`` names, downloading or generating it if it is missing."""
    path, trusted = model.path, model.trust_remote_code
    where = f"{key} = {path}"

    def usable(directory: Path) -> Path:
        return usable_model(directory, where, say, trust_remote_code=trusted, trains=trains)

    if is_checkpoint(path):
        return usable(_checkpoint_model(path, say))
    if path.startswith("demo:"):
        return cached_model(path.removeprefix("demo:"), seed=seed)
    if path.startswith("random:"):
        return usable(random_model(expanded(path.removeprefix("random:")), seed=seed))
    local = expanded(path)
    if local.is_dir():
        return usable(local.resolve())
    if local.is_file():
        what = "the directory that holds it with config.json"
        if local.suffix.lower() == ".gguf":
            what = describe_gguf(local)
        raise ValueError(f"{where}: a file; expected {what}")
    if local.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise ValueError(
            f"{where}: no such directory{searched(path)}; expected a local model directory or a hub id "
            "owner/name"
        )
    return usable(download(path, model.revision, key))


def _checkpoint_model(path: str, say: Callable[[str], None]) -> Path:
    """Return the cached directory of the model in the checkpoint ``path``, as the run's export writes it:
    adapters merged, and also in `adapter`. Raises ValueError if the checkpoint is missing or damaged.
    """
    checkpoint = find_checkpoint(path, say)
    config = load_recorded(checkpoint / "config.yaml")
    decides = {"version": _VERSION, "checkpoint": fingerprint(checkpoint / MANIFEST)}

    def write(directory: Path) -> None:
        base = starting_model(config, checkpoint.parent.parent, say)
        write_loaded(load_weights(config, base, checkpoint), config, base, directory)

    say(f"{path}: {checkpoint}")
    return cached("checkpoint", decides, write)


def download(hub_id: str, revision: str | None, key: str) -> Path:
    """Download a hub model and return its directory. ``key``: its configuration key. Raises ValueError."""
    from huggingface_hub import snapshot_download  # slow to import

    try:
        return Path(snapshot_download(hub_id, revision=revision, ignore_patterns=_UNREAD))
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if failure := find_hub_failure():  # called once: afterwards the library may be offline
            reason = f"{failure}, and the model is not in the cache"
        raise ValueError(
            f"{key} = {hub_id}: no such directory{searched(hub_id)}, and downloading it from the hub failed "
            f"({reason}); check the name, the network and HF_TOKEN"
        ) from error


def load_tokenizer(model_dir: Path, trust_remote_code: bool) -> Any:
    """Load the model's tokenizer. Raises ValueError for any error while reading its files."""
    quiet_libraries()
    with readable_model(model_dir, "tokenizer"):
        return read_tokenizer(model_dir, trust_remote_code=trust_remote_code)
