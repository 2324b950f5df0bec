"""Compiles the kernels of the LM head for an H100: ``python -m tests.support.compiled_kernel``.

Prints the bytes of machine code of each. Needs no GPU.
"""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from grpo_dist.policy import logit_kernels

TYPES = {
    "targets": "*i64", "out": "*bf16", "vocabulary": "i32", "slope": "fp32", "cap": "fp32",
    "CAPPED": "constexpr", "BLOCK": "constexpr",
}  # fmt: skip


def main():
    for kernel in (logit_kernels._forward, logit_kernels._backward):
        signature = {name: TYPES.get(name, "*fp32") for name in kernel.arg_names}
        constants = {"CAPPED": True, "BLOCK": logit_kernels._BLOCK}
        constants = {name: value for name, value in constants.items() if name in signature}
        source = ASTSource(kernel, signature, constexprs=constants)
        compiled = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": logit_kernels._WARPS}
        )
        print(len(compiled.asm["cubin"]))


if __name__ == "__main__":
    main()
