"""Measures a start with many rows: time and memory of preparing the prompts, without and with the cache.

    python -m tests.evidence.many_prompts [MODEL] [--rows 1800000] [--distinct 17000] [--demonstrations]

Writes a file of JSON Lines in which each row occurs about ROWS / DISTINCT times, as in DAPO-Math-17k, and
prints CPU seconds (of all threads) and the growth of the process's memory at each stage, once with an empty
cache and once with a filled one; then it runs `grpo-dist check` on the file. MODEL: a directory with a
tokenizer that has a chat template; default: SmolLM2. --demonstrations: rows for supervised training.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

from grpo_dist.config import DataConfig, DataSourceConfig, EnvironmentsConfig, RewardsConfig, SFTConfig
from grpo_dist.data.columns import column
from grpo_dist.data.demonstrations import load_demonstrations
from grpo_dist.data.readers import read_all
from grpo_dist.demo.smollm2 import smollm2
from grpo_dist.runs.identity import DataOrigin, columns_digest, data_digest
from grpo_dist.runs.models import load_tokenizer
from grpo_dist.runs.prepare import train_prompts
from grpo_dist.types import Prompt

TEXT = """Let the triangle ABC with $x^2 + y^2 = z$ find number of positive divisors such that sum
\\frac{1}{n} is maximal and a_k is prime for circle radius point line segment angle"""
WORDS = TEXT.split()
_MAX_PROMPT_TOKENS = 512


def write(path: Path, rows: int, distinct: int, columns: Sequence[str]) -> None:
    """Write ``rows`` rows of 250 bytes, of which ``distinct`` differ."""
    draw = random.Random(0)
    texts = [f"{i}: {' '.join(draw.choices(WORDS, k=32))}?" for i in range(distinct)]
    with path.open("w") as file:
        for i in range(rows):
            text, answer = texts[i % distinct], str(i % distinct % 1000)
            row = {"prompt": text, "completion": answer, "problem": text, "answer": answer}
            file.write(json.dumps({name: row[name] for name in columns}) + "\n")


def measure(path: Path, model: Path, *, demonstrations: bool) -> None:
    """Print the cost of each stage of a start."""
    tokenizer = load_tokenizer(model, False)
    tokenizer("1")
    source = DataSourceConfig(path=str(path))
    data = DataConfig(train=(source,), max_prompt_tokens=_MAX_PROMPT_TOKENS)
    sections = SimpleNamespace(data=data, rewards=RewardsConfig(), environments=EnvironmentsConfig())
    begin, memory = (time.time(), time.process_time()), resident()

    def report(stage: str) -> None:
        nonlocal begin
        now = time.time(), time.process_time()
        wall, cpu = now[0] - begin[0], now[1] - begin[1]
        print(f"{stage:10} {cpu:6.1f} s CPU {wall:6.1f} s wall {(resident() - memory) / 2**30:6.2f} GiB more")
        begin = now

    prompts: Sequence[Prompt]
    if demonstrations:
        settings = SFTConfig.model_validate({"model": str(model), "data": [{"path": str(path)}]})
        prompts = rows_read = load_demonstrations(settings, tokenizer)
        report("rows")
        uids = column(rows_read, "row_uid")
    else:
        rows = read_all((source,))
        report("rows")
        built = train_prompts(sections, rows, tokenizer, print)
        report("prompts")
        prompts, uids = built.prompts, built.row_uids
    DataOrigin.from_rows(uids, tokenizer, model, data)
    data_digest(prompts), columns_digest(prompts)
    report("digests")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{len(prompts):,} prompts; the process' peak: {peak:.2f} GiB")


def check(path: Path, model: Path, environment: Mapping[str, str]) -> None:
    """Print the cost of `grpo-dist check` with a filled cache."""
    config = {
        "name": "many", "steps": 1, "model": {"path": str(model)},
        "data": {"train": [{"path": str(path)}], "max_prompt_tokens": _MAX_PROMPT_TOKENS},  # as `measure`
        "evaluation": {"every": 0}, "rollout": {"kv_cache_gib": 1}, "output_dir": str(path.parent / "runs"),
    }  # fmt: skip
    file = path.with_name("many.yaml")
    file.write_text(json.dumps(config))
    for call in ("first", "second"):
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
        command = [sys.executable, "-m", "grpo_dist.cli", "check", str(file)]
        subprocess.run(command, env=environment, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"check, {call} call: {cpu:6.1f} s CPU {time.time() - begin:6.1f} s wall")


def resident() -> int:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="default: SmolLM2")
    parser.add_argument("--rows", type=int, default=1_800_000)
    parser.add_argument("--distinct", type=int, default=17_000)
    parser.add_argument("--demonstrations", action="store_true")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = args.model or smollm2()
    if args.file:
        measure(args.file, model, demonstrations=args.demonstrations)
        return
    columns = ("prompt", "completion") if args.demonstrations else ("problem", "answer")
    with tempfile.TemporaryDirectory() as place:
        path, environment = Path(place) / "rows.jsonl", {**os.environ, "GRPO_DIST_CACHE": place}
        write(path, args.rows, args.distinct, columns)
        further = ["--demonstrations"] if args.demonstrations else []
        for start in ("first", "second"):
            print(f"{start} start of {args.rows:,} rows, {args.distinct:,} distinct", flush=True)
            command = [sys.executable, "-m", "tests.evidence.many_prompts", str(model), *further]
            subprocess.run([*command, "--file", str(path)], env=environment, check=True)
        if not args.demonstrations:
            check(path, model, environment)


if __name__ == "__main__":
    main()
