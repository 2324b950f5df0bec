"""The cold start: supervised training of `model.path: sft` before reinforcement, in one process and in
float32, so that a first run needs no ranks for it and its weights depend on no cluster. It trains next-token
loss on the response of (prompt, completion) pairs; given tokens, such as tool output, are read and never
trained. `grpo-dist sft` and the sft stage of a pipeline train on the policy's ranks (`loop/supervised.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_dist.algorithms.schedules import learning_rate
from grpo_dist.chat.template import read_tokenizer, writes_date
from grpo_dist.config import SFTConfig
from grpo_dist.data.demonstrations import Demonstration, DemonstrationTable, contents, load_demonstrations
from grpo_dist.demo.model import is_toy
from grpo_dist.policy.full_weights import save_pretrained
from grpo_dist.policy.logprobs import token_logprobs
from grpo_dist.policy.model import load_causal_lm
from grpo_dist.policy.text_model import keep_wrapper
from grpo_dist.runtime.hardware import COLD_START_LOGITS, available_cpus, device_type, resolve_dtype
from grpo_dist.runtime.logit_transform import LogitTransform
from grpo_dist.runtime.memory import return_freed_memory
from grpo_dist.runtime.model_files import cached, cached_path, fingerprint

_VERSION = 4  # raise it when a change here alters the result
_BETAS, _MAX_GRAD_NORM = (0.9, 0.95), 1.0  # the defaults of `policy.optimizer`
_POOL = 16  # batches sorted by length together


def run_sft(
    settings: SFTConfig, model_dir: Path, say: Callable[[str], None], *, day: date | None = None
) -> Path:
    """Train the model in ``model_dir`` on ``settings.data``, and return the directory of the result. It is
    cached, for each ``day`` that its chat template writes; None: today.

    Restores the number of threads, and frees the memory for the workers that start next.

    Raises ValueError for data that cannot be used, naming file and row, and for settings that only training
    on the policy's ranks supports.
    """
    if settings.validation_share:
        raise ValueError(
            f"sft.validation_share = {settings.validation_share:g}: a cold start in one process has no "
            "validation loss; remove it, or train with `grpo-dist sft` or a stage of a pipeline "
            "(`kind: sft`), on the policy's ranks"
        )
    tokenizer = read_tokenizer(model_dir)
    decides = identify_result(settings, model_dir, tokenizer, day)
    if "day" in decides:
        day = date.fromisoformat(decides["day"])
        say(
            f"note: the chat template writes the date into every demonstration: {day}; there is a cold start "
            "for each date, set `data.template_date` to have one for all runs"
        )

    def write(directory: Path) -> None:
        threads = torch.get_num_threads()
        # Threads of so small a model would mostly wait for each other.
        torch.set_num_threads(1 if is_toy(settings.model) else available_cpus())
        try:
            _train(settings, model_dir, tokenizer, directory, say, day)
        finally:
            torch.set_num_threads(threads)
            return_freed_memory()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    return cached("sft", decides, write)


def find_trained(
    settings: SFTConfig, model_dir: Path, tokenizer: Any, *, day: date | None = None
) -> Path | None:
    """Return the result of `run_sft` if it is cached, else None. ``tokenizer``: of the model."""
    path = cached_path("sft", identify_result(settings, model_dir, tokenizer, day))
    return path if path.is_dir() else None


def identify_result(settings: SFTConfig, model_dir: Path, tokenizer: Any, day: date | None) -> dict[str, Any]:
    """Return what determines the result; `day` only where the chat template writes it."""
    decides = {
        "version": _VERSION,
        "settings": settings.model_dump(mode="json", exclude={"data", "validation_share", "validate_every"}),
        # The name of a directory in the cache identifies its content.
        "model": model_dir.name if settings.model.startswith("demo:") else fingerprint(model_dir),
        "data": contents(settings),
    }
    if writes_date(tokenizer):
        decides["day"] = (day or date.today()).isoformat()
    return decides


def _train(
    settings: SFTConfig,
    model_dir: Path,
    tokenizer: Any,
    out: Path,
    say: Callable[[str], None],
    day: date | None,
) -> None:
    rows = load_demonstrations(settings, tokenizer, day=day, say=say)
    settings = settings.model_copy(update={"steps": settings.steps_for(len(rows))})
    device = torch.device(device_type())
    model = load_causal_lm(
        str(model_dir), dtype=resolve_dtype("float32"), attention="auto", trust_remote_code=False
    ).to(device)
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=_BETAS, weight_decay=settings.weight_decay
    )
    say(f"supervised: {settings.steps} steps of {settings.batch_size} on {len(rows)} demonstrations")
    for step, batch in enumerate(_batches(rows, settings)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                step, lr=settings.lr, schedule=settings.schedule, warmup=settings.warmup_steps,
                total=settings.steps, min_ratio=settings.min_lr_ratio,
            )  # fmt: skip
        loss = response_loss(model, *(t.to(device) for t in batch))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
        if not torch.isfinite(loss + norm):
            raise ValueError(
                f"supervised: step {step + 1} has loss {loss.item():g} and gradient norm {norm.item():g}; "
                f"lower sft.lr = {settings.lr:g} or raise sft.warmup_steps = {settings.warmup_steps}"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == settings.steps - 1:
            say(f"supervised: step {step + 1}/{settings.steps}  loss {loss.item():.4f} nats a token")
    model.config.use_cache = True  # the written model is used for generation
    save_pretrained(model, out)
    tokenizer.save_pretrained(out)
    keep_wrapper(model_dir, out)


def response_loss(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the mean negative log-prob, in nats per token, of the masked tokens.

    Args:
        tokens: int64 [B, T].
        mask: bool [B, T], true where a token counts.
    """
    hidden = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    logprobs, _ = token_logprobs(
        hidden,
        head.weight,
        tokens,
        temperature=1.0,
        chunk_tokens=COLD_START_LOGITS,
        bias=getattr(head, "bias", None),
        transform=LogitTransform.from_model(model),
        mask=mask,
    )
    return -logprobs.sum() / mask.sum()


def _batches(rows: DemonstrationTable, settings: SFTConfig) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``settings.steps`` batches, epoch after epoch, each epoch shuffled from the seed.

    Among _POOL batches, rows of similar length share a batch, which saves padding. Sorting by exact length
    would fill batches of sums with one pattern of carries each, which train badly.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    size, lengths = settings.batch_size, rows.lengths.tolist()
    order: list[int] = []
    for first in range(0, settings.steps, _POOL):
        count = min(_POOL, settings.steps - first)
        while len(order) < count * size:
            order += torch.randperm(len(rows), generator=generator).tolist()
        pool = sorted(order[: count * size], key=lambda i: lengths[i] // 16)
        order = order[count * size :]
        for batch in torch.randperm(count, generator=generator).tolist():
            yield padded([rows[i] for i in pool[batch * size : (batch + 1) * size]])


def padded(rows: Sequence[Demonstration]) -> tuple[Tensor, Tensor]:
    """Pad ``rows`` with 0 on the right. Returns int64 [B, T], and bool [B, T], true on learned tokens."""
    ends = [len(row.token_ids) + len(row.completion_ids) for row in rows]
    tokens = torch.zeros(len(rows), max(ends), dtype=torch.long)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
        tokens[i, :end] = torch.as_tensor(np.concatenate([row.token_ids, row.completion_ids]))
        mask[i, len(row.token_ids) : end] = True if row.sampled is None else torch.as_tensor(row.sampled)
    return tokens, mask
