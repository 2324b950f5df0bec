"""Times an optimiser step of TRL's GRPOTrainer on the work of `make_inputs.py`, in TRL's environment.

    python launch/peers/trl_step.py inputs/fixed --warmup 2 --steps 6 --json trl_fixed.json

transformers generates inside the trainer. ``work.json`` sets every completion's length: a logits processor
forbids EOS before it and forces EOS there, so the batch runs until its longest row has ended, as with a
trained model. No other setting listed in README.md was clearly faster than `_settings`; ``--set name=value``
tries one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


@dataclass(frozen=True)
class Work:
    """``prompts`` are token ids, S x P lists; ``lengths`` are tokens, S x P*G, by prompt."""

    cap: int
    samples: int
    prompts: list[list[list[int]]]
    lengths: list[list[int]]

    @property
    def rows(self) -> int:
        return len(self.lengths[0])


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    work = _read_work(args.inputs, args.warmup + args.steps)
    clock = Clock()
    with TemporaryDirectory() as directory:
        settings = _settings(work, directory, args.beta) | dict(args.set)
        trainer = _trainer(args.inputs / "model", args.attention, settings, work, clock)
        trainer.train()
    record = _record(clock, work, args, {k: v for k, v in settings.items() if k != "output_dir"})
    print(json.dumps({k: v for k, v in record.items() if k != "settings"}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", type=Path, help="directory written by make_inputs.py")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=6, help="timed steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--beta", type=float, default=0.0, help="KL coefficient; above 0 a reference is run")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--set", type=_setting, action="append", default=[], metavar="NAME=JSON",
                        help="another GRPOConfig setting")  # fmt: skip
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args()


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


def _read_work(inputs: Path, steps: int) -> Work:
    read = json.loads((inputs / "work.json").read_text())
    if len(read["steps"]) < steps:
        raise SystemExit(f"{inputs} has {len(read['steps'])} steps, {steps} are asked for; make more")
    taken = read["steps"][:steps]
    lengths = [[n for group in step["lengths"] for n in group] for step in taken]
    return Work(read["cap"], read["samples"], [step["prompts"] for step in taken], lengths)


def _settings(work: Work, directory: str, beta: float) -> dict[str, Any]:
    return {
        "output_dir": directory,
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": work.rows // 4,
        "gradient_accumulation_steps": 4,
        "num_generations": work.samples,
        "max_completion_length": work.cap,
        "beta": beta,
        "max_steps": len(work.lengths),
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _trainer(
    model_dir: Path, attention: str, settings: dict[str, Any], work: Work, clock: Clock
) -> GRPOTrainer:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation=attention
    )
    forced = ForcedLengths(model, work.lengths, tokenizer.eos_token_id)

    def parity(completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Return 0, 1, 0, 1 ...: no group has zero variance. Raises RuntimeError for wrong lengths."""
        if [len(ids) for ids in completion_ids] != forced.lengths.tolist():
            raise RuntimeError("TRL's completions do not have the lengths that work.json gives them")
        return [float(i % 2) for i in range(len(completion_ids))]

    token_ids = [ids for step in work.prompts for ids in step]
    prompts = [tokenizer.decode(ids) for ids in token_ids]
    if tokenizer(prompts)["input_ids"] != token_ids:
        raise RuntimeError("the tokenizer does not reproduce the prompts' token ids")
    trainer = GRPOTrainer(
        model,
        parity,
        GRPOConfig(**settings),
        Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    clock.watch(trainer, "_generate_single_turn")
    clock.watch(trainer, "_generate_and_score_completions")
    return trainer


class ForcedLengths:
    """Logits processor: row i of the n-th batch that ``model`` generates ends after ``lengths[n][i]`` tokens,
    with EOS as the last.
    """

    def __init__(self, model: Any, lengths: Sequence[Sequence[int]], eos: int) -> None:
        self._batches, self._eos, self._generate = iter(lengths), eos, model.generate
        self._batching = model.continuous_batching_context_manager
        self.lengths = torch.empty(0)  # stays empty with other generation methods
        model.generate, model.generate_batch = self._begin, self._begin_batch

    def _begin(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        self.lengths = torch.tensor(next(self._batches))
        self._last = self.lengths + input_ids.shape[1] - 1  # tokens in a row before its EOS
        return self._generate(input_ids=input_ids, logits_processor=[self], **inputs)

    def _begin_batch(self, inputs: list[list[int]], **settings: Any) -> dict[str, Any]:
        """Generate by continuous batching: each request has its own length, and no EOS ends it."""
        self.lengths, finished = torch.tensor(next(self._batches)), dict[str, Any]()
        del settings["progress_bar"]
        with self._batching(**settings, block=True, timeout=5) as manager:
            names = [
                manager.add_request(ids, max_new_tokens=length, eos_token_id=-1)
                for ids, length in zip(inputs, self.lengths.tolist(), strict=True)
            ]
            while len(finished) < len(names):
                result = manager.get_result(timeout=600)
                if result is None or result.error:
                    raise RuntimeError(f"continuous batching ended: {result and result.error}")
                if result.is_finished():
                    finished[result.request_id] = result
        return {name: finished[name] for name in names}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ends = self._last == input_ids.shape[1]
        scores = scores.masked_fill(ends[:, None], -torch.inf)
        scores[:, self._eos] = torch.where(ends, 0.0, -torch.inf)
        return scores


class Clock(TrainerCallback):
    """Measures seconds per step, from the end of the previous one, and of the watched methods in it. Also
    measures cores used by other processes, because timings on a busy machine mean little.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def watch(self, owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = plain(*args, **kwargs)
            self._spent[name] += time.perf_counter() - begin
            return result

        setattr(owner, name, watched)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        sampled, generated = (
            self._spent[name] for name in ("_generate_and_score_completions", "_generate_single_turn")
        )
        step = time.perf_counter() - self._since
        others = (_cpu_seconds_of_others() - self._others) / step
        self.steps.append(
            {
                "step": step,
                "generate": generated,
                "score": sampled - generated,
                "train": step - sampled,
                "others_cores": others,
            }
        )
        self._begin()

    def _begin(self) -> None:
        self._since, self._spent = time.perf_counter(), defaultdict[str, float](float)
        self._others = _cpu_seconds_of_others()


def _cpu_seconds_of_others() -> float:
    """Return the CPU time of all other processes since boot."""
    user, nice, system, _, _, irq, softirq, steal = Path("/proc/stat").read_text().split()[1:9]
    busy = sum(map(int, (user, nice, system, irq, softirq, steal)))
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


def _record(clock: Clock, work: Work, args: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Return medians of step parts. ``score``: reference log-probs, decoding, reward, advantages."""
    timed = clock.steps[args.warmup :]
    tokens = [sum(lengths) for lengths in work.lengths[args.warmup :]]
    return {
        "versions": {name: version(name) for name in ("trl", "transformers", "accelerate", "torch")},
        "threads": args.threads,
        "attention": args.attention,
        "settings": settings,
        "completion_tokens": statistics.mean(tokens),
        "median_s": {part: _median(timed, part) for part in ("step", "generate", "score", "train")},
        "step_s": [round(s["step"], 3) for s in timed],
        "others_cores": [round(s["others_cores"], 2) for s in timed],
        "completion_tokens_per_s": round(sum(tokens) / sum(s["step"] for s in timed), 1),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def _median(timed: Sequence[dict[str, float]], part: str) -> float:
    return round(statistics.median(step[part] for step in timed), 3)


if __name__ == "__main__":
    main()
