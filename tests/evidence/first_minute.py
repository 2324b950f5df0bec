"""Measures the first minute of each command against the imports that all of them need.

    python -m tests.evidence.first_minute [--repeats 3] [--only=--help,check,plan,report,train]

Commands that start nothing: CPU seconds of the process and its children, alternating with a process that
imports torch and two classes of transformers. `train`: seconds, and CPU seconds of all its processes, to
"ready", when the first request goes to an engine that has sampled its first tokens; alternating with
`vllm.LLM` on the same model with the same arguments, to its first token. A first round warms the caches (the
cold start's model, compiled code).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.support.reports import make_run

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = (
    "import torch; from transformers import AutoTokenizer, AutoConfig; "
    "AutoTokenizer.from_pretrained; AutoConfig.from_pretrained"
)
COMMANDS = {  # arguments, and the goal: at most this share of the imports' CPU seconds
    "--help": (["--help"], None),
    "check": (["check", "configs/demo.yaml"], 1.3),
    "plan 1.5B, 1x8": (["plan", "configs/gsm8k_qwen2.5_1.5b.yaml", "--cluster", "1x8xH100"], 0.5),
    "plan 7B, 8x8": (["plan", "configs/math_qwen2.5_7b_8nodes.yaml", "--cluster", "8x8xH100"], 0.5),
    "report of 90 steps": (["report", "{run}", "--output", "{out}/report.html"], 0.5),
}
# One token of the demo's model, with the engine's arguments except weight transfer.
LLM = """
import sys
from pathlib import Path
from actors.workers.engine_settings import EngineSpec, fitting_arguments, set_environment
from grpo_dist.config.files import load_config
config = load_config("configs/demo.yaml", [])
set_environment()
from vllm import LLM, SamplingParams
arguments = fitting_arguments(EngineSpec.from_config(config, Path(sys.argv[1])))
del arguments["weight_transfer_config"]
engine = LLM(**arguments)
engine.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=1), use_tqdm=False)
print("ready", flush=True)
"""


def _environment() -> dict[str, str]:
    """Return this process's variables without the one that makes Python recompile the project every time."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def cpu_seconds(command: list[str]) -> float:
    """Run ``command``; return its CPU seconds with children."""
    process = subprocess.Popen(command, cwd=ROOT, env=_environment(), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return usage.ru_utime + usage.ru_stime


def seconds_to_ready(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Start ``command``, and stop it at its line "ready". Return its seconds and CPU seconds."""
    begin = time.perf_counter()
    process = psutil.Popen(
        command, cwd=ROOT, env=_environment() | environment, stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.split("  ")[-1].startswith("ready"):
            seconds = time.perf_counter() - begin
            cpu_seconds = sum(sum(p.cpu_times()[:4]) for p in [process, *process.children(recursive=True)])
            print(f"{seconds:.1f} s, {cpu_seconds:.1f} of CPU: {line.strip()}", file=sys.stderr, flush=True)
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
            process.wait()
            return seconds, cpu_seconds
    raise SystemExit(f'{" ".join(command)} ended without a line "ready"')


def ratios(
    repeats: int, reference: Callable[[], float], commands: dict[str, Callable[[], float]]
) -> tuple[list[float], dict[str, list[float]]]:
    """Run ``reference`` and all ``commands`` in turn, ``repeats`` times after a first round."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    base: list[float] = []
    for number in range(repeats + 1):
        measured = {"": reference()} | {name: run() for name, run in commands.items()}
        if number:
            base.append(measured.pop(""))
            for name, seconds in measured.items():
                times[name].append(seconds)
    return base, times


def show(name: str, seconds: Sequence[float], base: Sequence[float], aim: float | None) -> None:
    shares = [a / b for a, b in zip(seconds, base, strict=True)]
    spread = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
    print(f"| {name} | {statistics.median(seconds):.1f} | {spread} | {aim or ''} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="--help,check,plan,report,train")
    parser.add_argument("--run", help="a run directory for `report`; default: a made one of the demo's size")
    options = parser.parse_args()
    only = options.only.split(",")
    cli = [sys.executable, "-m", "grpo_dist.cli"]
    with tempfile.TemporaryDirectory() as out:
        run = options.run or make_run(
            Path(out, "run"), steps=90, groups=16, samples=16, recorded=range(0, 91, 10)
        )
        places = {"run": str(run), "out": out}
        if wanted := {n: entry for n, entry in COMMANDS.items() if n.split()[0] in only}:
            base, times = ratios(
                options.repeats,
                lambda: cpu_seconds([sys.executable, "-c", IMPORTS]),
                {
                    name: lambda words=words: cpu_seconds([*cli, *(word.format(**places) for word in words)])  # type: ignore[misc]
                    for name, (words, _) in wanted.items()
                },
            )
            print("| command | CPU seconds | of the imports | goal |\n|---|---|---|---|")
            show("the imports", base, base, None)
            for name, (_, aim) in wanted.items():
                show(name, times[name], base, aim)
        if "train" in only:
            settings = ["name=first_minute", f"output_dir={out}", "checkpoint.resume=never"]
            alone = [sys.executable, "-c", LLM, model_directory()]
            train = [*cli, "train", "configs/demo.yaml", *settings]
            rounds = [
                (seconds_to_ready(alone, {"OMP_NUM_THREADS": "1"}), seconds_to_ready(train, {}))
                for _ in range(options.repeats + 1)
            ]
            base_times, train_times = zip(*rounds[1:], strict=True)
            for unit, of_base, of_train in zip(
                ("seconds", "CPU seconds"),
                zip(*base_times, strict=True),
                zip(*train_times, strict=True),
                strict=True,
            ):
                print(f"\n| start | {unit} | of vllm.LLM | goal |\n|---|---|---|---|")
                show("`vllm.LLM`, one token", of_base, of_base, None)
                show("`train configs/demo.yaml`", of_train, of_base, 2.0)


def model_directory() -> str:
    """Return the directory of the demo's model, trained in a cold start if it is not cached."""
    code = (
        "from grpo_dist.config.files import load_config; from grpo_dist.runs.models import resolve_model; "
        "import json, sys; c = load_config('configs/demo.yaml', []); "
        "print(json.dumps(str(resolve_model(c.model, c.sft, c.seed, lambda _: None))))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return str(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
