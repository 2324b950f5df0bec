"""The sharded state of DeepSpeed's engine, saved and loaded.

save(state)    clone to host memory | return           the files of a rank are written by one thread,
                                     \\ torch.save ...  in order
load(path)     torch's unpickler of plain values and tensors, plus the few classes named here

A state can be loaded with another number of ranks or another ZeRO stage:

    files of the saved ranks                       a rank that loads
      flat pieces, by parameter -- memory mapped --> its share of weights, float32 weights, Adam's averages

DeepSpeed reads its files only with the same number of ranks at the same stage. Its `utils/zero_to_fp32.py`,
which reads only the weights, documents the format.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from grpo_dist.config import PolicyConfig
from grpo_dist.policy.deepspeed_config import create_moments, set_steps
from grpo_dist.runtime.concurrency import Background

_FILES_PENDING = 64  # files per checkpoint; each holds its state in memory anyway
WEIGHTS, MOMENTS = "weights", ("exp_avg", "exp_avg_sq")
_TAG = "state"  # DeepSpeed's checkpoint tag: one per directory, whose name has the step


def state_directory(directory: Path) -> Path:
    """Return where the ranks' files are in the ``directory`` of a policy's checkpoint."""
    if not (directory / _TAG).is_dir():
        raise ValueError(f"{directory}: no policy state; use another checkpoint")
    return directory / _TAG


class PolicyFiles:
    """The files of one rank. A subclass that also inherits DeepSpeed's ``CheckpointEngine`` replaces
    DeepSpeed's. ``blocking``: whether the next `save` returns only when its file is written.
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
        """Read a file. Raises ValueError if it holds more than values: a pickle that would run code."""
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
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError for a full disk
        raise OSError(f"{path}: cannot be written ({str(error).splitlines()[0]})") from error


def snapshot(state: Any) -> Any:
    """Copy ``state`` to host memory; tensors that share storage still do in the copy."""
    return _clone(state, {})


