"""liger-kernel on a CPU, by Triton's interpreter: ``python -m tests.support.interpreted_layers DIRECTORY``.

Prints one JSON object. `architectures`: of each that has kernels, how far they are from torch's operations in
float32 (the largest difference of hidden states as a share of the largest, and of gradients), and which ran.
`kept`: what a forward pass keeps, in float32 and in bfloat16.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined

import numpy as np
import torch
import triton
import triton.language as tl
from liger_kernel.ops import geglu, rms_norm
from transformers import AutoModelForCausalLM
from triton.runtime import interpreter

from grpo_dist.policy.attention import BlockKernel
from grpo_dist.policy.layer_kernels import _ACTIVATIONS, replace_operations
from grpo_dist.policy.varlen_attention import VarlenKernel
from tests.support.architectures import SHAPES, architecture
from tests.support.kept_tensors import SHAPE, kept_for_backward, varlen_that_keeps


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
    rms_norm.rsqrt, geglu.tanh = _rsqrt, _tanh


def ran():
    """Return a set that the names of kernels are added to as they run."""
    names, call = set(), interpreter.GridExecutor.__call__

    def noted(self, *args, **kwargs):
        names.add(self.fn.__name__)
        return call(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = noted
    return names


def results(model):
    """Hidden states of nine tokens, and the gradients of a weighted sum of these."""
    model.zero_grad()
    tokens = torch.randint(272, (1, 9), generator=torch.Generator().manual_seed(1))
    hidden = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return hidden.detach(), gradients


def kept(dtype):
    """What a forward pass of `SHAPE` keeps with the kernels: bytes, and tokens of the stream and its rows."""
    how = {"checkpointing": False, "prompt": 16, "total": 32, "change": replace_operations}
    kernel = VarlenKernel(varlen_that_keeps) if dtype == torch.bfloat16 else BlockKernel()
    return kept_for_backward(SHAPE, dtype, kernel, **how)


def main(directory):
    complete_the_interpreter()
    models = {
        name: AutoModelForCausalLM.from_pretrained(architecture(directory, name), dtype=torch.float32)
        for name, (kind, _) in SHAPES.items()
        if kind in _ACTIVATIONS
    }
    by_torch = {name: results(model) for name, model in models.items()}  # before classes are replaced
    kernels, found = ran(), {}
    for name, model in models.items():
        kernels.clear()
        replace_operations(model)
        hidden, gradients = results(model)
        expected, exact = by_torch[name]
        assert gradients.keys() == exact.keys()
        apart = max(float((gradients[key] - g).norm() / g.norm()) for key, g in exact.items())
        found[name] = [float((hidden - expected).abs().max() / expected.abs().max()), apart, sorted(kernels)]
    print(json.dumps({"architectures": found, "kept": [kept(torch.float32), kept(torch.bfloat16)]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
