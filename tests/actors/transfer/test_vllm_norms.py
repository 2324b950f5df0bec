"""Norms of engines on CPUs: vLLM's kernels give what torch gives, for each layout in memory."""

from types import SimpleNamespace

import pytest
import torch
from vllm import ir, platforms
from vllm.config import CompilationMode

from actors.transfer.vllm_plugin import PROVIDER, register_norms

ROWS, HEADS, SIZE = 5, 4, 32
KERNELS = [PROVIDER, "native"]


def layouts():
    """Return tensors [..., SIZE] with different layouts in memory."""
    values = torch.randn(ROWS, 2 * HEADS * SIZE, generator=torch.Generator().manual_seed(0))
    heads = values[:, : HEADS * SIZE].view(ROWS, HEADS, SIZE)
    return {
        "rows": values.view(-1, SIZE),
        "columns of wider rows": values[:, :SIZE],
        "heads of packed queries and keys": heads,
        "heads first": heads.transpose(0, 1),
    }


def both(operation, *arguments):
    """Return the results of the kernels and of torch for copies in the same layout."""
    register_norms()
    results = []
    for priority in (KERNELS, ["native"]):
        copies = [torch.empty_strided(a.shape, a.stride()).copy_(a) for a in arguments]
        weight = torch.linspace(0.5, 2.0, SIZE)
        with operation.set_priority(priority):
            results.append(operation(*copies, weight, 1e-6))
    return results


@pytest.mark.parametrize("layout", layouts())
def test_the_norms_of_a_tensor_and_of_a_sum_match_torch(layout):
    x = layouts()[layout]
    pairs = both(ir.ops.rms_norm, x), both(ir.ops.fused_add_rms_norm, x, x.flip(0).mul(3).clone())
    for kernel, torchs in pairs:
        torch.testing.assert_close(kernel, torchs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "norms"), [(CompilationMode.NONE, KERNELS), (CompilationMode.DYNAMO_TRACE_ONCE, ["native"])]
)
def test_norms_are_vllms_kernels_where_nothing_compiles_them(mode, norms):
    register_norms()
    config = SimpleNamespace(compilation_config=SimpleNamespace(mode=mode))
    preferred = platforms.current_platform.get_default_ir_op_priority(config)
    assert preferred.rms_norm == preferred.fused_add_rms_norm == norms
    assert preferred.gelu_and_mul_sparse == ["native"]
