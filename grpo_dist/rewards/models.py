"""Reward models: Hugging Face models that score the completions of a problem. `model_ranks` splits a model
over several devices.

    outcome   sequence classifier, one score per completion; input in the model's chat template
    process   one score per step, in a published format of `process_inputs`:
              problem  step 1 <mark>  step 2 <mark> ...
                               ^ score 1       ^ score 2

The score of a classifier is the logit of a model with one label, or the second label's probability of two.
Formats with a special head give probabilities, see `StepHead`.

Inputs of reward models are the token ids of a problem with a completion, and the positions of the scores.

format         input                                                        a step's score is read at
classifier     problem  step 1 <mark>  step 2 <mark> ...                    the last token of its mark
qwen           system, problem; answer: step 1<extra_0>step 2<extra_0>      <extra_0>
math_shepherd  problem Step 1: ... ки (line break) Step 2: ... ки           ки
rlhflow        user: problem step 1, assistant: +, user: step 2, ...        the token before the +
skywork        problem (line break) step 1 <line break> step 2 <line break> the line break
prefixes       a conversation per step, which ends with the step            its end

Process reward models without a class in `transformers`: a decoder, and a special head.

qwen                    score: Linear, ReLU, Linear to 2     softmax, the second label   arXiv:2501.07301
skywork                 v_head.summary: Linear to 1          sigmoid                     Skywork-o1-Open-PRM
math_shepherd, rlhflow  the LM head's rows of two tokens     softmax, the first token    arXiv:2312.08935

Only the hidden states at the ends of steps reach a head, so no vocabulary logits are computed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor, nn

from grpo_dist.batch.sharding import micro_batches
from grpo_dist.chat.template import encode, read_tokenizer
from grpo_dist.config.rewards import (
    MarkedStepsConfig,
    MathShepherdConfig,
    PrefixesConfig,
    ProcessModelConfig,
    QwenConfig,
    RewardModelConfig,
    RLHFlowConfig,
    SkyworkConfig,
    TokenClassifierConfig,
)
from grpo_dist.errors import expanded, searched
from grpo_dist.rewards.group import REDUCE, ModelScores, decoded_length, split_steps, token_ends
from grpo_dist.runtime.hardware import device_type, limit_gpu_memory, quiet_libraries, resolve_dtype
from grpo_dist.runtime.logit_transform import IDENTITY, LogitTransform
from grpo_dist.runtime.memory import HostCopies, release_cache
from grpo_dist.runtime.model_config import keep_attention_cap, position_limit

# Inputs


# From Qwen2.5-Math-PRM's model card: the model was trained with it.
QWEN_SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
STEP_MARKS = {"qwen": "<extra_0>", "math_shepherd": "ки", "skywork": "\n"}  # where `step_mark` is null
_GOOD = "+"  # reply to earlier steps in the conversation of `rlhflow`
_NUMBERED = re.compile(r"step\s*\d", re.IGNORECASE)

Steps = Sequence[tuple[str, int]]  # as `split_steps` returns them


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One row of a reward model."""

    token_ids: list[int]
    read_at: list[int]  # positions of the step scores; []: a classifier reads the end of the row


