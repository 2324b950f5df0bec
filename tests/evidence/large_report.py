"""Measures the report of a large run: seconds, memory and page size, and the paint time in a browser.

    python -m tests.evidence.large_report MODEL [--steps 1000] [--samples 8192] [--tokens 200]

Writes a run directory of generated steps, runs `grpo-dist report`, and opens the page in headless Chromium.
MODEL: a directory with a tokenizer. Only the newest tables of samples differ: the others are links to one, as
the report does not read them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from tests.evidence.many_prompts import WORDS
from tests.support.reports import chromium, write_lines

GROUP = 16  # samples of a prompt
DIFFERENT = 16  # newest tables
WORKERS = 60  # in the timeline, each with five spans a step
METRICS = 120


def write_run(directory: Path, model: Path, steps: int, samples: int, tokens: int) -> None:
    rng = np.random.default_rng(0)
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(json.dumps({"name": "large", "model": {"path": str(model)}}))
    names = ["reward/mean", "policy/entropy", "time/step_s", *(f"rollout/m{i}" for i in range(METRICS - 3))]
    values = rng.random((steps, len(names)))
    write_lines(
        directory / "metrics.jsonl",
        [{"step": i, **dict(zip(names, row, strict=True))} for i, row in enumerate(values.tolist(), 1)],
    )
    write_lines(
        directory / "timeline.jsonl",
        [
            {"step": i, "spans": [[f"worker-{w}", f"s{s}", 2e9 + 9.0 * i + s, 2e9 + 9.0 * i + s + 1]
             for w in range(WORKERS) for s in range(5)]}
            for i in range(1, steps + 1)
        ],
    )  # fmt: skip
    write_lines(
        directory / "ledger.jsonl",
        [{"step": i, "trained": [f"p{i}-{g}" for g in range(samples // GROUP)]} for i in range(1, steps + 1)],
    )
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    (directory / "samples").mkdir()
    paths = [directory / f"samples/step_{step:06d}.parquet" for step in range(1, steps + 1)]
    for step, path in enumerate(paths, 1):
        if 1 < step <= steps - DIFFERENT:
            os.link(paths[0], path)
        else:
            write_samples(path, step, tokenizer, samples, tokens, rng)


def write_samples(
    path: Path, step: int, tokenizer: Tokenizer, samples: int, tokens: int, rng: np.random.Generator
) -> None:
    """Write a table with the columns that a step of training writes."""
    words = np.array(WORDS)
    sentences = words[rng.integers(0, len(words), (samples, 2 * tokens // 3))]
    right = rng.random(samples) < 0.5
    texts = [f"{' '.join(row)} \\boxed{{{6 if ok else 7}}}" for row, ok in zip(sentences, right, strict=True)]
    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    ends = np.cumsum([0, *map(len, ids)], dtype=np.int32)
    lists = pa.array(np.concatenate(ids).astype(np.int32))
    group = np.arange(samples) // GROUP
    pq.write_table(
        pa.table(
            {
                "uid": [f"p{step}-{g}" for g in group],
                "source": ["math"] * samples,
                "problem": [f"Problem {g} of step {step}: {' '.join(words[:24])}?" for g in group],
                "answer": ["6"] * samples,
                "sample": pa.array(np.arange(samples) % GROUP, pa.int32()),
                "completion": texts,
                "reward": pa.array(right.astype(np.float32)),
                "outcome": ["correct" if ok else "wrong" for ok in right],
                "finish_reason": ["stop"] * samples,
                "completion_ids": pa.ListArray.from_arrays(pa.array(ends), lists),
                "logprobs": pa.ListArray.from_arrays(
                    pa.array(ends), pa.array(-rng.random(ends[-1], np.float32))
                ),
                "advantage": pa.array(right.astype(np.float32) - 0.5),
                "reward/math": pa.array(right.astype(np.float32)),
            }
        ),
        path,
        compression="zstd",
        compression_level=1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "large"
        write_run(run, args.model, args.steps, args.samples, args.tokens)
        begin = time.time()
        subprocess.run([sys.executable, "-m", "grpo_dist.cli", "report", str(run)], check=True)
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        page = run / "report.html"
        print(
            f"report: {time.time() - begin:.1f} s wall, {usage.ru_utime + usage.ru_stime:.1f} s CPU, "
            f"{usage.ru_maxrss / 2**20:.2f} GiB; page {page.stat().st_size / 1e6:.1f} MB"
        )
        for tab in ("curves", "rollouts"):
            with chromium() as browser:
                begin = time.time()
                browser.open(f"{page.as_uri()}#{tab}")
                ready = time.time() - begin
                paint = browser.get("performance.getEntriesByType('paint').map((p) => [p.name, p.startTime])")
                print(f"{tab}: {dict(paint)} ms, complete after {ready:.1f} s")


if __name__ == "__main__":
    main()
