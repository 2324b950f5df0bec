"""Checks that a directory holds a trainable language model, and returns the directory that workers load.
Extracts the text model of a vision-language checkpoint, and restores the checkpoint on export.

A checkpoint such as Gemma 3's wraps a text model:

    checkpoint                                     text model
    language_model.model.layers.0...     <->       model.layers.0...
    language_model.lm_head.weight        <->       lm_head.weight, unless tied to the embedding
    vision_tower..., projector...        <->       wrapper/model.safetensors

A run trains the text model: engine, reference and adapters see nothing else. An export has its weights under
the names of the checkpoint, and all other weights byte for byte.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from grpo_dist.policy.checkpoint_format import CheckpointFormat
from grpo_dist.policy.lora import base_weights
from grpo_dist.policy.weight_buckets import ParameterSpec
from grpo_dist.runtime.files import read_json
from grpo_dist.runtime.model_files import (
    StoredTensor,
    cached,
    check_directory,
    fingerprint,
    stored_tensors,
    write_tensors,
)

_VERSION = 1  # file format; raise it when the files that this module writes change
_WRAPPER = "wrapper"  # folder in the text model's directory: all other weights, and the names
_NOTE = "text.json"  # where the checkpoint is, its names, and the module that is the text model's decoder
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_TEXT = "model."  # name of the decoder in transformers' text models
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pth", "*.gguf")
# Suffixes of architectures with another head, which loading would replace by a random LM head.
_HEADS = {
    "ForSequenceClassification": "a classifier, such as a reward model",
    "ForTokenClassification": "a classifier of tokens, such as a process reward model",
    "ForQuestionAnswering": "a model that marks answers",
    "ForMaskedLM": "a model that fills in masked tokens",
    "RewardModel": "a reward model",
}


def text_model(directory: Path, config: Any, where: str) -> Path:
    """Extract the text model of ``directory`` into a cached directory, which needs as much disk.

    Args:
        config: transformers' configuration of the whole.
        where: the key and its value, for messages: ``model.path = some/model``.

    Raises:
        ValueError: the text model cannot be extracted.
    """
    cache_key = {"version": _VERSION, "directory": str(directory), "files": fingerprint(directory)}

    def write(folder: Path) -> None:
        try:
            _separate(directory, folder, config)
        except _Inseparable as error:
            raise ValueError(
                f"{where}: a {config.model_type} model, and only the text model inside can be trained, which "
                f"cannot be extracted: {error}; use the text model's own checkpoint, or a wrapper such "
                "as Gemma 3, Mistral 3 or Qwen3.5"
            ) from error

    return cached(f"text-{directory.name}", cache_key, write)


def _separate(directory: Path, target: Path, config: Any) -> None:
    """Write the text model of ``directory`` to ``target``, the rest to its folder. Raises _Inseparable."""
    text, stored = deepcopy(config.get_text_config()), stored_tensors(directory)
    model_class = _text_class(text)
    prefix, head = _decoder_and_head(stored)
    # Tie as transformers does on loading: a stored head that differs is not tied.
    tied = head is None or (config.tie_word_embeddings and stored[head].equals(stored[prefix + _EMBEDDING]))
    text.tie_word_embeddings = tied
    names = {name: _TEXT + name.removeprefix(prefix) for name in stored if name.startswith(prefix)}
    if head is not None:
        names[head] = _TEXT + _EMBEDDING if tied else _HEAD
    model = _check_whole(model_class, text, set(names.values()))
    text.architectures = [model_class.__name__]
    for key in ("dtype", "bos_token_id", "eos_token_id", "pad_token_id"):
        if (value := getattr(config, key, None)) is not None:  # the wrapper's value, if any
            setattr(text, key, value)
    note = {"checkpoint": str(directory), "names": names, "decoder": _find_decoder(model.model, config)}
    _write_text(directory, target, text, stored, names)
    _write_rest(directory, target / _WRAPPER, stored, note)


def read_wrapper_type(model_dir: Path) -> str:
    """Return the model type of the checkpoint that wraps the text model in ``model_dir``; "": none does."""
    file = model_dir / _WRAPPER / "config.json"
    return str(read_json(file)["model_type"]) if file.is_file() else ""


def find_wrapper(model_dir: Path) -> tuple[str, str] | None:
    """Return the checkpoint that wraps the text model in ``model_dir``, and the prefix that replaces `model.`
    in its module names; None: nothing wraps it, or the names are unknown.
    """
    file = model_dir / _WRAPPER / _NOTE
    note = read_json(file) if file.is_file() else {"decoder": ""}
    return (note["checkpoint"], f"{note['decoder']}.") if note["decoder"] else None


def _find_decoder(decoder: Any, config: Any) -> str:
    """Return the name of the wrapper's module that is ``decoder``; "": the wrapper cannot be built here."""
    from transformers import AutoModelForImageTextToText

    try:
        with torch.device("meta"):
            whole = AutoModelForImageTextToText.from_config(config)
    except (ImportError, ValueError):  # packages for images are missing, or it reads no images
        return ""
    return next((name for name, module in whole.named_modules() if type(module) is type(decoder)), "")


