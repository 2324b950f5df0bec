"""The LM head in bfloat16: its values and gradients by their definition, its speed, and its memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_dist.policy.logprobs import selected_logprobs
from grpo_dist.runtime.hardware import logprob_chunk_mib
from grpo_dist.tools.bench.table import written
from tests.gpu.device import peak_bytes_of, seconds_of, this_device
from tests.gpu.findings import Findings
from tests.gpu.process import CheckTask
from tests.gpu.sizes import ROUNDING, dtype_of, model_shape, planned, update_config, update_size

_TEMPERATURE = 0.9
_COMPARED, _TIMED = 2048, 8192  # tokens
_AT_ONCE = 256  # rows of the exact values
_CORES = (
    "float32 without tensor cores reaches a fifteenth of bfloat16's rate (H100, A100): more says that they "
    "are used"
)


@dataclass(frozen=True, slots=True)
class _Operands:
    rows: Tensor
    weight: Tensor
    targets: Tensor
    chunk: int

    @classmethod
    def made(cls, task: CheckTask, tokens: int) -> _Operands:
        shape = model_shape(task)
        width, vocabulary = shape["hidden_size"], shape["vocab_size"]
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(tokens, width, generator=generator).to(this_device(), torch.bfloat16)
        weight = (torch.randn(vocabulary, width, generator=generator) / width**0.5).to(this_device())
        targets = torch.randint(vocabulary, (tokens,), generator=generator).to(this_device())
        chunk = logprob_chunk_mib(this_device().type) * 2**20 // (4 * vocabulary)  # type: ignore[arg-type]
        return cls(rows.requires_grad_(), weight.bfloat16().requires_grad_(), targets, max(1, chunk))

    def forward(self) -> tuple[Tensor, Tensor]:
        values, entropies, _ = selected_logprobs(
            self.rows,
            self.weight,
            self.targets,
            temperature=_TEMPERATURE,
            chunk_tokens=self.chunk,
            with_entropy=True,
        )
        assert entropies is not None
        return values, entropies


def head(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    found = Findings()
    _values(task, found)
    if this_device().type == "cuda":
        _speed_and_memory(task, found)
    yield "head", found


def _values(task: CheckTask, found: Findings) -> None:
    own = _Operands.made(task, 64 if task.rehearsal else _COMPARED)
    factor = torch.linspace(-1, 1, len(own.targets), device=this_device())
    values, entropies = own.forward()
    (values * factor).sum().backward()
    exact, exact_entropies, *gradients = _exact(own, factor)
    # A logit is a sum of as many products as the model is wide; products of bfloat16 are exact in float32.
    width, largest = own.rows.shape[1], float(exact.detach().abs().max())
    bound = 16 * math.sqrt(width) * ROUNDING[torch.float32] * largest
    why = (
        f"16 times what a float32 sum of {width} products is expected to be off; logits rounded to bfloat16 "
        f"are off by {ROUNDING[torch.bfloat16] * largest:.1g}"
    )
    found.at_most("log-probs, largest error in nats", _largest(values, exact), bound, why)
    found.at_most("entropies, largest error in nats", _largest(entropies, exact_entropies), bound, why)
    for name, reference in zip(("rows", "weight"), gradients, strict=True):
        a, b = getattr(own, name).grad.double(), reference.double()
        error, bound = float((a - b).norm() / b.norm()), 4 * ROUNDING[torch.bfloat16]
        why = "4 roundings of bfloat16: the logits' gradient and the result, twice each at most"
        found.at_most(f"gradient of the {name}, relative error", error, bound, why)


def _exact(own: _Operands, factor: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs and entropies by their definition, and the gradients of rows and weight where those of
    the log-probs are ``factor``: products in float32, all else in float64, a few rows at a time.
    """
    rows, weight = (t.detach().float().requires_grad_() for t in (own.rows, own.weight))
    values, entropies = [], []
    for start in range(0, len(rows), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        logp = ((rows[part] @ weight.T).double() / _TEMPERATURE).log_softmax(dim=1)
        values.append(logp.gather(1, own.targets[part, None])[:, 0])
        (values[-1] * factor[part]).sum().backward()
        entropies.append(torch.special.entr(logp.detach().exp()).sum(dim=1))
    assert rows.grad is not None and weight.grad is not None
    return torch.cat(values).detach(), torch.cat(entropies), rows.grad, weight.grad


def _largest(value: Tensor, exact: Tensor) -> float:
    return float((value.detach() - exact.detach()).abs().max())


def _speed_and_memory(task: CheckTask, found: Findings) -> None:
    own = _Operands.made(task, _TIMED)
    values: list[Tensor] = []

    def forward() -> None:
        values[:] = [own.forward()[0]]

    def backward() -> None:
        own.rows.grad = own.weight.grad = None
        values.pop().sum().backward()

    def both() -> None:
        forward()
        backward()

    both()
    operations = 2.0 * own.rows.numel() * own.weight.shape[0]
    rate = task.known["device/matrix_flops_per_s"]
    for name, work, passes in (("forward", forward, 1), ("backward", backward, 3)):
        fastest = float("inf")
        for _ in range(3):
            if name == "backward":
                forward()
            fastest = min(fastest, seconds_of(work))
        share = passes * operations / fastest / rate
        found.figures |= {f"head/{name}_s": fastest, f"head/{name}_of_matrix_rate": share}
        found.notes.append(f"{name} {written(fastest, 's')}, {written(share, '%')} of the matrix rate")
        found.at_least(f"{name}, share of the matrix rate", share, 0.15, _CORES)
    values.clear()
    own.rows.grad = own.weight.grad = None
    size = update_size(task, dtype=dtype_of(task), zero_stage=1)
    config = update_config(task, size, dtype=dtype_of(task), zero_stage=1)
    expected, peak = planned(task, config, size).parts["logits"], peak_bytes_of(both)
    found.figures |= {"head/peak_bytes": float(peak), "head/planned_bytes": float(expected)}
    found.notes.append(f"peak {written(peak, 'B')}, planned {written(expected, 'B')}")
    found.at_most("peak memory, off from plan", abs(peak / expected - 1), 0.05, "plan counts these buffers")
