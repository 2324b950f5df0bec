"""The maths of GRPO and its family: plain functions on tensors, in registries. README.md lists them."""
