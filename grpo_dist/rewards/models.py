"""Reward models: Hugging Face models that score the completions of a problem. `model_ranks` splits one over
several devices.

    outcome   sequence classifier, one score per completion; input in the model's own chat template
    process   one score per step, in a published format of `model_inputs`:
              problem  step 1 <mark>  step 2 <mark> ...
                               ^ score 1       ^ score 2

The score of a classifier is the logit of a model with one label, or the probability of the second of two.
Formats with a head of their own give probabilities, see `model_heads`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int32

from grpo_dist.batch.sharding import micro_batches
from grpo_dist.config import RewardModelConfig
from grpo_dist.errors import expanded
from grpo_dist.rewards.group import ModelScores
from grpo_dist.rewards.model_heads import (
    StepHead,
    check_split,
    load_with_head,
    split_over,
    verdict_ids,
    verdict_transform,
)
from grpo_dist.rewards.model_inputs import ModelInput, Steps, check_inputs, conversation, process_inputs
from grpo_dist.rewards.steps import REDUCE, decoded_length, split_steps, token_ends
from grpo_dist.runtime.hardware import device_type, limit_gpu_memory, quiet_libraries, resolve_dtype
from grpo_dist.runtime.memory import HostCopies, release_cache
from grpo_dist.runtime.model_config import keep_attention_cap, position_limit

logger = logging.getLogger(__name__)

# What the name of the architecture ends with; None: a name of the model's own.
_HEADS = {
    "outcome": "ForSequenceClassification",
    "classifier": "ForTokenClassification",
    "prefixes": "ForSequenceClassification",
    "math_shepherd": "ForCausalLM",
    "rlhflow": "ForCausalLM",
    "qwen": None,
    "skywork": None,
}
_OWN_HEADS = ("qwen", "skywork", "math_shepherd", "rlhflow")


class Classifier:
    """One reward model on one device, or this process's part of a model that `model_ranks` splits."""

    def __init__(self, settings: RewardModelConfig) -> None:
        quiet_libraries()
        self._settings = settings
        device = device_type()
        self._device = torch.device(device)
        limit_gpu_memory(settings.gpu_share, self._device)
        self._tokenizer = _load_tokenizer(settings)
        dtype = resolve_dtype(settings.dtype, device)
        self._head: StepHead | None = None
        if settings.kind == "process" and settings.format in _OWN_HEADS:
            model, head = load_with_head(settings, _source(settings), self._tokenizer, dtype)
            self._head = head.to(self._device).eval().requires_grad_(False)
        else:
            model = _load_model(settings, dtype)
        # Nothing is generated, so a cache of keys and values of all layers would only take memory.
        model.config.get_text_config().use_cache = model.config.use_cache = False
        keep_attention_cap(model)
        self._model = model.to(self._device).eval().requires_grad_(False)
        self._longest = _longest(model.config, self._tokenizer)
        self._memory, self._warned = HostCopies(self._device, constant=True), False

    def sleep(self) -> None:
        """Move the model to host memory; nothing but `wake_up` may follow."""
        self._memory.offload([*self._model.parameters(), *(self._head.parameters() if self._head else ())])
        release_cache()

    def wake_up(self) -> None:
        """Undo `sleep`."""
        self._memory.reload()

    def score(
        self,
        problem: str,
        completions: Sequence[str],
        token_ids: Sequence[Int32[np.ndarray, " _C"]],
        policy_tokenizer: Any,
    ) -> ModelScores:
        """Score the completions of one problem.

        Args:
            problem: text of the problem in the data set.
            completions: G texts.
            token_ids: of each, by ``policy_tokenizer``; used by process models only.
        """
        if self._settings.kind == "outcome":
            scores = self.scores([conversation(self._tokenizer, problem, text) for text in completions])
            return ModelScores(np.array([s[0] for s in scores], dtype=np.float32))
        steps = [split_steps(text, self._settings.step_separator) for text in completions]
        scores = self._step_scores(problem, completions, steps)
        ends = [
            token_ends([end for _, end in own], len(ids), decoded_length(policy_tokenizer, ids))
            for own, ids in zip(steps, token_ids, strict=True)
        ]
        reduce = REDUCE[self._settings.reduce]
        rewards = np.array([reduce(s) for s in scores], dtype=np.float32)
        return ModelScores(rewards, tuple(scores), tuple(ends))

    def close(self) -> None:
        """Do nothing; see `SplitClassifier`."""

    def _step_scores(
        self, problem: str, completions: Sequence[str], steps: Sequence[Steps]
    ) -> list[Float32[np.ndarray, " _S"]]:
        """Return the scores of each completion, as many as it has steps, which may be spread over rows."""
        rows = [
            process_inputs(self._settings, self._tokenizer, problem, text, own)
            for text, own in zip(completions, steps, strict=True)
        ]
        scores = iter(self.scores([row for own in rows for row in own]))
        return [np.concatenate([next(scores) for _ in own]) for own in rows]

    @torch.no_grad()
    def scores(self, rows: Sequence[ModelInput]) -> list[Float32[np.ndarray, " _S"]]:
        """Score each row: S step positions, or one. NaN for a row that is too long."""
        out = [np.full(max(1, len(row.read_at)), np.nan, np.float32) for row in rows]
        fits = [i for i, row in enumerate(rows) if len(row.token_ids) <= self._longest]
        if len(fits) < len(rows):
            self._warn(max(len(row.token_ids) for row in rows))
        lengths = [len(rows[i].token_ids) for i in fits]
        for batch in micro_batches(lengths, self._settings.micro_batch_tokens):
            chosen = [fits[b] for b in batch]
            for i, own in zip(chosen, self._forward([rows[i] for i in chosen]), strict=True):
                out[i] = own
        return out

    def _forward(self, inputs: Sequence[ModelInput]) -> list[Float32[np.ndarray, " _S"]]:
        """Run the model on right-padded rows. Returns the scores of each: S = 1 without positions."""
        rows = [own.token_ids for own in inputs]
        padding = _unused_id(rows, self._model.config.get_text_config().vocab_size)
        # A sequence classifier locates the end of a row by the padding id of its configuration. With EOS as
        # padding it would skip the EOS that ends the completion.
        self._model.config.pad_token_id = padding
        self._model.config.get_text_config().pad_token_id = padding
        tokens = torch.full((len(rows), max(map(len, rows))), padding, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row)
            mask[i, : len(row)] = 1
        output = self._model(input_ids=tokens.to(self._device), attention_mask=mask.to(self._device))
        values = output.logits if self._head is None else output.last_hidden_state
        if inputs[0].read_at:  # [B, T, labels or H] -> [all steps, labels or H]
            of_row = [i for i, own in enumerate(inputs) for _ in own.read_at]
            values = values[of_row, [at for own in inputs for at in own.read_at]]
        scores = _probability(values) if self._head is None else self._head(values)
        scores = torch.where(scores.isfinite(), scores, torch.nan).cpu().numpy()
        ends = np.cumsum([max(1, len(own.read_at)) for own in inputs])
        return np.split(scores, ends[:-1])

    def _warn(self, length: int) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "reward model %s: a problem with its completion has %d tokens, but the model takes at most "
                "%d; such samples are not scored",
                self._settings.name, length, self._longest,
            )  # fmt: skip


