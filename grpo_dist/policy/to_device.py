"""Moves tensors of host memory to the device that computes with them."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``. From host memory to a GPU this thread does not wait for what the GPU
    computes: torch keeps the pinned memory until the copy has ended.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
