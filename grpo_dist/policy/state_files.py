"""DeepSpeed's checkpoint files: written while training continues, read without running code in them.

save(state)    clone to host memory | return           the files of a rank are written by one thread,
                                     \\ torch.save ...  in order
load(path)     torch's unpickler of plain values and tensors, and of the few classes named here
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_dist.runtime.background import Background

_FILES_PENDING = 64  # of one checkpoint; each holds its state in memory anyway


class PolicyFiles:
    """The files of one rank; with DeepSpeed's ``CheckpointEngine`` as its other base it replaces DeepSpeed's
    own. ``blocking``: whether the next `save` returns only when its file is written.
    """

    def __init__(self) -> None:
        self.name = "PolicyFiles"
        self.blocking = True
        self._writer = Background("checkpoint", pending=_FILES_PENDING)

    def create(self, info: Any) -> None:
        """Nothing to prepare: the directory is DeepSpeed's."""

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        if self.blocking:
            _write(state_dict, path)
        else:
            state = snapshot(state_dict)
            self._writer.submit(lambda: _write(state, path))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file. Raises ValueError where it holds more than values: a pickle that would run code."""
        return self._read(path, map_location=map_location)

    def mapped(self, path: Path) -> Any:
        """Read a file as `load` does; its tensors are read from disk when they are used."""
        return self._read(str(path), map_location="cpu", mmap=True)

    def _read(self, path: str, **how: Any) -> Any:
        try:
            with torch.serialization.safe_globals(_deepspeed_classes()):
                return torch.load(path, weights_only=True, **how)
        except Exception as error:
            raise ValueError(
                f"{Path(path)}: cannot be read as a policy state ({str(error).splitlines()[0]}); use another "
                "checkpoint"
            ) from error

    def commit(self, info: Any) -> bool:
        """Do nothing: the driver publishes the files once all ranks have `written` theirs."""
        return True

    def written(self) -> bool:
        """Return whether every file is written. Raises the error of a write that failed."""
        return self._writer.is_idle()


def _deepspeed_classes() -> list[Any]:
    """Return the classes in DeepSpeed's states that are neither tensors nor plain values."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


def _write(state: Any, path: str) -> None:
    try:
        torch.save(state, path)
    except (OSError, RuntimeError) as error:  # torch's own writer raises the latter for a full disk
        raise OSError(f"{path}: cannot be written ({str(error).splitlines()[0]})") from error


def snapshot(state: Any) -> Any:
    """Copy ``state`` to host memory; tensors that share storage still do in the copy."""
    return _cloned(state, {})


def _cloned(value: Any, seen: dict[Any, Tensor]) -> Any:
    if isinstance(value, Tensor):
        identity = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.device)
        if value.numel() == 0 or identity not in seen:
            seen[identity] = value.detach().to("cpu", copy=True)
        return seen[identity]
    if isinstance(value, dict):
        return type(value)((key, _cloned(inner, seen)) for key, inner in value.items())
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_cloned(inner, seen) for inner in value)
    return copy.deepcopy(value)
