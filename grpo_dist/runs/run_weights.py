"""The weights of a run's checkpoint as a Hugging Face model: `runs/NAME@latest`, `runs/NAME@20`.

No engine and no rank starts: the state of each rank is read from its files, whatever the ZeRO stage, into the
model that the run began with.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from grpo_dist.config import Config
from grpo_dist.config.files import load_config
from grpo_dist.errors import expanded
from grpo_dist.policy.full_weights import FullWeights, write_model
from grpo_dist.policy.model import TokenLogprobs, trainable_model
from grpo_dist.policy.saved_state import WEIGHTS, PolicyFiles, SavedPolicy, state_directory
from grpo_dist.runs.checkpoint import CHECKPOINTS, MANIFEST, list_checkpoints, newest_whole, step_of
from grpo_dist.runs.run_directory import recorded_setting
from grpo_dist.runtime.files import read_json
from grpo_dist.runtime.hardware import resolve_dtype
from grpo_dist.runtime.model_files import cached, fingerprint

C = TypeVar("C", bound=Config)
_REFERENCE = re.compile(r"(?P<run>.+)@(?P<step>latest|\d+)")
_VERSION = 1  # of the files this module writes; raise it when they change


def is_checkpoint(path: str) -> bool:
    """Return whether ``path`` names a checkpoint: RUN@latest or RUN@STEP."""
    return _REFERENCE.fullmatch(path) is not None


def split_reference(path: str) -> tuple[Path, str]:
    """Return the run directory and the step, or "latest", of a ``path`` that names a checkpoint."""
    match = _REFERENCE.fullmatch(path)
    assert match is not None, path
    return expanded(match["run"]), match["step"]


def is_supervised_run(run: Path) -> bool:
    """Return whether a run is the sft stage of a pipeline, which begins with `sft.model`."""
    try:
        return bool(read_json(run / "stage.json")["kind"] == "sft")
    except (OSError, ValueError, LookupError, TypeError):
        return False


def pinned(config: C, run_dir: Path) -> C:
    """Return ``config`` with the step of a `model.path` RUN@latest: the one that the run in ``run_dir`` began
    with, which it resumes with, else that of the newest checkpoint.
    """
    path = config.model.path
    if not path.endswith("@latest"):
        return config
    recorded = recorded_setting(run_dir, "model", "path") or ""
    run = path.removesuffix("latest")
    if not (is_checkpoint(recorded) and recorded.startswith(run)):
        recorded = f"{run}{step_of(find_checkpoint(path, lambda _: None))}"
    model = config.model.model_copy(update={"path": recorded})
    return config.model_copy(update={"model": model})


def find_checkpoint(path: str, say: Callable[[str], None]) -> Path:
    """Return the directory of the checkpoint that ``path`` names. Raises ValueError where it is missing."""
    run, step = split_reference(path)
    checkpoints = list_checkpoints(run / CHECKPOINTS)
    if step == "latest":
        if newest := newest_whole(run / CHECKPOINTS, say):
            return newest
    elif matching := [c for c in checkpoints if step_of(c) == int(step)]:
        return matching[0]
    steps = ", ".join(str(step_of(c)) for c in checkpoints)
    raise ValueError(f"{path}: no such checkpoint in {run / CHECKPOINTS}; it has {steps or 'none'}")


def checkpoint_model(
    path: str, say: Callable[[str], None], *, starting_model: Callable[[Config, Path], Path]
) -> Path:
    """Return the cached directory of the model whose weights the checkpoint ``path`` holds, as the run's own
    export writes it: adapters merged, and also in `adapter`.

    Args:
        starting_model: returns the model that the run in a directory, of this configuration, began with.

    Raises ValueError where the checkpoint is missing or damaged.
    """
    checkpoint = find_checkpoint(path, say)
    config = load_config(checkpoint / "config.yaml")
    decides = {"version": _VERSION, "checkpoint": fingerprint(checkpoint / MANIFEST)}

    def write(directory: Path) -> None:
        base = starting_model(config, checkpoint.parent.parent)
        write_weights(config, base, checkpoint, directory)

    say(f"{path}: {checkpoint}")
    return cached("checkpoint", decides, write)


def write_weights(config: Config, base: Path, checkpoint: Path, directory: Path) -> None:
    """Write the weights in ``checkpoint`` of a run that began with the model in ``base``."""
    plain = config.policy.model_copy(update={"router_replay": False, "compile": False, "zero_stage": 0})
    model = trainable_model(str(base), resolve_dtype(config.model.dtype), config.model, plain, config.seed)
    # DeepSpeed's names are those of this wrapper.
    names = TokenLogprobs(model, temperature=1.0, chunk_mib=1).named_parameters()
    trained = {name: parameter for name, parameter in names if parameter.requires_grad}
    saved = SavedPolicy(state_directory(checkpoint / "policy"), PolicyFiles().mapped)
    saved.open([*trained])
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(saved.whole(name, WEIGHTS).view_as(parameter))
    weights = FullWeights(model, plain)
    whole, low_rank = (
        {name: t.detach().clone() for bucket in weights.buckets(1 << 28, **how) for name, t in bucket}
        for how in ({"as_held": True}, {"adapters_only": True})
    )
    write_model(model, whole, low_rank, directory, str(base), config.model.trust_remote_code)
