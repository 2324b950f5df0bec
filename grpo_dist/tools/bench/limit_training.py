"""Limit of training: a bare transformers model, rows of equal length, torch's AdamW; on GPUs the kernels of
liger-kernel where they are installed.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from grpo_dist.policy.layer_kernels import use_kernels
from grpo_dist.runtime.hardware import device_type
from grpo_dist.tools.bench.child import Barrier

_MATMUL = {"cpu": 2048, "cuda": 8192}  # side of the square matrices of the peak


def measure(
    barrier: Barrier,
    *,
    model_dir: str,
    dtype: torch.dtype,
    rows: int,
    row_tokens: int,
    trained_share: float,
    repeats: int,
) -> dict[str, Any]:
    """Return the seconds of each repeat over ``rows`` of ``row_tokens``, optimiser step included; the rows of
    the fastest micro-batch; and operations per second of a matrix product.
    """
    loop = _Loop(model_dir, dtype, row_tokens, max(1, round(trained_share * row_tokens)))
    micro = _best_micro_batch(loop, rows)
    seconds = []
    for _ in range(repeats):
        barrier.wait()  # bounded: it ends with its parent
        seconds.append(_timed(lambda: loop.step(rows, micro)))
    barrier.wait()  # bounded: it ends with its parent
    return {"seconds": seconds, "micro_batch": micro, "matmul": matmul_rate(dtype)}


def _best_micro_batch(loop: _Loop, rows: int) -> int:
    """Return the fastest power of two up to ``rows``, by one pass over at most a quarter of them. A slower
    size, or one too large for the memory, ends the search.
    """
    best, best_rate, size = 1, 0.0, 1
    loop.step(1, 1)
    while size <= rows:
        count = max(size, rows // 4 // size * size)
        try:
            loop.pass_over(size, size)
            rate = count / _timed(lambda n=count, s=size: loop.pass_over(n, s))
        except torch.OutOfMemoryError:
            break
        if rate > best_rate:
            best, best_rate = size, rate
        elif rate < 0.8 * best_rate:
            break
        size *= 2
    return best


class _Loop:
    def __init__(self, model_dir: str, dtype: torch.dtype, row_tokens: int, trained: int) -> None:
        from transformers import AutoModelForCausalLM

        self._device, self._trained = torch.device(device_type()), trained
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).to(self._device).train()
        use_kernels(self._model, "auto", device_type())
        self._model.config.use_cache = False
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-9, fused=True)
        self._vocabulary = self._model.config.get_text_config().vocab_size
        self._row_tokens = row_tokens

    def step(self, rows: int, micro: int) -> None:
        self.pass_over(rows, micro)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def pass_over(self, rows: int, micro: int) -> None:
        """Run forward and backward passes of ``rows``; only trained tokens have logits, as in the loop."""
        for start in range(0, rows, micro):
            size = (min(micro, rows - start), self._row_tokens + 1)
            tokens = torch.randint(self._vocabulary, size, device=self._device)
            hidden = self._model.get_decoder()(input_ids=tokens[:, :-1]).last_hidden_state
            logits = self._model.get_output_embeddings()(hidden[:, -self._trained :]).float()
            loss = cross_entropy(logits.flatten(0, 1), tokens[:, -self._trained :].flatten())
            loss.backward()


def matmul_rate(dtype: torch.dtype) -> float:
    """Return the operations per second of a square matrix product, the fastest of several."""
    device = device_type()
    n = _MATMUL[device]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / min(_timed(lambda: a @ b) for _ in range(8))


def _timed(work: Any) -> float:
    begin = time.perf_counter()
    work()
    if device_type() == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin
