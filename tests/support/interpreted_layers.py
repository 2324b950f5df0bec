"""liger-kernel on a CPU, in Triton's interpreter: ``python -m tests.support.interpreted_layers DIRECTORY``.

Prints one JSON object. `architectures`: for each architecture with kernels, the error against torch's
operations in float32 (largest difference of hidden states as a share of the largest, and of gradients), and
the kernels that ran. `kept`: memory that a forward pass keeps in float32 and in bfloat16. `loaded`,
`many rows`: see these functions.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before kernels are defined

import numpy as np
import torch
import triton
import triton.language as tl
from liger_kernel.ops import geglu, rms_norm
from liger_kernel.transformers.rms_norm import LigerRMSNorm
from transformers import AutoModelForCausalLM
from triton.runtime import interpreter

from grpo_dist.policy import layer_kernels, model
from grpo_dist.policy.attention import block_spans, varlen_spans
from grpo_dist.policy.layer_kernels import _ACTIVATIONS, replace_operations
from grpo_dist.policy.model import load_causal_lm
from grpo_dist.policy.sequence_parallel import check_heads
from tests.support.kept_tensors import SHAPE, kept_for_backward, varlen_that_keeps
from tests.support.models import SHAPES, architecture


@triton.jit
def _rsqrt(x):
    return 1.0 / tl.sqrt(x)


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


def complete_the_interpreter():
    """Add missing parts: functions of CUDA's library, and methods of numeric arguments."""
    converted = interpreter._implicit_cvt

    def convert(argument):
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return converted(argument)

    interpreter._implicit_cvt = convert
    layer_kernels.has_kernels = lambda tensor: not tensor.is_meta
    rms_norm.rsqrt, geglu.tanh = _rsqrt, _tanh


def record_kernels():
    """Return a set that collects the names of kernels as they run."""
    names, call = set(), interpreter.GridExecutor.__call__

    def noted(self, *args, **kwargs):
        names.add(self.fn.__name__)
        return call(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = noted
    return names


def results(causal_lm):
    """Return hidden states of nine tokens, and the gradients of their weighted sum."""
    causal_lm.zero_grad()
    tokens = torch.randint(272, (1, 9), generator=torch.Generator().manual_seed(1))
    hidden = causal_lm.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in causal_lm.named_parameters() if p.grad is not None}
    return hidden.detach(), gradients


def kept_memory(dtype):
    """Return what a forward pass of `SHAPE` keeps with kernels: bytes, and tokens of stream and rows."""
    how = {"checkpointing": False, "prompt": 16, "total": 32, "change": replace_operations}
    kernel = partial(varlen_spans, varlen_that_keeps) if dtype == torch.bfloat16 else block_spans
    return kept_for_backward(SHAPE, dtype, kernel, **how)


def norm_errors():
    """Return relative errors, against float64, of a norm over so many rows that they share programs."""
    rows, width = 2**15 + 8, 16
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(2), requires_grad=True)
    norm = LigerRMSNorm(width)
    exact = x.detach().double().requires_grad_()
    expected = exact * (exact.square().mean(1, keepdim=True) + norm.variance_epsilon).rsqrt()
    up = torch.linspace(-1, 1, x.numel()).view_as(x)
    output = norm(x)
    output.backward(up.clone())  # overwrites its argument
    expected.backward(up.double())
    return [float((a - b).norm() / b.norm()) for a, b in ((output, expected), (x.grad, exact.grad))]


def load_both(directory):
    """Load a model for packed rows as a worker on a GPU does, then another of its type without kernels.
    Return the kernels that ran, whether each model's norm is patched, and the second one's classes.
    """
    path, kernels = str(architecture(directory, "qwen3")), record_kernels()
    model.device_type = lambda: "cuda"
    options = {"dtype": torch.float32, "attention": "auto", "trust_remote_code": False, "packing": True}
    first = load_causal_lm(path, kernels="auto", **options)
    check_heads(first, 2)
    later = load_causal_lm(path, kernels="torch", **options)
    both = [type(m.model.norm).forward != m.model.norm.forward.__func__ for m in (first, later)]
    return sorted(kernels), both, [type(m).__name__ for m in (later.model.norm, later.model.layers[0].mlp)]


def main(directory):
    complete_the_interpreter()
    models = {
        name: AutoModelForCausalLM.from_pretrained(architecture(directory, name), dtype=torch.float32)
        for name, (kind, _) in SHAPES.items()
        if kind in _ACTIVATIONS
    }
    by_torch = {name: results(causal_lm) for name, causal_lm in models.items()}
    kernels, errors = record_kernels(), {}
    for name, causal_lm in models.items():
        kernels.clear()
        replace_operations(causal_lm)
        hidden, gradients = results(causal_lm)
        expected, exact = by_torch[name]
        assert gradients.keys() == exact.keys()
        apart = max(float((gradients[key] - g).norm() / g.norm()) for key, g in exact.items())
        errors[name] = [float((hidden - expected).abs().max() / expected.abs().max()), apart, sorted(kernels)]
    report = {
        "architectures": errors,
        "kept": [kept_memory(torch.float32), kept_memory(torch.bfloat16)],
        "loaded": load_both(directory),
        "many rows": norm_errors(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
