"""Check that a model directory has whole weights in Hugging Face format, or say what it has instead; and a
disk cache of models that this project makes, keyed by everything that determines them. Reads only file names,
configurations and safetensors headers.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

from grpo_dist.errors import expanded
from grpo_dist.runtime.files import publish, read_json

INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
# Weight files that transformers loads, in its order.
_WEIGHTS = ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
_FLOATS = ("F64", "F32", "F16", "BF16")
_POINTER = b"version https://git-lfs"
_PART = 16 << 20  # bytes
_SHARD = 5 * 10**9  # bytes
_LONGEST_HEADER = 100_000_000  # bytes, safetensors' limit
_SAMPLES, _SAMPLE = 8, 1 << 16  # of a file, and bytes of each, in `weights_digest`
_ABANDONED_S = 86_400.0  # an unfinished model this old belongs to a process that was killed
_REFERENCE = re.compile(r"(?P<run>.+)@(?P<step>latest|\d+)")


def is_checkpoint(path: str) -> bool:
    """Return whether ``path`` names a checkpoint: RUN@latest or RUN@STEP."""
    return _REFERENCE.fullmatch(path) is not None


def split_reference(path: str) -> tuple[Path, str]:
    """Split a checkpoint ``path`` into the run directory and the step, or "latest"."""
    match = _REFERENCE.fullmatch(path)
    assert match is not None, path
    return expanded(match["run"]), match["step"]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file. ``start``, ``end``: its byte range in ``file``."""

    file: Path
    dtype: str  # the format's name: BF16
    shape: tuple[int, ...]
    start: int
    end: int

    def equals(self, other: StoredTensor) -> bool:
        """Return whether both have the same type, shape and bytes."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        return all(mine == theirs for mine, theirs in zip(self._parts(), other._parts(), strict=True))

    def copy_to(self, out: IO[bytes]) -> None:
        for part in self._parts():
            out.write(part)

    def _parts(self) -> Iterator[bytes]:
        """Yield the bytes in order, some MiB at a time."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            for offset in range(self.start, self.end, _PART):
                yield file.read(min(_PART, self.end - offset))


def stored_tensors(model_dir: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the model in ``model_dir`` by name; {}: its weights are not safetensors.

    Reads only headers: mapping a file larger than the machine's memory may fail. Raises ValueError for a file
    that is missing, truncated or not safetensors.
    """
    return {name: tensor for file in weight_files(model_dir) for name, tensor in read_header(file).items()}


def weight_files(model_dir: Path) -> list[Path]:
    """Return the model's safetensors files. Raises ValueError if a file in the index is missing, as after an
    interrupted download.
    """
    index, single = model_dir / INDEX, model_dir / "model.safetensors"
    if not index.is_file():
        return [single] if single.is_file() else []
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index}: no index of weights ({error!r}); download the model again") from error
    if missing := [name for name in names if not (model_dir / name).is_file()]:
        raise ValueError(
            f"{model_dir}: {len(missing)} of {len(names)} weight files are missing, e.g. {missing[0]}; "
            "download the model again"
        )
    return [model_dir / name for name in names]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file by name. Raises ValueError like `stored_tensors`."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(8)
        if _POINTER.startswith(first) and first:
            raise ValueError(f"{file}: a Git LFS pointer instead of weights; run `git lfs pull` there")
        length = int.from_bytes(first, "little")
        damaged = f"{file}: damaged, or no safetensors file; download the model again"
        if len(first) < 8 or not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            raise ValueError(damaged)
        try:
            entries: dict[str, Any] = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(damaged) from error
    entries.pop("__metadata__", None)
    last = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if size < last:
        raise ValueError(f"{file}: cut short, {size:,} of {last:,} bytes; download the model again")
    first_byte = 8 + length
    return {
        name: StoredTensor(
            file, entry["dtype"], tuple(entry["shape"]), *(first_byte + n for n in entry["data_offsets"])
        )
        for name, entry in entries.items()
    }


def write_tensors(directory: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Copy ``tensors``, under their keys, to `directory/model.safetensors`, or several files and an index."""
    shards: list[dict[str, StoredTensor]] = [{}]
    room = _SHARD
    for name, tensor in tensors.items():
        if tensor.end - tensor.start > room and shards[-1]:
            shards.append({})
            room = _SHARD
        shards[-1][name] = tensor
        room -= tensor.end - tensor.start
    count = len(shards)
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    if count == 1:
        files = ["model.safetensors"]
    for file, shard in zip(files, shards, strict=True):
        _write_shard(directory / file, shard)
    if count > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        total = sum(tensor.end - tensor.start for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2))


