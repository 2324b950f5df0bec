"""The weights of a run's checkpoint as a Hugging Face model: `runs/NAME@latest`, `runs/NAME@20`.

Starts no engine and no rank: reads the state of each rank from its files, with any ZeRO stage, into the model
that the run began with.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from grpo_dist.config import Config, PolicyConfig
from grpo_dist.config.differences import flat
from grpo_dist.config.files import changed
from grpo_dist.runs.checkpoint import (
    CHECKPOINTS,
    check_models,
    checkpoint_damage,
    list_checkpoints,
    newest_whole,
    read_state,
    step_of,
)
from grpo_dist.runs.run_directory import recorded_settings
from grpo_dist.runtime.files import read_json
from grpo_dist.runtime.model_files import is_checkpoint, split_reference, weights_digest

if TYPE_CHECKING:  # a plan does not import it
    import torch

C = TypeVar("C", bound=Config)
_BUCKET = 1 << 28  # bytes
_MODELS = ("model.path", "sft.model", "distillation.teachers.*.model")  # keys that may name a checkpoint


def is_supervised_run(run: Path) -> bool:
    """Return whether a run is the sft stage of a pipeline, which begins with `sft.model`."""
    try:
        return bool(read_json(run / "stage.json")["kind"] == "sft")
    except (OSError, ValueError, LookupError, TypeError):
        return False


def pinned(config: C, run_dir: Path | None = None) -> C:
    """Return ``config`` with a step for each model named RUN@latest: the step with which the run in
    ``run_dir`` began, and resumes; else the newest checkpoint's. Raises ValueError without a checkpoint.
    """
    latest = {
        key: path
        for key, path in flat(config.model_dump(mode="json")).items()
        if any(fnmatchcase(key, model) for model in _MODELS) and str(path).endswith("@latest")
    }
    recorded = recorded_settings(run_dir) if run_dir and latest else {}
    steps = {}
    for key, path in latest.items():
        run, before = path.removesuffix("latest"), str(recorded.get(key) or "")
        is_same = is_checkpoint(before) and before.startswith(run)
        steps[key] = before if is_same else f"{run}{step_of(find_checkpoint(path, lambda _: None))}"
    # A run prints the file's settings of the algorithm, which the copy cannot tell from defaults.
    return changed(config, steps).model_copy(update={"algorithm": config.algorithm}) if steps else config


def restore_begun(config: Config, run_dir: Path, say: Callable[[str], None]) -> Config:
    """Return ``config`` with the models that the run in ``run_dir`` began with. Raises as `pinned`."""
    begun = pinned(config, run_dir)
    for key, path in flat(begun.model_dump(mode="json")).items():
        if any(fnmatchcase(key, model) for model in _MODELS) and is_checkpoint(str(path)):
            run, step = split_reference(path)
            say(
                f"note: {key} = {path}: this run reads that checkpoint again when it resumes; where {run} "
                f"may delete it (`checkpoint.keep`), use an export: grpo-dist export {run}@{step}"
            )
    return begun


def find_checkpoint(path: str, say: Callable[[str], None]) -> Path:
    """Return the directory of the checkpoint ``path``. Raises ValueError if it is missing or damaged."""
    run, step = split_reference(path)
    checkpoints = list_checkpoints(run / CHECKPOINTS)
    if step == "latest":
        if newest := newest_whole(run / CHECKPOINTS, say):
            return newest
    elif matching := [c for c in checkpoints if step_of(c) == int(step)]:
        if damage := checkpoint_damage(matching[0]):
            raise ValueError(f"{path}: damaged checkpoint {matching[0]}: {damage}; use another step")
        return matching[0]
    steps = ", ".join(str(step_of(c)) for c in checkpoints)
    raise ValueError(
        f"{path}: no such checkpoint in {run / CHECKPOINTS}; it has {steps or 'none'} (a run "
        "deletes the oldest beyond `checkpoint.keep`)"
    )


def load_weights(config: Config, base: Path, checkpoint: Path, dtype: torch.dtype | None = None) -> Any:
    """Return the transformers model, with adapters, in ``checkpoint`` of a run that began with the model in
    ``base``. It is on the host. ``dtype``: of its weights; None: as trained. Raises ValueError as
    `check_models`.
    """
    import torch

    from grpo_dist.policy.model import TokenLogprobs, trainable_model
    from grpo_dist.policy.saved_state import WEIGHTS, PolicyFiles, SavedPolicy, state_directory

    if config.policy.lora is not None:
        check_models(checkpoint, read_state(checkpoint), {"model.path": weights_digest(base)}, config)
    saved = SavedPolicy(state_directory(checkpoint / "policy"), PolicyFiles().mapped)
    plain = {"attention": "auto", "packing": False, "kernels": "torch", "gradient_checkpointing": False}
    section = config.model.model_copy(update=plain)
    model = trainable_model(str(base), dtype or saved.dtype, section, _single_process(config), config.seed)
    # DeepSpeed uses the names of this wrapper.
    names = TokenLogprobs(model, temperature=1.0, chunk_mib=1).named_parameters()
    trained = {name: parameter for name, parameter in names if parameter.requires_grad}
    saved.open([*trained])
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(saved.whole(name, WEIGHTS).view_as(parameter))
    return model.eval()


def write_loaded(
    model: Any, config: Config, base: Path, directory: Path, *, adapter_alone: bool = False
) -> None:
    """Write what `load_weights` returned: adapters merged, and also in `adapter`; or the adapter alone."""
    from grpo_dist.policy.full_weights import FullWeights, write_adapter_alone, write_model

    weights, trusted = FullWeights(model, _single_process(config)), config.model.trust_remote_code
    # One process holds all parameters, so each stays valid after its bucket.
    low_rank = dict(chain.from_iterable(weights.buckets(_BUCKET, adapters_only=True)))
    if adapter_alone:
        write_adapter_alone(model, low_rank, directory, str(base), trusted)
        return
    whole = dict(chain.from_iterable(weights.buckets(_BUCKET, as_held=True)))
    write_model(model, whole, low_rank, directory, str(base), trusted)


def _single_process(config: Config) -> PolicyConfig:
    """Return section `policy` for a model in one process, without training."""
    return config.policy.model_copy(update={"router_replay": False, "compile": False, "zero_stage": 0})
