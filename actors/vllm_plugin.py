"""What vLLM loads in each of its processes, through the entry point group `vllm.general_plugins`."""


def register() -> None:
    """Make this project's weight transfer known to vLLM. Called once per process, sometimes more."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    for name, engine in (("gloo", "GlooWeightTransfer"), ("nccl_verified", "NcclWeightTransfer")):
        if name not in Factory._registry:
            Factory.register_engine(name, "actors.weight_transfer", engine)
