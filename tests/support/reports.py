"""Run directories without a run, their report, and a browser that opens it."""

import base64
import gzip
import html
import json
import re
import shutil
import time
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.demo.tokenizer import character_tokenizer

# Run directories of any size with known contents.

HOSTILE = (
    "</script><script>document.title='owned'</script>\u2028<!-- \x00 <b>bold</b> &amp; \u202e \\boxed{6}"
)
_NAMES = """
reward/mean reward/math reward/std policy/entropy ref/kl policy/clip_low_share policy/clip_high_share
mismatch/logprob_diff_mean policy/grad_norm rollout/staleness_mean rollout/length_tokens
throughput/tokens_per_s memory/policy_gib time/sample_s time/update_s time/sync_s time/step_s novel/thing
"""
METRICS = _NAMES.split()


def make_run(
    directory, *, steps=6, groups=4, samples=4, seed=0, recorded=(), evals=(0,), texts=None, config=None
):
    """Write all files of a run. ``recorded``: steps with token values. ``texts(step, group, sample)``:
    completions; "1+1=2 ... \\boxed{ANSWER}" otherwise, right in every other sample.
    """
    rng = np.random.default_rng(seed)
    directory.mkdir(parents=True)
    settings = {"name": directory.name, "seed": seed, "steps": steps, "model": {"path": "demo:tiny"}}
    settings |= {"policy": {"optimizer": {"lr": 1e-4}}, "rewards": {"api_key": "hidden-thing"}} | (
        config or {}
    )
    (directory / "config.yaml").write_text(json.dumps(settings))
    (directory / "environment.json").write_text(
        json.dumps({"host": "node-1", "versions": {"torch": "2.13.0"}, "gpus": []})
    )
    write_lines(
        directory / "metrics.jsonl", [metrics_of(step, rng, step in evals) for step in range(steps + 1)]
    )
    write_lines(directory / "timeline.jsonl", [timeline_of(step) for step in range(1, steps + 1)])
    write_lines(directory / "events.jsonl", [{"time": 1.7e9, "step": 2, "message": f"loss\nrises {HOSTILE}"}])
    write_lines(
        directory / "ledger.jsonl",
        [{"step": s, "trained": [f"p{s}-{g}" for g in range(groups)]} for s in range(1, steps + 1)],
    )
    for step in range(1, steps + 1):
        write_samples(
            directory / f"samples/step_{step:06d}.parquet", step, groups, samples, rng,
            recorded=step in recorded, texts=texts,
        )  # fmt: skip
    for step in evals:
        write_samples(
            directory / f"samples/eval_add3_step_{step:06d}.parquet", step, groups, 2, rng, texts=texts
        )
    return directory


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def metrics_of(step, rng, evaluated):
    line = {"step": step}
    if step:
        line |= {name: float(rng.random()) for name in METRICS}
        line |= {"time/step_s": 2.0, "ref/kl": None if step == 3 else 0.01 * step}
    if evaluated:
        line |= {"eval/add3/pass@1": 0.5 + 0.01 * step, "eval/add3/pass@1_stderr": 0.02}
    return line


def timeline_of(step):
    begin = 1.7e9 + 10.0 * step
    spans = [["driver", "sample", begin, begin + 4], ["driver", "update", begin + 4, begin + 9]]
    spans += [["rollout-0", "sample", begin, begin + 3.5], ["policy-0", "update", begin + 4, begin + 9]]
    return {"step": step, "spans": spans}


