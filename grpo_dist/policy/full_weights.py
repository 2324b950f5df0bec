"""Full tensors of a sharded policy: for the rollout engines, and as a model in Hugging Face format.

An export lists its files in `.export.json`, which model loaders do not read. So a later export to the same
directory knows what it may delete, including any files of the tokenizer and of custom model code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from grpo_dist.chat.ends import sample_ends
from grpo_dist.chat.template import read_tokenizer
from grpo_dist.config import PolicyConfig
from grpo_dist.policy.checkpoint_format import CheckpointFormat, owners
from grpo_dist.policy.lora import adapter_parameters, adapters, base_weights, find_base_model, write_adapter
from grpo_dist.policy.text_model import find_wrapper, restore_wrapper
from grpo_dist.policy.weight_buckets import ParameterSpec, make_buckets
from grpo_dist.runtime.files import clear, keep_backup, publish, read_json, write_text

_ADAPTER = "adapter"
EXPORT_LIST = ".export.json"
_SHARD = "5GB"  # per file: a reader maps a whole file into memory


def write_model(
    model: Any,
    weights: dict[str, Tensor],
    low_rank: dict[str, Tensor],
    directory: Path,
    tokenizer_dir: str,
    trust_remote_code: bool,
) -> None:
    """Write ``weights`` of ``model`` (safetensors) with its tokenizer, any ``low_rank`` adapters to
    `adapter`, and the list of all files. The directory appears only when it is complete. It replaces an
    earlier export; anything else there is backed up, see `keep_backup`.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    clear(partial)
    model.config.use_cache = True  # off while training
    save_pretrained(model, partial, weights)
    model.config.use_cache = False
    tokenizer = _write_tokenizer(partial, tokenizer_dir, trust_remote_code)
    if getattr(tokenizer, "chat_template", None):
        _name_ends(partial, sample_ends(tokenizer, templated=True).ids)
    restore_wrapper(Path(tokenizer_dir), partial)
    if low_rank:
        _write_low_rank(model, low_rank, partial / _ADAPTER, Path(tokenizer_dir))
    _list_files(partial)
    if why_no_export(directory):  # also for files added during this export, which takes minutes
        keep_backup(directory)
    clear(directory)
    publish(partial, directory)


def write_adapter_alone(
    model: Any, low_rank: dict[str, Tensor], directory: Path, tokenizer_dir: str, trust_remote_code: bool
) -> None:
    """Write only the ``low_rank`` adapters of ``model``, in peft's format, with the tokenizer and the list of
    all files, to the new ``directory``.
    """
    _write_low_rank(model, low_rank, directory, Path(tokenizer_dir))
    _write_tokenizer(directory, tokenizer_dir, trust_remote_code)
    _list_files(directory)


def _write_tokenizer(directory: Path, tokenizer_dir: str, trust_remote_code: bool) -> Any:
    tokenizer = read_tokenizer(tokenizer_dir, trust_remote_code=trust_remote_code)
    tokenizer.save_pretrained(directory)
    return tokenizer


def _write_low_rank(model: Any, low_rank: dict[str, Tensor], directory: Path, model_dir: Path) -> None:
    base, decoder = find_wrapper(model_dir) or (find_base_model(model_dir), "")
    write_adapter(model, low_rank, directory, base_model=_name_on_hub(base), decoder=decoder)


def _name_on_hub(model_dir: str) -> str:
    """Return the hub id of a directory in the hub's cache, which other machines know; else the directory.

    .../models--Qwen--Qwen3-4B/snapshots/1cfa9a7 -> Qwen/Qwen3-4B
    """
    match = re.search(r"/models--([^/]+)/snapshots/[^/]+$", model_dir)
    return match[1].replace("--", "/") if match else model_dir


def _list_files(directory: Path) -> None:
    files = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir())
    (directory / EXPORT_LIST).write_text(json.dumps({"files": files}, indent=1))


def add_file(directory: Path, name: str, text: str) -> None:
    """Write the file ``name`` into the export in ``directory``, and add it to the export's list."""
    write_text(directory / name, text)
    listed = read_json(directory / EXPORT_LIST)
    files = sorted({*listed["files"], name})
    write_text(directory / EXPORT_LIST, json.dumps(listed | {"files": files}, indent=1))


