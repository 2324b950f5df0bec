"""Whether a directory holds a language model that can be trained, and the directory that workers load."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_dist.policy.text_model import text_model, wrapper_of
from grpo_dist.runtime.json_files import read_json
from grpo_dist.runtime.model_files import check_directory

# Ends of the names of architectures with another head, which would be replaced by a random one.
_HEADS = {
    "ForSequenceClassification": "a classifier, such as a reward model",
    "ForTokenClassification": "a classifier of tokens, such as a process reward model",
    "ForQuestionAnswering": "a model that marks answers",
    "ForMaskedLM": "a model that fills in masked tokens",
    "RewardModel": "a reward model",
}


def usable_model(
    directory: Path,
    where: str,
    say: Callable[[str], None],
    *,
    trust_remote_code: bool = False,
    trains: bool = True,
) -> Path:
    """Return ``directory``, or that of the text model that was taken out of it, which ``say`` tells.

    Args:
        where: the key and its value, for messages: ``model.path = some/model``.
        trains: False for what samples alone, also from quantised weights.

    Raises:
        ValueError: with one message for what is no model, or none that can be trained.
    """
    check_directory(directory, where, whole=trains)
    settings = read_json(directory / "config.json")
    if not isinstance(settings, dict) or (trust_remote_code and "auto_map" in settings):
        return directory  # what is no configuration is refused where it is read
    for name in settings.get("architectures") or ():
        for end, what in _HEADS.items():
            if str(name).endswith(end):
                raise ValueError(f"{where}: {name} is {what}, and has no LM head; use a causal LM")
    config = _known_config(directory, settings, where)
    if config is None or config.get_text_config() is config:
        return directory
    made = text_model(directory, config, where)
    say(
        f"{where}: {wrapper_of(made)} wraps a text model, which is trained; the other weights stay as they "
        f"are and are in the export (the text model is copied to {made})"
    )
    return made


def _known_config(directory: Path, settings: dict[str, Any], where: str) -> Any:
    """Return transformers' configuration; None where it names no type. Raises ValueError for a type that is
    no decoder.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # slow to import
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = settings.get("model_type")
    if not kind:
        return None
    if kind not in CONFIG_MAPPING_NAMES:
        own = "set model.trust_remote_code=true if you trust the code it brings"
        raise ValueError(
            f"{where}: config.json has model_type = {kind}, which transformers {version('transformers')} "
            f"does not know; {own if 'auto_map' in settings else 'use another model'}"
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
