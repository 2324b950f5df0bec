"""Norms of engines on CPUs: vLLM's kernels give what torch gives, for each layout in memory."""

from types import SimpleNamespace

import pytest
import torch
from vllm import ir, platforms
from vllm.config import CompilationMode

from actors.transfer.vllm_plugin import PROVIDER, register_norms

ROWS, HEADS, SIZE = 5, 4, 32
OWN = [PROVIDER, "native"]


def layouts():
    """Return tensors of the same values' shape [..., SIZE] that lie in memory in different ways."""
    made = torch.randn(ROWS, 2 * HEADS * SIZE, generator=torch.Generator().manual_seed(0))
    heads = made[:, : HEADS * SIZE].view(ROWS, HEADS, SIZE)
    return {
        "rows": made.view(-1, SIZE),
        "columns of wider rows": made[:, :SIZE],
        "heads of packed queries and keys": heads,
        "heads first": heads.transpose(0, 1),
    }


def both(operation, *arguments):
    """Return what the kernels and what torch gives, for copies in the same layout."""
    register_norms()
    found = []
    for priority in (OWN, ["native"]):
        own = [torch.empty_strided(a.shape, a.stride()).copy_(a) for a in arguments]
        weight = torch.linspace(0.5, 2.0, SIZE)
        with operation.set_priority(priority):
            found.append(operation(*own, weight, 1e-6))
    return found


@pytest.mark.parametrize("layout", layouts())
def test_a_norm_is_that_of_torch(layout):
    kernel, torchs = both(ir.ops.rms_norm, layouts()[layout])
    torch.testing.assert_close(kernel, torchs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", layouts())
def test_the_norm_of_a_sum_is_that_of_torch(layout):
    x = layouts()[layout]
    kernel, torchs = both(ir.ops.fused_add_rms_norm, x, x.flip(0).mul(3).clone())
    torch.testing.assert_close(kernel, torchs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "norms"), [(CompilationMode.NONE, OWN), (CompilationMode.DYNAMO_TRACE_ONCE, ["native"])]
)
def test_norms_are_vllms_kernels_where_nothing_compiles_them(mode, norms):
    register_norms()
    own = SimpleNamespace(compilation_config=SimpleNamespace(mode=mode))
    preferred = platforms.current_platform.get_default_ir_op_priority(own)
    assert preferred.rms_norm == preferred.fused_add_rms_norm == norms
    assert preferred.gelu_and_mul_sparse == ["native"]