def record_origin(directory: Path, origin: Mapping[str, Any]) -> None:
    """Record in the export's list what the export in ``directory`` was made from."""
    listed = read_json(directory / EXPORT_LIST) | {"origin": origin}
    write_text(directory / EXPORT_LIST, json.dumps(listed, indent=1))


def is_export_from(directory: Path, origin: Mapping[str, Any]) -> bool:
    """Return whether ``directory`` holds the export made from ``origin``, with all its files and no more."""
    try:
        is_same = read_json(directory / EXPORT_LIST)["origin"] == origin
    except (OSError, ValueError, TypeError, KeyError):
        return False
    listed = _listed_files(directory)
    return is_same and why_no_export(directory) == "" and all(path.is_file() for path in listed)


def _name_ends(directory: Path, ids: Collection[int]) -> None:
    """Add ``ids``, which ended samples in training, to eos_token_id in generation_config.json: other engines
    stop only there.
    """
    file = directory / "generation_config.json"
    settings = read_json(file) if file.is_file() else {}
    named = settings.get("eos_token_id")
    end_ids = named if isinstance(named, list) else [] if named is None else [named]
    if missing := sorted(set(ids) - set(end_ids)):
        file.write_text(json.dumps(settings | {"eos_token_id": [*end_ids, *missing]}, indent=2))


def why_no_export(directory: Path) -> str:
    """Return why ``directory``, which a new export would delete, is not an earlier export; "": it is.

    An empty or missing directory has nothing to lose.
    """
    if directory.is_symlink():
        return "it is a link"
    if not directory.exists():
        return ""
    if not directory.is_dir():
        return "it is a file"
    if directory.is_mount():
        return "it is a mount point"
    listed = _listed_files(directory)
    for path in sorted(directory.rglob("*")):
        if path.is_symlink() or not (path.is_dir() or path in listed):
            return f"no export wrote its {path.relative_to(directory)}"
    return ""


def _listed_files(directory: Path) -> set[Path]:
    """Return the files in an export's list, and the list itself; none if it cannot be read."""
    try:
        listing = read_json(directory / EXPORT_LIST)
        return {directory / name for name in (EXPORT_LIST, *listing["files"])}
    except (OSError, ValueError, TypeError, KeyError):
        return set()