def write_samples(path, step, groups, samples, rng, *, recorded=False, texts=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = character_tokenizer()
    rows = []
    for g in range(groups):
        for i in range(samples):
            answer = 6 if i % 2 == 0 else 7
            text = texts(step, g, i) if texts else f"1+{g}={g + 1} because {step} \\boxed{{{answer}}}"
            ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
            rows.append((f"p{step}-{g}", f"what is {g} and {step}?", i, text, ids, answer == 6))
    ids = [row[4] for row in rows]
    engine = [-rng.random(len(part)).astype(np.float32) for part in ids]
    right = np.array([row[5] for row in rows], dtype=np.float32)
    columns = {
        "uid": [row[0] for row in rows], "source": [f"source-{row[2] % 2}" for row in rows],
        "problem": [row[1] for row in rows], "answer": ["6"] * len(rows),
        "sample": pa.array([row[2] for row in rows], pa.int32()), "completion": [row[3] for row in rows],
        "reward": pa.array(right, pa.float32()),
        "outcome": ["correct" if row[5] else "wrong" for row in rows],
        "finish_reason": ["stop" if row[2] else "length" for row in rows],
        "completion_ids": pa.array([list(part) for part in ids], pa.list_(pa.int32())),
        "logprobs": pa.array([list(part) for part in engine], pa.list_(pa.float32())),
        "reward/math": pa.array(right, pa.float32()),
        "reward/format": pa.array(np.full(len(rows), 0.25), pa.float32()),
    }  # fmt: skip
    if recorded:
        columns |= {
            "advantage": pa.array([float(r) - 0.5 for r in right], pa.float32()),
            "advantages": pa.array(
                [[float(r) - 0.5] * len(part) for r, part in zip(right, ids, strict=True)],
                pa.list_(pa.float32()),
            ),
            "trainer_logprobs": pa.array([list(part + 0.01) for part in engine], pa.list_(pa.float32())),
            "ref_logprobs": pa.array([list(part - 0.1) for part in engine], pa.list_(pa.float32())),
        }
    pq.write_table(pa.table(columns), path)


# The data inside a report page.


def pieces(path):
    """Return the manifest of a page and its data by name."""
    text = path.read_text()
    parts = re.findall(r'<script type="application/octet-stream" data-piece="([^"]*)">([^<]*)</script>', text)
    begin = json.loads(
        re.search(r'<script type="application/json" id="begin">(.*?)</script>', text, re.DOTALL)[1]
    )
    unpacked = {html.unescape(n): json.loads(gzip.decompress(base64.b64decode(d))) for n, d in parts}
    return begin["manifest"], unpacked


# A headless Chromium, driven by Selenium.

_READY_S = 900.0


@contextmanager
def chromium(*, width=1400, height=1000):
    """Yield a `Page`. Skips the test if Chromium or its driver is missing."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (make setup)")
    from selenium.webdriver.chrome.service import Service

    binary = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no chromium with chromedriver here; on Debian: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
                     f"--window-size={width},{height}"):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    try:
        browser.set_script_timeout(_READY_S)
        yield Page(browser)
    finally:
        browser.quit()


class Page:
    """Queries of and actions on the open page."""

    def __init__(self, browser):
        self.browser = browser

    def open(self, url):
        self.browser.get(url)
        self.until("document.body.dataset.ready === 'yes'")
        return self

    def run(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def get(self, expression, *arguments):
        return self.run(f"return {expression}", *arguments)

    def until(self, expression, *arguments):
        """Wait until a JavaScript expression is true. Raises AssertionError with the console's messages."""
        end = time.monotonic() + _READY_S
        while not self.get(expression, *arguments):
            assert time.monotonic() < end, f"never: {expression}; console: {self.console()}"
            time.sleep(0.02)

    def click(self, selector):
        self.run("document.querySelector(arguments[0]).click()", selector)

    def set(self, selector, value):
        """Enter the value as a person would, and fire the events."""
        self.run(
            "const e = document.querySelector(arguments[0]); e.value = arguments[1];"
            "e.dispatchEvent(new Event('input', {bubbles: true}));"
            "e.dispatchEvent(new Event('change', {bubbles: true}))",
            selector, value,
        )  # fmt: skip

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def texts(self, selector):
        return self.run(
            "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector
        )

    def console(self):
        """Return errors and warnings since the last call, except those that reading pixels causes."""
        found = [line for line in self.browser.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]
        return [line for line in found if "willReadFrequently" not in line["message"]]