class _Inseparable(Exception):
    """Why a text model cannot be extracted from a checkpoint."""


def _text_class(text: Any) -> Any:
    """Return transformers' class for the configuration ``text``."""
    from transformers import AutoModelForCausalLM  # slow to import

    if type(text) not in AutoModelForCausalLM._model_mapping:
        raise _Inseparable(f"transformers has no causal language model of type {text.model_type}")
    return AutoModelForCausalLM._model_mapping[type(text)]


def _decoder_and_head(stored: Mapping[str, StoredTensor]) -> tuple[str, str | None]:
    """Return the prefix of the decoder's names, and the name of the head; None: there is none."""
    if not stored:
        raise _Inseparable("its weights are not safetensors")
    prefixes = [
        name.removesuffix(_EMBEDDING)
        for name in stored
        if name.endswith(_EMBEDDING) and name.removesuffix(_EMBEDDING) + "norm.weight" in stored
    ]
    heads = [name for name in stored if name == _HEAD or name.endswith(f".{_HEAD}")]
    if len(prefixes) != 1 or len(heads) > 1:
        raise _Inseparable("its names show no single decoder with embedding, layers and norm")
    return prefixes[0], next(iter(heads), None)


def _check_whole(model_class: Any, text: Any, names: set[str]) -> Any:
    """Return the text model without weights. Raises _Inseparable unless ``names`` are all of its weights,
    with experts fused or one by one.
    """
    with torch.device("meta"):
        model = model_class(text)
    parameters = {name: ParameterSpec.from_tensor(name, tensor) for name, tensor in base_weights(model)}
    stored_as = {
        name: {spec.name for spec in specs}
        for name, specs in CheckpointFormat(model, parameters).specs.items()
    }
    if unknown := sorted(names - set(stored_as).union(*stored_as.values())):
        raise _Inseparable(f"transformers' text model has no {unknown[0]}")
    if missing := [name for name, ways in stored_as.items() if not (name in names or ways <= names)]:
        raise _Inseparable(f"the checkpoint has no {missing[0]}")
    return model


def _write_text(
    source: Path, target: Path, text: Any, stored: Mapping[str, StoredTensor], names: Mapping[str, str]
) -> None:
    """Write the text model: its weights, configuration, and other files beside them, e.g. the tokenizer."""
    for file in source.iterdir():
        if file.is_file() and not any(map(file.match, (*_WEIGHTS, "*processor_config.json"))):
            shutil.copyfile(file, target / file.name)
    write_tensors(target, {names[name]: tensor for name, tensor in stored.items() if name in names})
    text.save_pretrained(target)


def _write_rest(
    source: Path, wrapper: Path, stored: Mapping[str, StoredTensor], note: Mapping[str, Any]
) -> None:
    """Write all that an export needs beside the text model's weights."""
    wrapper.mkdir()
    for file in (source / "config.json", *source.glob("*processor_config.json")):
        shutil.copyfile(file, wrapper / file.name)
    write_tensors(wrapper, {name: tensor for name, tensor in stored.items() if name not in note["names"]})
    (wrapper / _NOTE).write_text(json.dumps(note))


