"""An engine driven step by step, with vLLM's own methods or with those that replace them here."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray

from actors.workers.engine_settings import EngineSpec, fitting_arguments, set_environment
from grpo_dist.config import ModelConfig, RolloutConfig, WeightSyncConfig
from tests.support.real_engine import ACTORS

MOST_TOKENS = 90
_REQUESTS, _BLOCKS = 24, 40  # a cache of 40 blocks is too small for 24 sequences of up to four


@dataclass
class Seen:
    """What an engine returned: by request its output, by step the tokens that lost their cache and how many
    blocks could be shared, and the hashes of those in the end.
    """

    outputs: dict
    preempted: list
    shared: list
    hashes: set


@ray.remote(num_cpus=0)
def seen(model_dir: Path, *, ahead: bool, plain: bool) -> tuple[Seen, list[str]]:
    """Return what an engine returns, and the names of the methods that are not vLLM's. ``ahead``: a made-up
    model and vLLM's scheduler that schedules ahead, as on GPUs.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    set_environment()
    from tests.evidence.engine_overhead import maker

    rollout = RolloutConfig(max_num_seqs=_REQUESTS, kv_cache_gib=0.01, enforce_eager=True)
    spec = EngineSpec(rollout, WeightSyncConfig(), ModelConfig(path="tiny"), str(model_dir), 256, seed=0)
    arguments = fitting_arguments(spec) | {"num_gpu_blocks_override": _BLOCKS, "watermark": 0.0}
    engine = maker(plain, ahead=ahead)(arguments, lambda: None)
    scheduler = engine.engine_core.engine_core.scheduler
    owners = (scheduler, scheduler.kv_cache_manager, engine.output_processor)
    return _run(engine), sorted(name for own in owners for name in vars(own) if callable(vars(own)[name]))


def _run(engine) -> Seen:
    """Sample all requests; meanwhile two are aborted, and the version of the weights changes twice."""
    from actors.workers.engine_thread import Preemptions

    core = engine.engine_core.engine_core
    preemptions, outputs, preempted, shared = Preemptions(core.scheduler), {}, [], []
    cached = core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
    engine.set_weight_version("0")
    for number in range(_REQUESTS):
        prompt = list(range(5, 8 + 7 * (number % 6)))
        engine.add_request(f"r{number}", {"prompt_token_ids": prompt}, _params(number))
    step = 0
    while core.scheduler.has_requests() or core.batch_queue:
        for output in engine.step():
            outputs[output.request_id] = _record(output)
        preempted.append(preemptions.since())
        shared.append(len(cached))
        step += 1
        if step in (20, 45):
            engine.set_weight_version(str(step))
        if step == 30:
            engine.abort_request(["r3", "r4"])
    assert not engine.output_processor.request_states
    return Seen(outputs, preempted, shared, set(map(str, cached)))


def _params(number):
    """Return a run's parameters; every sixth request has a stop text, every seventh no end but its length."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    stop = ["7"] if number % 6 == 1 else []
    return SamplingParams(
        temperature=1.0, max_tokens=MOST_TOKENS - number, ignore_eos=number % 7 == 0, seed=number, logprobs=0,
        flat_logprobs=True, stop=stop, detokenize=bool(stop), include_stop_str_in_output=True,
        skip_special_tokens=False, output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip


def _record(output):
    (own,) = output.outputs
    logprobs = np.asarray(own.logprobs.logprobs, np.float32)[own.logprobs.start_indices]
    assert len(logprobs) == len(own.logprobs) == len(own.token_ids)
    versions = [(span.version, span.start, span.end) for span in own.weight_versions]
    return (
        list(own.token_ids), own.logprobs.token_ids, logprobs.tobytes(), own.cumulative_logprob, versions,
        own.finish_reason, own.stop_reason, own.text, output.num_cached_tokens, output.finished,
    )  # fmt: skip


def both(model_dir, *, ahead):
    """Return `seen` of an engine with vLLM's own methods, and of one with this project's."""
    remote = seen.options(**ACTORS.options)
    return ray.get([remote.remote(model_dir, ahead=ahead, plain=plain) for plain in (True, False)])


@ray.remote(num_cpus=0)
def costs(model_dir: Path, sequences: int, tokens: int) -> list[list[float]]:
    """Return the steps that `engine_overhead` measures."""
    os.environ["OMP_NUM_THREADS"] = "1"
    set_environment()
    from tests.evidence.engine_overhead import measure

    return measure(sequences, tokens, model_dir, plain=False, profiled=False).steps
