"""Measurement processes of the limits. Entry point: ``python -m grpo_dist.tools.bench.limit_jobs``.

generation   one call of `vllm.LLM.generate` with all requests
training     a bare transformers model, rows of equal length, torch's AdamW; on GPUs liger-kernel if
             installed
sync         one broadcast of all bytes
"""

from __future__ import annotations

import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy

from grpo_dist.runtime.hardware import device_type
from grpo_dist.runtime.stacks import listen
from grpo_dist.tools.bench.record import Request

if TYPE_CHECKING:
    from actors.workers.engine_settings import EngineSpec

_MATMUL = {"cpu": 2048, "cuda": 8192}  # matrix size for the peak measurement
_STEP_SEQUENCES = (1, 4, 16, 64, 256)  # and the engine's maximum
_STEP_TOKENS = 48


class Barrier:
    """Synchronises the processes of one limit, so that they measure at the same time."""

    def __init__(self, directory: Path, index: int, count: int) -> None:
        self._directory, self._index, self._count, self._round = directory, index, count, 0

    def wait(self) -> None:
        """Block until all processes have made the same number of calls."""
        if self._count == 1:
            return
        self._round += 1
        (self._directory / f"{self._round}-{self._index}.here").touch()
        others = [self._directory / f"{self._round}-{i}.here" for i in range(self._count)]
        while not all(other.exists() for other in others):
            if os.getppid() == 1:
                sys.exit("the benchmark has ended")
            time.sleep(0.0005)


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    if device_type() == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


# Generation


def measure_generation(
    barrier: Barrier,
    *,
    spec: EngineSpec,
    temperature: float,
    batches: Sequence[Sequence[Request]],
    repeats: int,
) -> dict[str, Any]:
    """Return `seconds` per batch of requests, [batches][repeats]; and `steps` of the engine, (sequences,
    tokens each, seconds), from one sequence to the engine's maximum.
    """
    engine = _make_engine(spec)
    _generate(engine, batches[0], temperature)
    seconds: list[list[float]] = []
    for batch in batches:
        seconds.append([])
        for _ in range(repeats):
            barrier.wait()  # bounded: it ends with its parent
            seconds[-1].append(_generate(engine, batch, temperature))
    barrier.wait()  # bounded: it ends with its parent
    return {"seconds": seconds, "steps": _steps(engine, spec, batches[0], temperature)}


def _steps(
    engine: Any, spec: EngineSpec, requests: Sequence[Request], temperature: float
) -> list[tuple[int, float, float]]:
    """Return median step times of the first and last third of batches with equally long requests."""
    timings = []
    prompt = requests[0].prompt_ids
    tokens = min(_STEP_TOKENS, spec.max_length - len(prompt))
    third = max(1, tokens // 3)
    counts = [n for n in _STEP_SEQUENCES if n < spec.max_num_seqs] + [spec.max_num_seqs]
    for count in counts:
        batch = [Request(prompt, seed, tokens) for seed in range(count)]
        times = _step_times(engine, batch, temperature)[-tokens:]
        for part, begin in ((times[:third], 0), (times[-third:], tokens - third)):
            timings.append((count, len(prompt) + begin + third / 2, statistics.median(part)))
    return timings


def _step_times(engine: Any, requests: Sequence[Request], temperature: float) -> list[float]:
    inner, times = engine.llm_engine, []
    for i, request in enumerate(requests):
        inner.add_request(
            f"step-{i}", {"prompt_token_ids": list(request.prompt_ids)}, _sampling(request, temperature)
        )
    while inner.has_unfinished_requests():
        begin = time.perf_counter()
        inner.step()
        times.append(time.perf_counter() - begin)
    return times


def _generate(engine: Any, requests: Sequence[Request], temperature: float) -> float:
    prompts = [{"prompt_token_ids": list(r.prompt_ids)} for r in requests]
    sampling = [_sampling(r, temperature) for r in requests]
    begin = time.perf_counter()
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begin
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    if lengths != [r.length for r in requests]:
        raise RuntimeError(f"generation: {sum(lengths)} tokens, expected {sum(r.length for r in requests)}")
    return seconds


def _sampling(request: Request, temperature: float) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=temperature,
        max_tokens=request.length,
        ignore_eos=True,
        seed=request.seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
    )


def _make_engine(spec: EngineSpec) -> Any:
    """Build a vLLM offline engine with a rollout worker's settings, without weight transfer."""
    # Imported here because only measured limits need them.
    from actors.workers.engine_settings import fitting_arguments, set_environment

    set_environment()
    from vllm import LLM

    arguments = fitting_arguments(spec)
    del arguments["weight_transfer_config"]
    return LLM(**arguments)


# Training


def measure_training(
    barrier: Barrier,
    *,
    model_dir: str,
    dtype: torch.dtype,
    rows: int,
    row_tokens: int,
    trained_share: float,
    repeats: int,
) -> dict[str, Any]:
    """Return seconds per repeat over ``rows`` of ``row_tokens``, including the optimiser step; the rows of
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
    """Return the fastest power of two up to ``rows``, by one pass over at most a quarter of the rows. The
    search stops at a slower size or out of memory.
    """
    best, best_rate, size = 1, 0.0, 1
    loop.step(1, 1)
    while size <= rows:
        count = max(size, rows // 4 // size * size)
        try:
            rate = count / _timed(lambda n=count, s=size: loop.pass_over(n, s))  # type: ignore[misc]
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

        from grpo_dist.policy.layer_kernels import use_kernels

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
        """Run forward and backward passes over ``rows``; only trained tokens have logits."""
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


# Weight sync


def measure_sync(
    barrier: Barrier,
    *,
    num_bytes: int,
    rank: int,
    world_size: int,
    port: int,
    secret: bytes,
    backend: str,
    repeats: int,
) -> list[float]:
    """Return seconds per repeat. ``backend``: gloo, nccl, or "copy" within one shared GPU."""
    buffer = torch.ones(num_bytes, dtype=torch.uint8, device=device_type())
    if backend == "copy":
        into = torch.ones_like(buffer)
        return _repeat(barrier, lambda: into.copy_(buffer), repeats)
    from actors.transfer.connections import Seat  # not for a copy
    from actors.transfer.transport import open_broadcasts

    seat = Seat("127.0.0.1", port, rank, world_size, secret)
    transport = open_broadcasts(backend, seat, timeout_s=300)
    seconds = _repeat(barrier, lambda: transport.broadcast(buffer), repeats)
    transport.close()
    return seconds


def _repeat(barrier: Barrier, send: Callable[[], object], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats + 1):  # the first repeat does lazy initialisation
        barrier.wait()  # bounded: it ends with its parent
        seconds.append(_timed(send))
    return seconds[1:]


def main() -> None:
    """Run the job given by two arguments: the directory of its files, and the process number."""
    listen()
    directory, name = Path(sys.argv[1]), sys.argv[2]
    measure, index, count, job = pickle.loads((directory / f"{name}.job").read_bytes())
    result = measure(Barrier(directory, index, count), **job)
    (directory / f"{name}.result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
