"""Measures a start with many rows: time and memory of all that is done for prompts, first and from the store.

    python -m tests.evidence.many_prompts MODEL [--rows 1800000] [--distinct 17000]

Writes a file of JSON Lines in which each row occurs about ROWS / DISTINCT times, as in DAPO-Math-17k, and
prints CPU seconds (of all threads) and the growth of the process' memory at each stage, once with an empty
store and once with what it left. MODEL: a directory with a tokenizer that has a chat template.
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
from pathlib import Path

from grpo_dist.config import DataConfig, DataSourceConfig, EnvironmentsConfig, RewardsConfig
from grpo_dist.data.readers import read_all
from grpo_dist.runs.identity import DataOrigin, columns_digest, data_digest
from grpo_dist.runs.prepare import PromptSections, load_tokenizer, train_prompts

WORDS = [
    "Let",
    "the",
    "triangle",
    "ABC",
    "with",
    "$x^2",
    "+",
    "y^2",
    "=",
    "z$",
    "find",
    "number",
    "of",
    "positive",
    "divisors",
    "such",
    "that",
    "sum",
    "\\frac{1}{n}",
    "is",
    "maximal",
    "and",
    "a_k",
    "is",
    "prime",
    "for",
    "circle",
    "radius",
    "point",
    "line",
    "segment",
    "angle",
]


def write(path: Path, rows: int, distinct: int) -> None:
    """Write ``rows`` rows of 250 bytes, of which ``distinct`` differ."""
    draw = random.Random(0)
    lines = [
        json.dumps({"problem": f"{i}: {' '.join(draw.choices(WORDS, k=32))}?", "answer": str(i % 1000)})
        + "\n"
        for i in range(distinct)
    ]
    with path.open("w") as file:
        file.writelines(lines[i % distinct] for i in range(rows))


def measure(path: Path, model: Path) -> None:
    """Print what each stage of a start takes."""
    tokenizer = load_tokenizer(model, False)
    tokenizer("1")
    source = DataSourceConfig(path=str(path))
    data = DataConfig(train=(source,), max_prompt_tokens=512)
    sections = PromptSections(data, RewardsConfig(), EnvironmentsConfig())
    begin, memory = (time.time(), time.process_time()), resident()

    def report(stage: str) -> None:
        nonlocal begin
        now = time.time(), time.process_time()
        wall, cpu = now[0] - begin[0], now[1] - begin[1]
        print(f"{stage:10} {cpu:6.1f} s CPU {wall:6.1f} s wall {(resident() - memory) / 2**30:6.2f} GiB more")
        begin = now

    rows = read_all((source,))
    report("rows")
    built = train_prompts(sections, rows, tokenizer, lambda message: None)
    report("prompts")
    DataOrigin.from_rows(built.row_uids, tokenizer, model, data)
    data_digest(built.prompts), columns_digest(built.prompts)
    report("digests")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{len(built.prompts):,} prompts; the process' peak: {peak:.2f} GiB")


def resident() -> int:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=1_800_000)
    parser.add_argument("--distinct", type=int, default=17_000)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.file:
        measure(args.file, args.model)
        return
    with tempfile.TemporaryDirectory() as place:
        path, store = Path(place) / "rows.jsonl", {"GRPO_DIST_CACHE": place}
        write(path, args.rows, args.distinct)
        for start in ("first", "second"):
            print(f"{start} start", flush=True)
            command = [
                sys.executable,
                "-m",
                "tests.evidence.many_prompts",
                str(args.model),
                "--file",
                str(path),
            ]
            subprocess.run(command, env={**os.environ, **store}, check=True)


if __name__ == "__main__":
    main()
