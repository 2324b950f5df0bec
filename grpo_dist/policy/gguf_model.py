"""Converts a GGUF file, the format of llama.cpp, into a plain Hugging Face directory with float32 weights.

The directory is what a run trains and what the engine loads: safetensors, config.json, and a tokenizer with
its chat template. transformers reads the file; what it leaves out is added here:

    pre-tokenizer   it does not know every name in `tokenizer.ggml.pre`, and splits text by a default then.
                    Digits of `smollm`, for one, are split one by one.
    tied head       a head that is the embedding is written once, as training and export write it.
    file_type       quantised weights lose precision for good; `loss_of` returns how many bits were left.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from grpo_dist.runtime.hardware import quiet_libraries
from grpo_dist.runtime.model_files import cached, fingerprint

_VERSION = 1  # of the files this module writes; raise it when they change
_NOTE = "gguf.json"  # in the directory: the file's name, and what its quantisation lost
# llama.cpp's names of pre-tokenizers (src/llama-vocab.cpp) whose rules transformers does not have.
_SPLIT_LIKE_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")  # as llama.cpp names them
_WHOLE = ("F32", "F16", "BF16", "F64")  # types that are not quantised


def is_gguf(path: str) -> bool:
    """Return whether ``path`` names a GGUF file."""
    return path.lower().endswith(".gguf")  # some files of the hub are .GGUF


def gguf_model(file: Path, where: str) -> Path:
    """Return the directory that ``file`` was converted to, cached by the file's contents.

    ``where``: the key and its value, for messages: ``model.path = model.gguf``. Raises ValueError for a file
    that is missing, damaged, one part of several, or of an architecture or tokenizer that is not known.
    """
    _check_file(file, where)
    decides = {"version": _VERSION, "file": fingerprint(file)}
    label = re.sub(r"[^\w.-]", "_", file.stem)
    return cached(f"gguf-{label}", decides, lambda directory: write_model(file, directory, where))


def loss_of(model_dir: Path) -> str | None:
    """Return what quantisation has cost the weights in ``model_dir``, as one line; None for a directory that
    is not from a GGUF file, or from one that is not quantised.
    """
    note = model_dir / _NOTE
    return json.loads(note.read_text())["loss"] if note.is_file() else None


def gguf_config(file: Path, where: str) -> dict[str, Any]:
    """Return the Hugging Face configuration of ``file`` without its weights. Raises as `gguf_model`."""
    from transformers import AutoConfig  # slow to import

    _check_file(file, where)
    require_package(where)
    try:
        config: dict[str, Any] = AutoConfig.from_pretrained(file.parent, gguf_file=file.name).to_dict()
    except Exception as error:
        raise _unreadable(where, error) from error
    return config


def write_model(file: Path, directory: Path, where: str) -> None:
    """Convert ``file`` into ``directory``, which exists. Raises as `gguf_model`."""
    require_package(where)
    quiet_libraries()
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    try:
        tensors, pre_tokenizer = _read_header(file, where)
        tokenizer = _tokenizer(file, pre_tokenizer, where)
        with redirect_stderr(StringIO()):  # a progress bar that no setting of transformers turns off
            model, loaded = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
            )
    except _Refused:
        raise
    except Exception as error:  # for damaged files, the readers raise whatever error their code runs into
        raise _unreadable(where, error) from error
    _check(model, tokenizer, loaded["missing_keys"], sum(tensors.values()), where)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        for name in model.all_tied_weights_keys:
            weights.pop(name, None)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    config.architectures = [type(model).__name__]
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights written here are not quantised
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / _NOTE).write_text(json.dumps({"file": file.name, "loss": _loss(file.name, tensors)}))


class _Refused(ValueError):
    """A file that can be read, but not be used."""


def _check_file(file: Path, where: str) -> None:
    """Raise ValueError for a file that does not exist, or that is one of several parts of a model."""
    part = _PART.fullmatch(file.name)
    if part and int(part["count"]) > 1:
        raise ValueError(
            f"{where}: this is part {int(part['number'])} of {int(part['count'])} of a split GGUF file, and "
            "parts are not read together. Make one file of them with llama.cpp, `llama-gguf-split --merge "
            f"{part['stem']}-00001-of-{part['count']}.gguf {part['stem']}.gguf`, and name that; or give the "
            "model as a Hugging Face directory"
        )
    if not file.is_file():
        raise ValueError(f"{where}: no such file; expected a GGUF file")


def require_package(where: str) -> None:
    """Raise ValueError where the package that reads GGUF files is missing."""
    try:
        import gguf  # noqa: F401  # only for GGUF files
    except ImportError as error:
        raise ValueError(
            f"{where}: GGUF files need the package gguf, which this environment lacks; pip install gguf"
        ) from error


def _unreadable(where: str, error: Exception) -> ValueError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return ValueError(
        f"{where}: the GGUF file cannot be converted ({reason}); if it is damaged, download it again; if its "
        "architecture is not supported, give the model as a Hugging Face directory"
    )


def _read_header(file: Path, where: str) -> tuple[Counter[tuple[str, float]], str | None]:
    """Return the weights of each tensor type, with its bits per weight, and the name of the pre-tokenizer of
    a byte-level BPE; None: the tokenizer is of another kind.
    """
    from gguf import GGUFReader

    reader = GGUFReader(file)
    counts: Counter[tuple[str, float]] = Counter()
    for tensor in reader.tensors:
        bits = 8 * int(tensor.n_bytes) / int(tensor.n_elements)
        counts[tensor.tensor_type.name, bits] += int(tensor.n_elements)
    fields = {name: field.contents() for name, field in reader.fields.items() if "tokens" not in name}
    for name, value in fields.items():
        if name.endswith(".rope.scaling.type") and value != "none":
            raise _Refused(
                f"{where}: {name} = {value}, and transformers does not read the scaling of positions from "
                "GGUF files; give the model as a Hugging Face directory"
            )
    if fields.get("tokenizer.ggml.model") != "gpt2":
        return counts, None
    return counts, str(fields.get("tokenizer.ggml.pre", "gpt-2"))


def _tokenizer(file: Path, pre_tokenizer: str | None, where: str) -> Any:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    supported = (*_SPLIT_LIKE_GPT2, *_SINGLE_DIGITS)
    if pre_tokenizer in GGUF_PRE_TOKENIZER_SPLITS or pre_tokenizer is None:
        return tokenizer
    if pre_tokenizer not in supported:
        choices = ", ".join(sorted({*GGUF_PRE_TOKENIZER_SPLITS, *supported}))
        raise _Refused(
            f"{where}: its pre-tokenizer, tokenizer.ggml.pre = {pre_tokenizer}, is not known, so text would "
            f"become other tokens than those the model was trained on; known are {choices}. Give the model "
            "as a Hugging Face directory"
        )
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if pre_tokenizer in _SINGLE_DIGITS:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def _check(model: Any, tokenizer: Any, missing: Iterable[str], count: int, where: str) -> None:
    """Raise ValueError for a ``model`` that is not all ``count`` weights of its file, or lacks some."""
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    if lacking := sorted(set(missing) - tied):
        raise ValueError(
            f"{where}: the file lacks {len(lacking)} of the model's tensors, e.g. {lacking[0]}; it is "
            "damaged or of an architecture that is read only in part"
        )
    if (read := sum(weight.numel() for weight in model.parameters())) != count:
        raise ValueError(
            f"{where}: the file holds {count:,} weights, of which transformers reads {read:,} (scaled "
            "positions of Llama 3.1, for one, it does not read); give the model as a Hugging Face directory"
        )
    vocabulary = model.config.get_text_config().vocab_size
    if len(tokenizer) > vocabulary:
        raise ValueError(
            f"{where}: the tokenizer has {len(tokenizer)} tokens and the model {vocabulary}; the file's "
            "tokenizer is not the model's"
        )
    for name, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise ValueError(f"{where}: {name} has values that are not finite; download the file again")


def _loss(name: str, tensors: Counter[tuple[str, float]]) -> str | None:
    """Describe the tensor types of the file ``name``; None where no tensor is quantised."""
    if all(kind in _WHOLE for kind, _ in tensors):
        return None
    total = sum(tensors.values())
    mean = sum(bits * count for (_, bits), count in tensors.items()) / total
    parts = ", ".join(
        f"{kind}: {count / 1e6:,.1f} M of {bits:g} bits"
        for (kind, bits), count in sorted(tensors.items(), key=lambda item: -item[1])
        if kind not in _WHOLE
    )
    return (
        f"{name}: quantised weights, {mean:.1f} bits per weight in the mean ({parts}); what rounding lost is "
        "lost, and the de-quantised float32 weights are what is trained"
    )
