"""liger-kernel on a CPU, by Triton's interpreter: ``python -m tests.support.interpreted_layers DIRECTORY``.

Prints one JSON object. `architectures`: how far each architecture that has kernels is from torch's operations
in float32 (the largest difference of hidden states as a share of the largest, and of gradients), and which
kernels ran. `kept`: what a forward pass keeps in float32 and in bfloat16. `loaded`, `many rows`: see these
functions.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined

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
    """Add what it lacks: functions of CUDA's library, and methods of numbers that are arguments."""
    converted = interpreter._implicit_cvt

    def of_numbers(argument):
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return converted(argument)

    interpreter._implicit_cvt = of_numbers
    layer_kernels.has_kernels = lambda tensor: not tensor.is_meta
    rms_norm.rsqrt, geglu.tanh = _rsqrt, _tanh


def ran():
    """Return a set that the names of kernels are added to as they run."""
    names, call = set(), interpreter.GridExecutor.__call__

    def noted(self, *args, **kwargs):
        names.add(self.fn.__name__)
        return call(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = noted
    return names


def results(own):
    """Hidden states of nine tokens, and the gradients of a weighted sum of these."""
    own.zero_grad()
    tokens = torch.randint(272, (1, 9), generator=torch.Generator().manual_seed(1))
    hidden = own.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in own.named_parameters() if p.grad is not None}
    return hidden.detach(), gradients


def kept(dtype):
    """What a forward pass of `SHAPE` keeps with the kernels: bytes, and tokens of the stream and its rows."""
    how = {"checkpointing": False, "prompt": 16, "total": 32, "change": replace_operations}
    kernel = partial(varlen_spans, varlen_that_keeps) if dtype == torch.bfloat16 else block_spans
    return kept_for_backward(SHAPE, dtype, kernel, **how)


def many_rows():
    """Relative errors, against float64, of a norm over more rows than each get a program of their own."""
    rows, width = 2**15 + 8, 16
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(2), requires_grad=True)
    own = LigerRMSNorm(width)
    exact = x.detach().double().requires_grad_()
    expected = exact * (exact.square().mean(1, keepdim=True) + own.variance_epsilon).rsqrt()
    up = torch.linspace(-1, 1, x.numel()).view_as(x)
    found = own(x)
    found.backward(up.clone())  # which is overwritten
    expected.backward(up.double())
    return [float((a - b).norm() / b.norm()) for a, b in ((found, expected), (x.grad, exact.grad))]


def loaded(directory):
    """The kernels that run while a worker on a GPU loads a model that reads packed rows, and a later model of
    its type is made; whether the first has kernels and the second has not.
    """
    path, kernels = str(architecture(directory, "qwen3")), ran()
    model.device_type = lambda: "cuda"
    how = {"dtype": torch.float32, "attention": "auto", "trust_remote_code": False, "packing": True}
    own = load_causal_lm(path, kernels="auto", **how)
    check_heads(own, 2)
    later = load_causal_lm(path, kernels="torch", **how)
    both = [type(m.model.norm).forward != m.model.norm.forward.__func__ for m in (own, later)]
    return sorted(kernels), both, [type(m).__name__ for m in (later.model.norm, later.model.layers[0].mlp)]


def main(directory):
    complete_the_interpreter()
    models = {
        name: AutoModelForCausalLM.from_pretrained(architecture(directory, name), dtype=torch.float32)
        for name, (kind, _) in SHAPES.items()
        if kind in _ACTIVATIONS
    }
    by_torch = {name: results(own) for name, own in models.items()}
    kernels, found = ran(), {}
    for name, own in models.items():
        kernels.clear()
        replace_operations(own)
        hidden, gradients = results(own)
        expected, exact = by_torch[name]
        assert gradients.keys() == exact.keys()
        apart = max(float((gradients[key] - g).norm() / g.norm()) for key, g in exact.items())
        found[name] = [float((hidden - expected).abs().max() / expected.abs().max()), apart, sorted(kernels)]
    made = {
        "architectures": found,
        "kept": [kept(torch.float32), kept(torch.bfloat16)],
        "loaded": loaded(directory),
        "many rows": many_rows(),
    }
    print(json.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
