"""The LM head in bfloat16: values and gradients against their definition, speed, and memory."""

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
    def random(cls, task: CheckTask, tokens: int) -> _Operands:
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
            self.rows, self.weight, self.targets, temperature=_TEMPERATURE, chunk_tokens=self.chunk,
            with_entropy=True,
        )  # fmt: skip
        assert entropies is not None
        return values, entropies


def head(task: CheckTask) -> Iterator[tuple[str, Findings]]:
    findings = Findings()
    _values(task, findings)
    if this_device().type == "cuda":
        _speed_and_memory(task, findings)
    yield "head", findings


def _values(task: CheckTask, findings: Findings) -> None:
    operands = _Operands.random(task, 64 if task.rehearsal else _COMPARED)
    factor = torch.linspace(-1, 1, len(operands.targets), device=this_device())
    values, entropies = operands.forward()
    (values * factor).sum().backward()
    exact, exact_entropies, *gradients = _exact(operands, factor)
    # A logit is a sum of hidden-size products; products of bfloat16 are exact in float32.
    width, largest = operands.rows.shape[1], float(exact.detach().abs().max())
    bound = 16 * math.sqrt(width) * ROUNDING[torch.float32] * largest
    why = (
        f"16 times what a float32 sum of {width} products is expected to be off; logits rounded to bfloat16 "
        f"are off by {ROUNDING[torch.bfloat16] * largest:.1g}"
    )
    findings.at_most("log-probs, largest error in nats", _largest_gap(values, exact), bound, why)
    findings.at_most("entropies, largest error in nats", _largest_gap(entropies, exact_entropies), bound, why)
    for name, reference in zip(("rows", "weight"), gradients, strict=True):
        a, b = getattr(operands, name).grad.double(), reference.double()
        error, bound = float((a - b).norm() / b.norm()), 4 * ROUNDING[torch.bfloat16]
        why = "4 roundings of bfloat16: the logits' gradient and the result, twice each at most"
        findings.at_most(f"gradient of the {name}, relative error", error, bound, why)


def _exact(operands: _Operands, factor: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs and entropies by their definition, and the gradients of rows and weight for the
    upstream gradient ``factor``: products in float32, the rest in float64, a few rows at a time.
    """
    rows, weight = (t.detach().float().requires_grad_() for t in (operands.rows, operands.weight))
    values, entropies = [], []
    for start in range(0, len(rows), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        logp = ((rows[part] @ weight.T).double() / _TEMPERATURE).log_softmax(dim=1)
        values.append(logp.gather(1, operands.targets[part, None])[:, 0])
        (values[-1] * factor[part]).sum().backward()
        entropies.append(torch.special.entr(logp.detach().exp()).sum(dim=1))
    assert rows.grad is not None and weight.grad is not None
    return torch.cat(values).detach(), torch.cat(entropies), rows.grad, weight.grad


def _largest_gap(value: Tensor, exact: Tensor) -> float:
    return float((value.detach() - exact.detach()).abs().max())


def _speed_and_memory(task: CheckTask, findings: Findings) -> None:
    operands = _Operands.random(task, _TIMED)
    values: list[Tensor] = []

    def forward() -> None:
        values[:] = [operands.forward()[0]]

    def backward() -> None:
        operands.rows.grad = operands.weight.grad = None
        values.pop().sum().backward()

    def both() -> None:
        forward()
        backward()

    both()
    operations = 2.0 * operands.rows.numel() * operands.weight.shape[0]
    rate = task.device_figures["device/matrix_flops_per_s"]
    for name, work, passes in (("forward", forward, 1), ("backward", backward, 3)):
        fastest = float("inf")
        for _ in range(3):
            if name == "backward":
                forward()
            fastest = min(fastest, seconds_of(work))
        share = passes * operations / fastest / rate
        findings.figures |= {f"head/{name}_s": fastest, f"head/{name}_of_matrix_rate": share}
        findings.notes.append(f"{name} {written(fastest, 's')}, {written(share, '%')} of the matrix rate")
        findings.at_least(f"{name}, share of the matrix rate", share, 0.15, _CORES)
    values.clear()
    operands.rows.grad = operands.weight.grad = None
    size = update_size(task, dtype=dtype_of(task), zero_stage=1)
    config = update_config(task, size, dtype=dtype_of(task), zero_stage=1)
    budget, peak = planned(task, config, size).parts["logits"], peak_bytes_of(both)
    findings.figures |= {"head/peak_bytes": float(peak), "head/planned_bytes": float(budget)}
    findings.notes.append(f"peak {written(peak, 'B')}, planned {written(budget, 'B')}")
    findings.at_most("peak memory, off from plan", abs(peak / budget - 1), 0.05, "plan counts these buffers")