def conversation(tokenizer: Any, problem: str, completion: str) -> ModelInput:
    """Return problem and completion in the chat template, or as plain text where there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return ModelInput(tokenizer(f"{problem}\n{completion}")["input_ids"], [])
    turns = [{"role": "user", "content": problem}, {"role": "assistant", "content": completion}]
    return ModelInput(encode(tokenizer.apply_chat_template(turns, tokenize=False), tokenizer), [])


def process_inputs(
    settings: ProcessModelConfig, tokenizer: Any, problem: str, completion: str, steps: Steps
) -> list[ModelInput]:
    """Return the rows that score ``steps`` of ``completion`` in the format of `settings.kind`.

    All rows together have one score per step, in order: one row with S positions, or S rows without any.

    Raises:
        ValueError: the tokenizer does not fit the format.
    """
    return _INPUTS[settings.kind](settings, tokenizer, problem, completion, steps)


def _classifier(
    settings: TokenClassifierConfig, tokenizer: Any, problem: str, completion: str, steps: Steps
) -> list[ModelInput]:
    """Join the steps with marks.

    Steps and marks are tokenised separately, so a mark has the same tokens after any step, as in training
    (e.g. by TRL's PRMTrainer).
    """
    mark = encode(settings.step_separator if settings.step_mark is None else settings.step_mark, tokenizer)
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": problem}]
        head = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        ids = encode(head, tokenizer)
    else:
        ids = list(tokenizer(f"{problem}\n")["input_ids"])
    return [_joined(ids, [encode(step, tokenizer) for step, _ in steps], mark)]


def _qwen(
    settings: QwenConfig, tokenizer: Any, problem: str, completion: str, steps: Steps
) -> list[ModelInput]:
    mark = _mark(settings)
    # A completion that contains the mark would have more scores than steps.
    problem, *texts = (text.replace(mark, " ") for text in (problem, *(step for step, _ in steps)))
    turns = [
        {"role": "system", "content": QWEN_SYSTEM_PROMPT},
        {"role": "user", "content": problem},
        {"role": "assistant", "content": "".join(text + mark for text in texts)},
    ]
    ids = encode(tokenizer.apply_chat_template(turns, tokenize=False), tokenizer)
    (mark_id,) = encode(mark, tokenizer)
    return [ModelInput(ids, [i for i, token in enumerate(ids) if token == mark_id])]


def _math_shepherd(
    settings: MathShepherdConfig, tokenizer: Any, problem: str, completion: str, steps: Steps
) -> list[ModelInput]:
    """Number the steps, as in the model's training data. Read only at our marks: ки may be part of a Russian
    word.
    """
    text, ends = f"{problem} ", []
    for i, (step, _) in enumerate(steps):
        numbered = step if _NUMBERED.match(step) else f"Step {i + 1}: {step}"
        text += f"{chr(10) if i else ''}{numbered} {_mark(settings)}"
        ends.append(len(text))
    encoded = tokenizer(text, return_offsets_mapping=True)
    return [ModelInput(encoded["input_ids"], _find_tokens_before(ends, encoded["offset_mapping"]))]


def _rlhflow(
    settings: RLHFlowConfig, tokenizer: Any, problem: str, completion: str, steps: Steps
) -> list[ModelInput]:
    """Render the whole conversation once: a causal model's score of a step does not depend on later steps."""
    turns, ends = [], []
    for i, (step, _) in enumerate(steps):
        turns.append({"role": "user", "content": step if i else f"{problem} {step}"})
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        turns.append({"role": "assistant", "content": _GOOD})
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        if not text.startswith(prompt + _GOOD):
            raise ValueError(
                "its chat template does not continue a generation prompt with the reply, so the place of a "
                "verdict is unknown; use the model's own tokenizer"
            )
        ends.append(len(prompt))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return [ModelInput(encoded["input_ids"], _find_tokens_before(ends, encoded["offset_mapping"]))]


def _skywork(
    settings: SkyworkConfig, tokenizer: Any, problem: str, completion: str, steps: Steps
) -> list[ModelInput]:
    ids = encode(f"{tokenizer.bos_token or ''}{problem}\n", tokenizer)
    mark = encode(_mark(settings), tokenizer)[-1:]
    return [_joined(ids, [encode(step, tokenizer) for step, _ in steps], mark)]


def _prefixes(
    settings: PrefixesConfig, tokenizer: Any, problem: str, completion: str, steps: Steps
) -> list[ModelInput]:
    """Return a row per prefix. The last prefix is the whole completion, scored as with `kind: outcome`."""
    prefixes = [completion[:end].rstrip() for _, end in steps[:-1]]
    return [conversation(tokenizer, problem, text) for text in (*prefixes, completion)]


_INPUTS: dict[str, Callable[[Any, Any, str, str, Steps], list[ModelInput]]] = {
    "classifier": _classifier,
    "qwen": _qwen,
    "math_shepherd": _math_shepherd,
    "rlhflow": _rlhflow,
    "skywork": _skywork,
    "prefixes": _prefixes,
}


def check_inputs(settings: ProcessModelConfig, tokenizer: Any) -> None:
    """Raise ValueError where ``tokenizer`` cannot encode the inputs of a process model."""
    if isinstance(settings, QwenConfig):
        mark = _mark(settings)
        if len(encode(mark, tokenizer)) != 1:
            raise ValueError(f"its tokenizer has no single token {mark!r}; set step_mark to its own")
    if isinstance(settings, QwenConfig | RLHFlowConfig) and not getattr(tokenizer, "chat_template", None):
        raise ValueError("its tokenizer has no chat template; use the model's own tokenizer")
    steps = [("a", 3), ("b", 4)]
    rows = process_inputs(settings, tokenizer, "1+1", "a\n\nb", steps)
    if sum(max(1, len(row.read_at)) for row in rows) != len(steps):
        raise ValueError("its tokenizer does not keep the marks of steps apart; set step_mark")


def _mark(settings: MarkedStepsConfig) -> str:
    return STEP_MARKS[settings.kind] if settings.step_mark is None else settings.step_mark


def _joined(head: list[int], steps: Sequence[list[int]], mark: list[int]) -> ModelInput:
    ids, read_at = list(head), []
    for step in steps:
        ids += step + mark
        read_at.append(len(ids) - 1)
    return ModelInput(ids, read_at)


def _find_tokens_before(ends: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return for each of ``ends`` the last token that contains the character before it."""
    token_of = {char: i for i, (begin, end) in enumerate(offsets) for char in range(begin, end)}
    return [token_of[end - 1] for end in ends]


# Heads


VERDICTS = ("+", "-")  # good and bad, where `verdict_tokens` is null
_PREFIXES = {"qwen": "score.", "skywork": "v_head.summary."}


class StepHead(nn.Module):
    """Probability in [0, 1] that a step is good, from the hidden state at its end. Computes in float32."""

    def __init__(self, layers: nn.Module, good: int | None, transform: LogitTransform = IDENTITY) -> None:
        super().__init__()
        self.layers, self._good, self._transform = layers.float(), good, transform

    def forward(self, hidden: Float[Tensor, "N H"]) -> Float[Tensor, " N"]:
        logits = self._transform.apply_(self.layers(hidden.float()))
        return logits[:, 0].sigmoid() if self._good is None else logits.softmax(-1)[:, self._good]


def _load(settings: RewardModelConfig, tokenizer: Any, dtype: torch.dtype) -> tuple[Any, StepHead | None]:
    """Return the model, or a decoder with ``last_hidden_state`` in its output and its head.

    Raises:
        ValueError: weights of the model or the head are missing or of another shape.
    """
    import transformers  # heavy: only for runs with reward models

    source, split = _source(settings), dict[str, Any]()
    if settings.tensor_parallel_size > 1:  # this process holds a part of the model
        from transformers.distributed import DistributedConfig  # heavy, as above

        split["distributed_config"] = DistributedConfig(tp_size=settings.tensor_parallel_size)
    # Models with a head from this module have a standard decoder, so they never need remote code.
    has_step_head = isinstance(settings, QwenConfig | SkyworkConfig | MathShepherdConfig | RLHFlowConfig)
    model, info = getattr(transformers, f"AutoModel{_ARCHITECTURES[settings.kind]}").from_pretrained(
        source, revision=settings.revision, dtype=dtype, output_loading_info=True,
        trust_remote_code=settings.trust_remote_code and not has_step_head, **split,
    )  # fmt: skip
    if info["missing_keys"]:  # transformers would initialise them at random
        raise ValueError(
            f"rewards.models {settings.name}: path = {settings.path} has no weights for "
            f"{', '.join(sorted(info['missing_keys'])[:3])}; expected a trained model of kind "
            f"{settings.kind}"
        )
    if isinstance(settings, QwenConfig | SkyworkConfig):
        return model, _load_head(settings, source, model.config.get_text_config().hidden_size)
    if not isinstance(settings, MathShepherdConfig | RLHFlowConfig):
        return model, None
    lm_head, ids = model.get_output_embeddings(), verdict_ids(settings, tokenizer)

    def rows(values: Tensor) -> nn.Parameter:
        if hasattr(values, "full_tensor"):  # each rank holds a part of a split model
            values = values.full_tensor()
        return nn.Parameter(values[ids].detach().float().clone())

    layers = nn.Linear(lm_head.weight.shape[1], 2, bias=getattr(lm_head, "bias", None) is not None)
    layers.weight = rows(lm_head.weight)
    if layers.bias is not None:
        layers.bias = rows(lm_head.bias)
    return model.base_model, StepHead(layers, good=0, transform=verdict_transform(model.config))


def verdict_ids(settings: MathShepherdConfig | RLHFlowConfig, tokenizer: Any) -> list[int]:
    """Return the token ids of the good and the bad verdict.

    Raises ValueError where they are not two tokens of the vocabulary.
    """
    texts = settings.verdict_tokens or VERDICTS
    # The last token: SentencePiece tokenizers may put a leading space token before it.
    ids = [encode(text, tokenizer)[-1] for text in texts]
    if ids[0] == ids[1] or (tokenizer.unk_token_id in ids and tokenizer.unk_token not in texts):
        raise ValueError(f"its tokenizer does not tell the verdicts {list(texts)} apart; set verdict_tokens")
    return ids


def check_split(config: Any, size: int) -> None:
    """Raise ValueError for a model that cannot be split over ``size`` devices."""
    if size == 1:
        return
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise ValueError(
            f"tensor_parallel_size = {size}: model_type {text.model_type} has no plan for splitting it in "
            "transformers; use 1 or another model"
        )
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (getattr(text, key, None) or 0) % size:
            raise ValueError(
                f"tensor_parallel_size = {size} does not divide its {key} = {getattr(text, key)}; use a "
                "divisor of it"
            )


def verdict_transform(config: Any) -> LogitTransform:
    """Return the transform that a model of ``config`` applies to logits after its LM head. Reads no weights.
    Raises ValueError for an unknown transform.
    """
    from transformers import AutoModelForCausalLM  # heavy, as above

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return LogitTransform.from_model(model)


def _load_head(settings: QwenConfig | SkyworkConfig, source: str, hidden: int) -> StepHead:
    layers: nn.Module = nn.Linear(hidden, 1)
    if isinstance(settings, QwenConfig):
        layers = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2))
    prefix = _PREFIXES[settings.kind]
    names = list(layers.state_dict())
    tensors = _tensors(settings, source, [prefix + name for name in names])
    try:
        layers.load_state_dict({name: tensors[prefix + name].float() for name in names})
    except (KeyError, RuntimeError) as error:
        raise ValueError(
            f"rewards.models {settings.name}: path = {settings.path} has no head of kind {settings.kind} "
            f"({error}); expected weights {', '.join(prefix + name for name in names)} for hidden size "
            f"{hidden}; use another model or kind"
        ) from error
    return StepHead(layers, good=1 if isinstance(settings, QwenConfig) else None)


def _tensors(settings: RewardModelConfig, source: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Read the tensors ``names``, if present, from the safetensors files of ``source``."""
    from safetensors import safe_open
    from transformers.utils.hub import cached_file

    def file(name: str) -> str | None:
        return cached_file(
            source, name, revision=settings.revision, _raise_exceptions_for_missing_entries=False
        )

    shards = {"model.safetensors"}
    if index := file("model.safetensors.index.json"):
        places = json.loads(Path(index).read_text())["weight_map"]
        shards = {places[name] for name in names if name in places}
    by_name: dict[str, Tensor] = {}
    for shard in sorted(shards):
        if (path := file(shard)) is None:
            continue  # the caller reports missing weights
        with safe_open(path, framework="pt") as tensors:
            by_name |= {name: tensors.get_tensor(name) for name in names if name in tensors.keys()}  # noqa: SIM118
    return by_name


# Models


logger = logging.getLogger(__name__)

# Ending of the architecture's name and of its class in transformers; "": a custom architecture, whose head is
# checked on loading.
_ARCHITECTURES = {
    "outcome": "ForSequenceClassification",
    "classifier": "ForTokenClassification",
    "prefixes": "ForSequenceClassification",
    "math_shepherd": "ForCausalLM",
    "rlhflow": "ForCausalLM",
    "qwen": "",
    "skywork": "",
}


class Classifier:
    """One reward model on one device, or this process's part of a model that `model_ranks` splits."""

    def __init__(self, settings: RewardModelConfig) -> None:
        quiet_libraries()
        self._settings = settings
        device = device_type()
        self._device = torch.device(device)
        limit_gpu_memory(settings.gpu_share, self._device)
        self._tokenizer = _load_tokenizer(settings)
        model, head = _load(settings, self._tokenizer, resolve_dtype(settings.dtype, device))
        self._head = head.to(self._device).eval().requires_grad_(False) if head else None
        # Nothing is generated, so a KV cache would only take memory.
        model.config.get_text_config().use_cache = model.config.use_cache = False
        keep_attention_cap(model)
        self._model = model.to(self._device).eval().requires_grad_(False)
        self._longest = _longest(model.config, self._tokenizer)
        self._memory, self._warned = HostCopies(self._device, constant=True), False

    def sleep(self) -> None:
        """Move the model to host memory; only `wake_up` may follow."""
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
            token_ids: token ids of each, by ``policy_tokenizer``; used by process models only.
        """
        if not isinstance(self._settings, ProcessModelConfig):
            scores = self.scores([conversation(self._tokenizer, problem, text) for text in completions])
            return ModelScores(np.array([s[0] for s in scores], dtype=np.float32))
        steps = [split_steps(text, self._settings.step_separator) for text in completions]
        scores = self._step_scores(self._settings, problem, completions, steps)
        ends = [
            token_ends([end for _, end in completion_steps], len(ids), decoded_length(policy_tokenizer, ids))
            for completion_steps, ids in zip(steps, token_ids, strict=True)
        ]
        reduce = REDUCE[self._settings.reduce]
        rewards = np.array([reduce(s) for s in scores], dtype=np.float32)
        return ModelScores(rewards, tuple(scores), tuple(ends))

    def close(self) -> None:
        """Do nothing; see `SplitClassifier`."""

    def _step_scores(
        self, settings: ProcessModelConfig, problem: str, completions: Sequence[str], steps: Sequence[Steps]
    ) -> list[Float32[np.ndarray, " _S"]]:
        """Return the step scores of each completion; its rows may be several."""
        rows = [
            process_inputs(settings, self._tokenizer, problem, text, inputs)
            for text, inputs in zip(completions, steps, strict=True)
        ]
        scores = iter(self.scores([row for inputs in rows for row in inputs]))
        return [np.concatenate([next(scores) for _ in inputs]) for inputs in rows]

    @torch.no_grad()
    def scores(self, rows: Sequence[ModelInput]) -> list[Float32[np.ndarray, " _S"]]:
        """Score each row: S scores for S step positions, else one. NaN for a row that is too long."""
        out = [np.full(max(1, len(row.read_at)), np.nan, np.float32) for row in rows]
        fits = [i for i, row in enumerate(rows) if len(row.token_ids) <= self._longest]
        if len(fits) < len(rows):
            self._warn(max(len(row.token_ids) for row in rows))
        lengths = [len(rows[i].token_ids) for i in fits]
        for batch in micro_batches(lengths, self._settings.micro_batch_tokens):
            chosen = [fits[b] for b in batch]
            for i, score in zip(chosen, self._forward([rows[i] for i in chosen]), strict=True):
                out[i] = score
        return out

    def _forward(self, inputs: Sequence[ModelInput]) -> list[Float32[np.ndarray, " _S"]]:
        """Run the model on right-padded rows. Returns the scores of each row: S = 1 without positions."""
        rows = [row_input.token_ids for row_input in inputs]
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
            row_index = [i for i, row_input in enumerate(inputs) for _ in row_input.read_at]
            values = values[row_index, [at for row_input in inputs for at in row_input.read_at]]
        scores = _probability(values) if self._head is None else self._head(values)
        scores = torch.where(scores.isfinite(), scores, torch.nan).cpu().numpy()
        ends = np.cumsum([max(1, len(row_input.read_at)) for row_input in inputs])
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
        raise ValueError(
            f"{where}: no such directory{searched(local)}; expected a model directory or a hub id owner/name"
        )
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
    """Raise ValueError for a model that does not fit `settings.kind`."""
    check_split(config, settings.tensor_parallel_size)
    if isinstance(settings, ProcessModelConfig):
        check_inputs(settings, tokenizer)
    if isinstance(settings, MathShepherdConfig | RLHFlowConfig):
        verdict_transform(config)
        verdict_ids(settings, tokenizer)
    ending = _ARCHITECTURES[settings.kind]
    if not ending:
        return
    architectures = config.architectures or []
    if not settings.trust_remote_code and not any(name.endswith(ending) for name in architectures):
        raise ValueError(
            f"its architecture is {', '.join(architectures) or 'unknown'}, but kind {settings.kind} "
            f"needs one of ...{ending}; use another model or kind"
        )
    if ending != "ForCausalLM" and config.num_labels not in (1, 2):
        raise ValueError(
            f"it has {config.num_labels} labels; expected 1 (the score) or 2 (the second is good)"
        )


def _load_tokenizer(settings: RewardModelConfig) -> Any:
    return read_tokenizer(
        _source(settings), revision=settings.revision, trust_remote_code=settings.trust_remote_code
    )


def _source(settings: RewardModelConfig) -> str:
    local = expanded(settings.path)
    return str(local) if local.is_dir() else settings.path


def _longest(config: Any, tokenizer: Any) -> int:
    """Return the largest number of tokens of a row."""
    text = config.get_text_config().to_dict()
    # No engine must agree with this model on scaled positions, so the larger limit applies.
    positions = max(position_limit(text) or 0, text.get("max_position_embeddings") or 0)
    return min(positions or tokenizer.model_max_length, tokenizer.model_max_length)


def _unused_id(rows: Sequence[list[int]], vocabulary: int) -> int:
    """Return the smallest token id that occurs in no row."""
    used = set().union(*rows)
    return next(i for i in range(vocabulary) if i not in used)