def _probability(logits: Float[torch.Tensor, "N labels"]) -> Float[torch.Tensor, " N"]:
    logits = logits.float()
    return logits[:, 0] if logits.shape[-1] == 1 else logits.softmax(-1)[:, 1]


def check_model(settings: RewardModelConfig) -> None:
    """Check configuration and tokenizer of a model without loading weights.

    Raises ValueError for a model that cannot be used.
    """
    where = f"rewards.models {settings.name}: path = {settings.path}"
    local = expanded(settings.path)
    if not local.is_dir() and (local.is_absolute() or settings.path.count("/") != 1):
        raise ValueError(f"{where}: no such directory; expected a model directory or a hub id owner/name")
    from transformers import AutoConfig  # heavy: only for runs with reward models

    try:
        config = AutoConfig.from_pretrained(
            _source(settings), revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
        tokenizer = _load_tokenizer(settings)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{where}: configuration or tokenizer cannot be loaded ({str(error).splitlines()[0]}); check the "
            "name, the network and HF_TOKEN"
        ) from error
    try:
        _check_format(settings, config, tokenizer)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _check_format(settings: RewardModelConfig, config: Any, tokenizer: Any) -> None:
    """Raise ValueError for a model that is not of `settings.kind` and `settings.format`."""
    process = settings.kind == "process"
    check_split(config, settings.tensor_parallel_size)
    if process:
        check_inputs(settings, tokenizer)
    if process and settings.format in ("math_shepherd", "rlhflow"):
        verdict_transform(config)
        verdict_ids(settings, tokenizer)
    head = _HEADS[settings.format if process else "outcome"]
    if head is None:
        return  # the architecture's name is the model's own; its head is looked for when it is loaded
    architectures = config.architectures or []
    if not settings.trust_remote_code and not any(name.endswith(head) for name in architectures):
        raise ValueError(
            f"its architecture is {', '.join(architectures) or 'unknown'}, but kind {settings.kind}"
            f"{f' of format {settings.format}' if process else ''} needs one of ...{head}; use another "
            "model, kind or format"
        )
    if head != "ForCausalLM" and config.num_labels not in (1, 2):
        raise ValueError(
            f"it has {config.num_labels} labels; expected 1 (the score) or 2 (the second is good)"
        )


def _load_model(settings: RewardModelConfig, dtype: torch.dtype) -> Any:
    # heavy, as in `check_model`
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    of_rows = settings.kind == "outcome" or settings.format == "prefixes"
    auto = AutoModelForSequenceClassification if of_rows else AutoModelForTokenClassification
    model, info = auto.from_pretrained(
        _source(settings), revision=settings.revision, dtype=dtype,
        trust_remote_code=settings.trust_remote_code, output_loading_info=True, **split_over(settings),
    )  # fmt: skip
    if info["missing_keys"]:  # transformers would initialise them at random
        raise ValueError(
            f"rewards.models {settings.name}: path = {settings.path} has no weights for "
            f"{', '.join(sorted(info['missing_keys'])[:3])}; expected a trained classifier of kind "
            f"{settings.kind}"
        )
    return model


def _load_tokenizer(settings: RewardModelConfig) -> Any:
    from transformers import AutoTokenizer  # heavy, as in `check_model`

    return AutoTokenizer.from_pretrained(
        _source(settings), revision=settings.revision, trust_remote_code=settings.trust_remote_code
    )


def _source(settings: RewardModelConfig) -> str:
    local = expanded(settings.path)
    return str(local) if local.is_dir() else settings.path


def _longest(config: Any, tokenizer: Any) -> int:
    """Return the largest number of tokens of a row."""
    text = config.get_text_config().to_dict()
    # Scaled positions that follow the longest row are one model's own affair here.
    positions = max(position_limit(text) or 0, text.get("max_position_embeddings") or 0)
    return min(positions or tokenizer.model_max_length, tokenizer.model_max_length)


def _unused_id(rows: Sequence[list[int]], vocabulary: int) -> int:
    """Return the smallest token id that occurs in no row."""
    used = set().union(*rows)
    return next(i for i in range(vocabulary) if i not in used)