def keep_wrapper(model_dir: Path, trained: Path) -> None:
    """Copy what an export needs from ``model_dir`` to ``trained``, a text model trained from it and to be
    trained further. Does nothing if `text_model` did not make ``model_dir``.
    """
    if read_wrapper_type(model_dir):
        shutil.copytree(model_dir / _WRAPPER, trained / _WRAPPER)


def restore_wrapper(model_dir: Path, export: Path) -> None:
    """Turn ``export``, a text model trained from ``model_dir``, into the whole checkpoint again. Does nothing
    if `text_model` did not make ``model_dir``.
    """
    wrapper = model_dir / _WRAPPER
    if not read_wrapper_type(model_dir):
        return
    trained, names = stored_tensors(export), read_json(wrapper / _NOTE)["names"]
    whole = {name: trained[text] for name, text in names.items()} | stored_tensors(wrapper)
    config, dtype = read_json(wrapper / "config.json"), read_json(export / "config.json").get("dtype")
    for section in (config, config.get("text_config")):
        for key in {"dtype", "torch_dtype"} & set(section or ()):
            section[key] = dtype  # the trained weights' dtype
    trained_files = [*export.glob("*.safetensors"), *export.glob("*.safetensors.index.json")]
    with tempfile.TemporaryDirectory(dir=export) as folder:
        write_tensors(Path(folder), whole)
        for file in trained_files:
            file.unlink()
        for file in Path(folder).iterdir():
            file.rename(export / file.name)
    for file in wrapper.glob("*processor_config.json"):
        shutil.copyfile(file, export / file.name)
    (export / "config.json").write_text(json.dumps(config, indent=2))


def usable_model(
    directory: Path,
    where: str,
    say: Callable[[str], None],
    *,
    trust_remote_code: bool = False,
    trains: bool = True,
) -> Path:
    """Return ``directory``, or the directory of its extracted text model, which ``say`` reports.

    Args:
        where: the key and its value, for messages: ``model.path = some/model``.
        trains: False for models that only sample, also with quantised weights.

    Raises:
        ValueError: ``directory`` holds no model, or a model that cannot be trained.
    """
    check_directory(directory, where, whole=trains)
    settings = read_json(directory / "config.json")
    if not isinstance(settings, dict) or (trust_remote_code and "auto_map" in settings):
        return directory  # an invalid configuration is refused where it is read
    for name in settings.get("architectures") or ():
        for end, what in _HEADS.items():
            if str(name).endswith(end):
                raise ValueError(f"{where}: {name} is {what}, and has no LM head; use a causal LM")
    config = _read_config(directory, settings, where)
    if config is None or config.get_text_config() is config:
        return directory
    text_directory = text_model(directory, config, where)
    say(
        f"{where}: {read_wrapper_type(text_directory)} wraps a text model, which is trained; all other "
        f"weights stay unchanged and are in the export (the text model is copied to {text_directory})"
    )
    return text_directory


def _read_config(directory: Path, settings: dict[str, Any], where: str) -> Any:
    """Return transformers' configuration; None if ``settings`` name no type. Raises ValueError for a type
    that is not a decoder.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # slow to import
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = settings.get("model_type")
    if not kind:
        return None
    if kind not in CONFIG_MAPPING_NAMES:
        remedy = "set model.trust_remote_code=true if you trust the code it brings"
        raise ValueError(
            f"{where}: config.json has model_type = {kind}, which transformers {version('transformers')} "
            f"does not know; {remedy if 'auto_map' in settings else 'use another model'}"
        )
    try:
        config = AutoConfig.from_pretrained(directory)
    except Exception as error:  # for damaged files, libraries raise whatever error their code runs into
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"{where}: its config.json is no configuration of {kind} ({reason}); download it again"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{where}: {kind} is an encoder with a decoder; use a causal language model")
    if config.get_text_config() is config and type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"{where}: {kind} is no causal language model that transformers {version('transformers')} has; "
            "use a model such as Qwen, Llama, Mistral or Gemma"
        )
    return config
