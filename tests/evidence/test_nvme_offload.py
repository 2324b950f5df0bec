"""NVMe offload on real ranks gives the same numbers as none, also from a checkpoint. DeepSpeed compiles its
file access at first use, which takes minutes.
"""

import asyncio

import pytest

from grpo_dist.config import OffloadConfig
from tests.support.real_ranks import agree, two_updates

pytestmark = pytest.mark.evidence

NVME = {"optimiser": {"optimizer": "nvme"}, "all": {"optimizer": "nvme", "parameters": "nvme"}}


@pytest.mark.parametrize("name", NVME)
def test_offload_to_nvme_trains_as_without(ray_cluster, tiny_model, tmp_path, name):
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        pytest.skip("libaio and its header are not installed")
    disk = tmp_path / "nvme"
    disk.mkdir()
    offload = OffloadConfig(**NVME[name], nvme_path=str(disk))
    result = asyncio.run(two_updates(tiny_model, tmp_path / "policy", stage=3, offload=offload))
    agree(result, asyncio.run(two_updates(tiny_model, stage=2)))
    assert any(f.stat().st_size for f in disk.rglob("*") if f.is_file())