def _clone(value: Any, clones: dict[Any, Tensor]) -> Any:
    if isinstance(value, Tensor):
        identity = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.device)
        if value.numel() == 0 or identity not in clones:
            clones[identity] = value.detach().to("cpu", copy=True)
        return clones[identity]
    if isinstance(value, dict):
        return type(value)((key, _clone(inner, clones)) for key, inner in value.items())
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_clone(inner, clones) for inner in value)
    return copy.deepcopy(value)


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a policy state is sharded. ``optimizer``, ``parameters``: where they are, none (on the
    accelerator), cpu or nvme.
    """

    ranks: int
    zero_stage: int
    optimizer: str
    parameters: str

    @classmethod
    def from_settings(cls, ranks: int, settings: Mapping[str, Any]) -> Sharding:
        """Read it from DeepSpeed's ``settings``."""
        zero = settings["zero_optimization"]
        devices = (zero.get(f"offload_{what}", {}).get("device", "none") for what in ("optimizer", "param"))
        return cls(ranks, zero["stage"], *devices)

    def __str__(self) -> str:
        return (
            f"{self.ranks} rank(s) at ZeRO stage {self.zero_stage} (offload.optimizer "
            f"{self.optimizer}, offload.parameters {self.parameters})"
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements of one parameter: ``numel`` from ``start`` of the flat state of ``rank``."""

    rank: int
    start: int
    numel: int


class SavedPolicy:
    """The files of all ranks of one checkpoint. ``load`` opens one; its tensors are read when used.

    Raises ValueError where files are missing or hold other parameters.
    """

    def __init__(self, directory: Path, load: Callable[[Path], Any]) -> None:
        self._directory, self._load = directory, load
        self._model = load(self._only("*model_states.pt"))
        self.sharding = Sharding.from_settings(self._model["dp_world_size"], self._model["ds_config"])
        self._flat: list[dict[str, list[Tensor]]] = []
        self._pieces: dict[str, list[_Piece]] = {}
        self.steps = 0.0  # Adam's step count, for its bias correction

    def __str__(self) -> str:
        return str(self._directory)

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the ranks computed."""
        is_half = self._model["ds_config"].get("bf16", {}).get("enabled", False)
        return torch.bfloat16 if is_half else torch.float32

    @property
    def client_state(self) -> Mapping[str, Any]:
        """The counters that the trainer saved with the state, from the first rank."""
        return self._model

    def open(self, names: Sequence[str]) -> None:
        """Find every trained parameter, ``names`` in the model's order. Call it before `whole`."""
        if self.sharding.zero_stage == 0:
            self._open_undivided(names)
        else:
            for rank in range(self.sharding.ranks):
                state = self._load(self._only(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
                self._add_rank(rank, state["optimizer_state_dict"])
        if self.sharding.zero_stage == 3:
            self._divide_each()
        if missing := [name for name in names if name not in self._pieces]:
            raise ValueError(f"{self._directory}: no state of parameter {missing[0]}; use another checkpoint")

    def whole(self, name: str, what: str) -> Tensor:
        """Return ``what`` of a parameter, `WEIGHTS` or one of `MOMENTS`: float32 [elements], on the host."""
        return self.part(name, what, 0, sum(piece.numel for piece in self._pieces[name]))

    def part(self, name: str, what: str, start: int, numel: int) -> Tensor:
        """Return up to ``numel`` elements of `whole` from ``start``. Reads no others."""
        tensors = [torch.empty(0)]
        for piece in self._pieces[name]:
            overlap = max(0, min(numel, piece.numel - start))
            if overlap:
                tensors += _cut(self._flat[piece.rank][what], piece.start + start, overlap)
            start, numel = max(0, start - piece.numel), numel - overlap
        return torch.cat([tensor.float() for tensor in tensors])

    def _only(self, pattern: str) -> Path:
        files = sorted(self._directory.glob(pattern))
        if not files:
            raise ValueError(f"{self._directory}: no file {pattern}; use another checkpoint")
        return files[0]

    def _open_undivided(self, names: Sequence[str]) -> None:
        """Find parameters and averages of ZeRO stage 0, where every rank has all of them."""
        states = self._model["optimizer"]["state"]
        for index, name in enumerate(names):
            if name in (weights := self._model["module"]):
                self._add_flat([weights[name]], [states.get(index, {})])
                self._pieces[name] = [_Piece(index, 0, weights[name].numel())]

    def _add_flat(self, weights: list[Tensor], states: list[Mapping[str, Any]]) -> None:
        """Add weights and averages of the same lengths, which are zeros before Adam's first step."""
        tensors = {WEIGHTS: weights}
        for moment in MOMENTS:
            pairs = zip(weights, states, strict=True)
            tensors[moment] = [s[moment] if moment in s else torch.zeros_like(w) for w, s in pairs]
        self._flat.append(tensors)
        self.steps = max(self.steps, *(float(state.get("step", 0.0)) for state in states))

    def _add_rank(self, rank: int, state: Mapping[str, Any]) -> None:
        weights = state.get("single_partition_of_fp32_groups", state.get("fp32_flat_groups"))
        base = state.get("base_optimizer_state", state.get("optimizer_state_dict"))["state"]
        self._add_flat(list(weights), [base.get(index, {}) for index in range(len(weights))])
        start = 0
        for group, addresses in zip(weights, state.get("param_slice_mappings", ()), strict=False):
            for name, address in addresses.items():
                piece = _Piece(rank, start + address.start, address.numel)
                self._pieces.setdefault(name, []).append(piece)
            start += group.numel()

    def _divide_each(self) -> None:
        """Find the pieces of ZeRO-3: every rank has an equal part of each parameter, the last one padded."""
        start = 0
        for shapes in self._model["param_shapes"]:
            for name, shape in shapes.items():
                share, left = -(-shape.numel() // self.sharding.ranks), shape.numel()
                self._pieces[name] = []
                for rank in range(self.sharding.ranks):
                    self._pieces[name].append(_Piece(rank, start, min(share, left)))
                    left -= self._pieces[name][-1].numel
                start += share


def _cut(flat: list[Tensor], start: int, numel: int) -> Iterator[Tensor]:
    """Yield ``numel`` elements from ``start`` of tensors end to end."""
    for tensor in flat:
        overlap = max(0, min(numel, tensor.numel() - start))
        if overlap:
            yield tensor.reshape(-1).narrow(0, start, overlap)
        start, numel = max(0, start - tensor.numel()), numel - overlap


def is_in_8_bits(engine: Any) -> bool:
    """Return whether the optimiser of DeepSpeed's ``engine`` is bitsandbytes' AdamW8bit."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)  # ZeRO wraps it
    return type(inner).__name__ == "AdamW8bit"


def reshard(saved: SavedPolicy, engine: Any, sharding: Sharding) -> None:
    """Load each rank's part of ``saved`` into DeepSpeed's ``engine``, which shards by ``sharding``.
    Collective under ZeRO-3. Raises ValueError for states that cannot be resharded: on NVMe, or in 8 bits.
    """
    if "nvme" in (
        sharding.optimizer,
        sharding.parameters,
        saved.sharding.optimizer,
        saved.sharding.parameters,
    ):
        raise ValueError(
            f"{saved}: written by {saved.sharding}, and this run has {sharding}. State on NVMe disks cannot "
            "be resharded; resume with the settings of the checkpoint's config.yaml"
        )
    if is_in_8_bits(engine):
        raise ValueError(
            f"{saved}: written by {saved.sharding}, and this run has {sharding}. The averages of adamw_8bit "
            "cannot be resharded; resume with the settings of the checkpoint's config.yaml"
        )
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    saved.open([*trained])
    load = (_load_undivided, _load_partition, _load_partition, _load_shares)[sharding.zero_stage]
    with torch.no_grad():
        load(saved, engine, trained)


def _load_undivided(saved: SavedPolicy, engine: Any, trained: Mapping[str, Tensor]) -> None:
    states = {}
    for index, (name, parameter) in enumerate(trained.items()):
        parameter.copy_(saved.whole(name, WEIGHTS).view_as(parameter))
        moments = {moment: saved.whole(name, moment).view_as(parameter) for moment in MOMENTS}
        states[index] = {"step": torch.tensor(saved.steps)} | moments
    groups = engine.optimizer.state_dict()["param_groups"]
    engine.optimizer.load_state_dict({"state": states, "param_groups": groups})


def _load_partition(saved: SavedPolicy, engine: Any, trained: Mapping[str, Tensor]) -> None:
    """Load ZeRO 1 and 2: a rank has a slice of all parameters end to end, which may begin within one."""
    inner = engine.optimizer.optimizer
    flats = [group["params"][0] for group in inner.param_groups]
    _make_moments(inner, flats, saved.steps)
    for name, parameter in trained.items():
        parameter.copy_(saved.whole(name, WEIGHTS).view_as(parameter))
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:  # in the partitions of other ranks
            continue
        source, destination = mapping.lp_fragment_address, mapping.hp_fragment_address
        flat = flats[mapping.param_group_index]
        for what in (WEIGHTS, *MOMENTS):
            target = flat if what == WEIGHTS else inner.state[flat][what]
            share = saved.part(name, what, source.start, source.numel)
            target.narrow(0, destination.start, destination.numel).copy_(share)


def _load_shares(saved: SavedPolicy, engine: Any, trained: Mapping[str, Tensor]) -> None:
    """Load ZeRO 3: a rank has a share of each parameter."""
    import deepspeed
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    _make_moments(engine.optimizer.optimizer, engine.optimizer.fp32_partitioned_groups_flat, saved.steps)
    rank = dist.get_rank()
    for name, parameter in trained.items():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if rank == 0:
                parameter.copy_(saved.whole(name, WEIGHTS).view_as(parameter))
        size: int = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        shares = {what: saved.part(name, what, rank * size, size) for what in (WEIGHTS, *MOMENTS)}
        filled = {what: pad(share, (0, size - share.numel())) for what, share in shares.items()}
        safe_set_local_fp32_param(parameter, filled[WEIGHTS])
        for moment in MOMENTS:
            safe_set_local_optimizer_state(parameter, filled[moment], moment)


def _make_moments(inner: Any, flats: list[Tensor], steps: float) -> None:
    """Create moments as the optimiser does at its first step; DeepSpeed's Adam for CPUs counts steps in
    Python. Existing moments stay, since DeepSpeed also has views of them.
    """
    counts_in_python = type(inner).__name__ == "DeepSpeedCPUAdam"
    for flat in flats:
        state = inner.state[flat]
        state["step"] = int(steps) if counts_in_python else torch.tensor(steps, device=flat.device)
        for moment in MOMENTS:
            if moment not in state:
                state[moment] = torch.zeros_like(flat.data)


def use_policy_files(engine: Any) -> Any:
    """Make ``engine`` read and write its checkpoints by `PolicyFiles`; return them."""
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

    class Files(PolicyFiles, CheckpointEngine):
        """`PolicyFiles` of the type that DeepSpeed expects."""

    engine.checkpoint_engine = Files()
    return engine.checkpoint_engine


class SavedState:
    """Trained weights, optimiser state and counters. All ranks call the same methods in the same order."""

    def __init__(self, engine: Any, policy: PolicyConfig, num_ranks: int) -> None:
        self._engine, self._policy, self._num_ranks = engine, policy, num_ranks
        self.files = use_policy_files(engine)

    def save(self, directory: Path, counters: Mapping[str, Any], *, blocking: bool = True) -> None:
        """Write this rank's share, with ``counters``. Collective.

        ``blocking`` False: return once the state is copied in host memory; `is_saved` returns whether the
        files are written.
        """
        self.files.blocking = blocking
        frozen = self._policy.lora is not None  # base weights, which are in the model's directory
        self._engine.save_checkpoint(
            str(directory), tag=_TAG, client_state=dict(counters), exclude_frozen_parameters=frozen
        )

    def is_saved(self) -> bool:
        """Return whether every file is written. Raises the error of a write that failed. Any thread may call
        it.
        """
        return bool(self.files.written())

    def load(self, directory: Path) -> Mapping[str, Any]:
        """Load what `save` wrote, also with other ranks or under another ZeRO stage; return its counters.
        Collective.

        Raises:
            ValueError: there is no policy state, or it cannot be read.
        """
        sharding = Sharding.from_settings(self._num_ranks, self._engine.config)
        saved = SavedPolicy(state_directory(directory), self.files.mapped)
        if saved.sharding == sharding:
            return self._load_unchanged(directory)
        reshard(saved, self._engine, sharding)
        return saved.client_state

    def _load_unchanged(self, directory: Path) -> Mapping[str, Any]:
        """Let DeepSpeed load its files bit by bit: they have the same number of ranks and ZeRO stage."""
        on_disk = self._policy.offload.optimizer == "nvme"
        if on_disk:
            create_moments(self._engine.optimizer)
        whole = self._policy.lora is None
        path, counters = self._engine.load_checkpoint(str(directory), tag=_TAG, load_module_strict=whole)
        if path is None:
            raise ValueError(f"{directory}: DeepSpeed finds no policy state there; use another checkpoint")
        if on_disk:
            set_steps(self._engine.optimizer, counters["updates"])
        client_state: Mapping[str, Any] = counters
        return client_state