def save_pretrained(model: Any, directory: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write ``model`` to ``directory`` with ``weights`` (None: its own) and its unchanged generation config.

    transformers loads a generation config such as `{"temperature": 0.6}`, without `do_sample`, with a
    warning, but refuses to save it. Nothing here samples with it, so it must not fail the save.
    """
    from transformers import GenerationConfig  # slow to import
    from transformers.utils import GENERATION_CONFIG_NAME  # slow to import

    generation_config = model.generation_config if model.can_generate() else None
    try:
        if generation_config is not None:
            model.generation_config = GenerationConfig()
        model.save_pretrained(directory, state_dict=weights, safe_serialization=True, max_shard_size=_SHARD)
    finally:
        if generation_config is not None:
            model.generation_config = generation_config
    if generation_config is not None:
        generation_config.to_json_file(directory / GENERATION_CONFIG_NAME, keys_to_pop=["compile_config"])


class FullWeights:
    """The weights of ``model`` (transformers), which ``policy`` shards. Raises ValueError for a model whose
    checkpoint joins several parameters in one tensor.
    """

    def __init__(self, model: Any, policy: PolicyConfig) -> None:
        self._model = model
        self._zero3 = policy.zero_stage == 3
        self._lora_scale = policy.lora.scale if policy.lora else 0.0
        self._format = CheckpointFormat(model, self._parameters())

    def named_weights(self, adapters_only: bool = False) -> Sequence[tuple[str, Tensor]]:
        """Return (name as in the checkpoint, tensor), each once; or the low-rank adapters, which no
        checkpoint has.
        """
        return (adapter_parameters if adapters_only else base_weights)(self._model)

    def specs(self, *, adapters_only: bool = False, as_held: bool = False) -> list[ParameterSpec]:
        """Return what `buckets` yields, in order: every parameter once, tied ones under the checkpoint's
        name.
        """
        return [spec for specs in self._specs(adapters_only, as_held).values() for spec in specs]

    def buckets(
        self, bucket_bytes: int, *, adapters_only: bool = False, as_held: bool = False
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield full tensors, bucket by bucket, each valid until the next one. Collective under ZeRO-3.

        These are a checkpoint's tensors, with low-rank adapters merged into copies, or only the adapters.

        Args:
            bucket_bytes: size of a bucket; a larger tensor gets a separate bucket.
            as_held: yield the parameters as in transformers' model, even if its checkpoint renames them or
                splits fused experts.
        """
        parameters = dict(self.named_weights(adapters_only))
        low_rank = {} if adapters_only else adapters(self.named_weights(adapters_only=True))
        specs, plain = self._specs(adapters_only, as_held), adapters_only or as_held
        owner, left = owners(specs), dict.fromkeys(specs)
        pending: dict[str, Tensor] = {}  # gathered, not yet sent
        for bucket in make_buckets([spec for tensors in specs.values() for spec in tensors], bucket_bytes):
            names = [name for name in dict.fromkeys(owner[spec.name] for spec in bucket) if name in left]
            bucket_adapters = {name: low_rank[name] for name in names if name in low_rank}
            gathered = [parameters[name] for name in names]
            with self.gathered(
                [*gathered, *(t for adapter in bucket_adapters.values() for t in (adapter.a, adapter.b))]
            ):
                for name, p in zip(names, gathered, strict=True):
                    del left[name]
                    value = (
                        bucket_adapters[name].merged_into(p.data, self._lora_scale)
                        if name in bucket_adapters
                        else p.data
                    )
                    pending |= {name: value} if plain else self._format.tensors(name, value)
                yield [(spec.name, pending.pop(spec.name)) for spec in bucket]
                if gathered and self._zero3:  # ZeRO-3 releases the parameters here
                    pending = {name: t.clone() for name, t in pending.items()}

    def gathered(self, parameters: list[Tensor]) -> Any:
        """Return a context in which this rank has the full ``parameters``. Collective under ZeRO-3."""
        if not self._zero3:
            return nullcontext()
        import deepspeed  # optional: only ranks need it

        return deepspeed.zero.GatheredParameters(parameters)

    def export(
        self, directory: Path, *, tokenizer_dir: str, trust_remote_code: bool, bucket_bytes: int = 1 << 28
    ) -> None:
        """Write the model in Hugging Face format (safetensors) with its tokenizer, from rank 0. Collective.

        Trained low-rank adapters are merged into it, and also written to `adapter` in peft's format.
        """
        whole = self._collect_on_first_rank(self.buckets(bucket_bytes, as_held=True))
        low_rank = self._collect_on_first_rank(self.buckets(bucket_bytes, adapters_only=True))
        if dist.get_rank() == 0:
            write_model(self._model, whole, low_rank, directory, tokenizer_dir, trust_remote_code)
        dist.barrier()  # bounded: the process group has a deadline

    def _collect_on_first_rank(self, buckets: Iterator[list[tuple[str, Tensor]]]) -> dict[str, Tensor]:
        """Copy ``buckets`` to this host's memory; return nothing on other ranks, which only gather."""
        keeps = dist.get_rank() == 0
        return {name: t.detach().cpu().clone() for bucket in buckets for name, t in bucket if keeps}

    def _specs(self, adapters_only: bool, as_held: bool) -> dict[str, list[ParameterSpec]]:
        """Return what `buckets` yields for each parameter."""
        if not (adapters_only or as_held):
            return self._format.specs
        return {name: [spec] for name, spec in self._parameters(adapters_only).items()}

    def _parameters(self, adapters_only: bool = False) -> dict[str, ParameterSpec]:
        return {
            name: ParameterSpec.from_tensor(name, p, getattr(p, "ds_shape", None))
            for name, p in self.named_weights(adapters_only)
        }