def _write_shard(file: Path, tensors: Mapping[str, StoredTensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.end - tensor.start
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns tensors
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            tensor.copy_to(out)


def check_directory(directory: Path, where: str, *, whole: bool = True) -> None:
    """Raise ValueError, with diagnosis and remedy, unless ``directory`` has a config.json and whole weights.

    Args:
        where: key and value for messages: ``model.path = some/model``.
        whole: refuse quantised weights, too.
    """
    key = where.partition(" = ")[0].strip("`")
    config_file = directory / "config.json"
    if not config_file.is_file():
        problem = _what_else(directory, key) or (
            "the directory has no config.json; expected a Hugging Face model directory"
        )
        raise ValueError(f"{where}: {problem}")
    if not any((directory / name).is_file() for name in _WEIGHTS):
        problem = _what_else(directory, key) or (
            "it has no weights; expected model.safetensors, or several with their index, next to config.json"
        )
        raise ValueError(f"{where}: {problem}")
    try:
        config = read_json(config_file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: its config.json cannot be read ({error}); download it again") from error
    try:
        problem = quantization(directory, config)
    except ValueError as error:  # from its weight files
        raise ValueError(f"{where}: {error}") from error
    if problem and whole:
        raise ValueError(f"{where}: {problem}")


def quantization(directory: Path, config: Any) -> str:
    """Return the error for a checkpoint with quantised weights; "": they are not quantised.

    Updates of quantised weights would be rounded away, and engine and trainer would have different weights.
    """
    method = ""
    for section in _sections(config):
        settings = section.get("quantization_config") or section.get("compression_config")
        if isinstance(settings, dict):
            bits = settings.get("bits") or ("4" if settings.get("load_in_4bit") else "")
            name = settings.get("quant_method") or settings.get("format") or "unknown method"
            method = f"{name}, {bits} bits" if bits else str(name)
    stored = stored_tensors(directory)  # even if the method is known: finds damaged files
    if not method:
        packed = ((name, tensor) for name, tensor in stored.items() if _is_packed(tensor))
        if (first := next(packed, None)) is None:
            return ""
        method = f"{first[0]} has type {first[1].dtype}"
    return (
        f"its weights are quantised ({method}), and quantised weights cannot be trained; use the checkpoint "
        "that it was made from (usually the name without -FP8, -AWQ, -GPTQ, -bnb-4bit), or de-quantise it "
        "once to two bytes a weight (transformers: model.dequantize(), save_pretrained); engines can sample "
        "with weights in 8 bits even so: `rollout.quantization`"
    )


def _is_packed(tensor: StoredTensor) -> bool:
    """Return whether ``tensor`` looks like quantised weights: a large matrix of integers or of 8-bit floats.

    Buffers are integers in many checkpoints, such as positions and causal masks, [1, 1, T, T].
    """
    is_mask = tensor.dtype == "BOOL" or tensor.shape[:2] == (1, 1)
    is_matrix = len(tensor.shape) > 1 and prod(tensor.shape) > 1 << 16
    return tensor.dtype not in _FLOATS and is_matrix and not is_mask


def _sections(config: Any) -> Iterator[dict[str, Any]]:
    if isinstance(config, dict):
        yield config
        for inner in config.values():
            yield from _sections(inner) if isinstance(inner, dict) else ()


def _what_else(directory: Path, key: str) -> str:
    """Diagnose a directory without a whole model, with a remedy; "": unknown contents."""
    here = sorted(os.listdir(directory))
    for describe in (_adapter, _run_files, _models_below, _sharded):
        if problem := describe(directory, here, key):
            return problem
    for pattern, problem in _FILES:
        if names := [name for name in here if re.fullmatch(pattern, name)]:
            return problem.format(name=names[0], gguf=describe_gguf(directory / names[0]))
    if "config.json" not in here and any(name in here for name in _WEIGHTS):
        return (
            "it has weights, but no config.json; copy config.json and the tokenizer's files from the model "
            "that it was trained from"
        )
    if any(re.fullmatch(r"optimizer\.(pt|bin)|scheduler\.pt|training_args\.bin", name) for name in here):
        return (
            "it holds the state of a trainer (optimizer, scheduler) without the model's weights; name the "
            "directory to which that trainer saved the model"
        )
    return ""


def _adapter(directory: Path, here: list[str], key: str) -> str:
    """Describe a directory with peft adapters."""
    if ADAPTER_CONFIG not in here:
        return ""
    try:
        base = str(read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path") or "")
    except (OSError, ValueError, AttributeError):
        base = ""
    what = f"it is a LoRA adapter of {base or 'another model'}, not a whole model"
    if key == "model.path":
        return f"{what}; set `model.path` to the model that it adapts and `model.adapter` to {directory}"
    return f"{what}; merge it (peft: merge_and_unload, save_pretrained) and name the result"


# A trainer's shards or states: regular expression of the file names, description, and how to make a model of
# them. `{dir}`: their directory.
_SHARDS = (
    (
        r"model_world_size_\d+_rank_\d+\.pt",
        "FSDP shards of verl",
        "python -m verl.model_merger merge --backend fsdp --local_dir {dir} --target_dir OUT",
    ),
    (
        r"zero_to_fp32\.py|.*_model_states\.pt|.*_optim_states\.pt|zero_pp_rank_.*",
        "shards of a DeepSpeed checkpoint",
        "python {dir}/zero_to_fp32.py {dir} OUT --safe_serialization, then copy config.json and the "
        "tokenizer's files of the model that it was trained from to OUT",
    ),
    (
        r"latest_checkpointed_iteration\.txt|mp_rank_\d+.*|model_optim_rng\.pt|dist_ckpt",
        "a Megatron checkpoint",
        "Megatron's or the trainer's converter to Hugging Face format (Megatron Bridge: "
        "AutoBridge.export_ckpt; verl: python -m verl.model_merger merge --backend megatron)",
    ),
    (
        r".*\.distcp|pytorch_model_fsdp_\d+",
        "shards of torch's distributed checkpoints (FSDP)",
        "accelerate merge-weights {dir} OUT, then copy config.json and the tokenizer's files of the model "
        "that it was trained from to OUT",
    ),
)
# Weights that transformers cannot load.
_FILES = (
    (r"(?i).*\.gguf", "it holds GGUF files; expected {gguf}"),
    (r"model_index\.json", "it is a diffusion pipeline, not a language model"),
    (
        r"consolidated.*|params\.json",
        "it holds weights in the format of the model's own authors (consolidated.*, params.json); use the "
        "checkpoint in Hugging Face format, which the same hub page or its -hf twin has",
    ),
    (r"tf_model\.h5", "it holds weights only for TensorFlow ({name}); expected safetensors"),
    (r"flax_model\.msgpack", "it holds weights only for Flax ({name}); expected safetensors"),
    (r"weights\.npz", "it holds weights only for MLX ({name}); expected safetensors"),
    (r".*\.onnx", "it holds weights only for ONNX ({name}); expected safetensors"),
)
_BELOW = re.compile(r"actor|policy|model|(global_)?step_?\d+|iter_\d+|checkpoint-\d+")  # folders of shards


def _sharded(directory: Path, here: list[str], key: str) -> str:
    """Describe a checkpoint of another trainer, here or one level below, as in global_step_100/actor."""
    below = [directory / name for name in here if _BELOW.fullmatch(name) and (directory / name).is_dir()]
    for level in (directory, *below):
        names = sorted(os.listdir(level))
        for pattern, what, remedy in _SHARDS:
            if any(re.fullmatch(pattern, name) for name in names):
                return f"it holds {what}, not a model; make one with {remedy.format(dir=level)}; name OUT"
    return ""


def describe_gguf(file: Path) -> str:
    """Describe what to use instead of the GGUF ``file``, whose weights are quantised for llama.cpp."""
    return (
        "the checkpoint in Hugging Face format that it was made from; where there is none, convert it once "
        f"(transformers: from_pretrained({str(file.parent)!r}, gguf_file={file.name!r}) of model and "
        "tokenizer, save_pretrained)"
    )


def _run_files(directory: Path, here: list[str], key: str) -> str:
    """Describe a run directory of this project, one of its checkpoints, or its checkpoints folder."""
    runs = [run for run in (directory, *directory.absolute().parents[:2]) if (run / "checkpoints").is_dir()]
    if not runs or not (directory == runs[0] or {"manifest.json", "checkpoints"} & {*here, directory.name}):
        return ""
    what = "the directory of a run" if directory == runs[0] else "a checkpoint of a run, for resuming it"
    if (model := runs[0] / "model").joinpath("config.json").is_file():
        return f"it is {what}, and the model of that run is in `model`; set `{key}` to {model}"
    return (
        f"it is {what}, and that run has not written its model yet; set `{key}` to {runs[0]}@latest or "
        f"{runs[0]}@STEP for a checkpoint, or run it to its end and set it to {model}"
    )


def _models_below(directory: Path, here: list[str], key: str) -> str:
    """Name the models and adapters in subfolders, as trainers write them at each checkpoint."""

    def latest(names: list[str]) -> Path:
        return directory / max(names, key=lambda name: [int(n) for n in re.findall(r"\d+", name)] or [-1])

    whole = [n for n in here if any((directory / n / file).is_file() for file in _WEIGHTS)]
    if models := [name for name in whole if (directory / name / "config.json").is_file()]:
        return (
            f"it holds no model, but these folders do: {', '.join(models[:5])}; set `{key}` to one, e.g. "
            f"{latest(models)}"
        )
    if adapters := [name for name in here if (directory / name / ADAPTER_CONFIG).is_file()]:
        return (
            f"it holds no model, but LoRA adapters in {', '.join(adapters[:5])}; set `model.path` to the "
            f"model that they adapt and `model.adapter` to one, e.g. {latest(adapters)}"
        )
    return ""


def cache_dir() -> Path:
    """Return ``GRPO_DIST_CACHE``, or ~/.cache/grpo-dist if it is not set."""
    return Path(os.environ.get("GRPO_DIST_CACHE") or Path.home() / ".cache" / "grpo-dist")


def cached_path(label: str, decides: dict[str, Any]) -> Path:
    """Return the directory that `cached` fills; it may not exist yet."""
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / f"{label}-{digest}"


def cached(label: str, decides: dict[str, Any], make: Callable[[Path], None]) -> Path:
    """Return the directory that ``make`` fills for ``decides``; call it only the first time. The directory is
    complete or absent, whenever the process dies.
    """
    final = cached_path(label, decides)
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(final.parent)
    partial = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent))
    try:
        make(partial)
        try:
            publish(partial, final)
        except OSError:
            if not final.is_dir():  # else another process has made the same one
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def _remove_abandoned(cache: Path) -> None:
    """Remove the partial directories of killed processes. Judges by age: a lock would not show the processes
    of other nodes on every file system.
    """
    for partial in cache.glob(f".*-{'[0-9a-f]' * 16}-*"):
        with suppress(FileNotFoundError):  # another process has finished or removed it
            if partial.stat().st_mtime < time.time() - _ABANDONED_S:
                shutil.rmtree(partial, ignore_errors=True)


def check_on_node(model_dir: str | Path) -> None:
    """Raise ValueError if this node lacks ``model_dir``, which the driver's node has."""
    if Path(model_dir).is_dir():
        return
    caches = ("HF_HOME", "GRPO_DIST_CACHE")
    here = ", ".join(f"{name}={os.environ.get(name) or 'not set'}" for name in caches)
    raise ValueError(
        f"model directory {model_dir}: node {platform.node()} does not have it, and the driver does; put it "
        "on storage that all nodes see, or set HF_HOME (downloads) and GRPO_DIST_CACHE (models made here) to "
        f"directories there, for the driver and all nodes (this one has {here})"
    )


def fingerprint(path: Path) -> str:
    """Hash a file by its contents, or a directory by the names, sizes and times of its files."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files = sorted(p for p in path.rglob("*") if p.is_file())
    entries = [(str(p.relative_to(path)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def weights_digest(model_dir: Path) -> str:
    """Hash names, sizes and samples of the weight files of a model: a copy, or the same revision downloaded
    again, has the same hash, unlike in `fingerprint`.
    """
    digest = hashlib.sha256()
    files = list(model_dir.glob("*.safetensors")) or list(model_dir.glob("pytorch_model*.bin"))
    for path in sorted(path for path in files if not path.name.startswith("consolidated")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(size * i // _SAMPLES)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:16]
