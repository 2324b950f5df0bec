"""The page of `grpo-dist report` in a real browser: loading, filters, colours, overlays, live updates."""

import threading
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.tools.report.command import write_report
from grpo_dist.tools.report.rollouts import AnswerReader
from grpo_dist.tools.report.run_dir import open_runs
from grpo_dist.tools.report.server import ReportServer
from grpo_dist.tools.report.source import ReportLimits, sources
from tests.support.patience import HANG_S
from tests.support.reports import HOSTILE, make_run, metrics_of, timeline_of, write_lines, write_samples


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    first = make_run(directory / "first", recorded=(5, 6), evals=(0, 6))
    return first, make_run(
        directory / "second", seed=1, steps=4, config={"policy": {"optimizer": {"lr": 2e-4}}}
    )


def opened(browser, runs, tmp_path, tab="curves", **limits):
    target = write_report(
        [str(run) for run in runs], str(tmp_path / "out.html"), ReportLimits(**limits), lambda _: None
    )
    browser.console()
    browser.open(f"{target.as_uri()}#{tab}")
    if tab == "rollouts":
        browser.until("document.querySelector('#table .tabulator-row')")
    return browser


def rows_shown(page):
    """Return the number above the table after its update."""
    page.until("document.getElementById('searching').textContent === ''")
    return int(page.text("#count").split()[0].replace(",", ""))


def filtered(page, selector, value, expected):
    page.set(selector, value)
    page.until(f"parseInt(document.getElementById('count').textContent.replaceAll(',', '')) === {expected}")
    page.until(f"document.querySelectorAll('#table .tabulator-row').length >= {min(expected, 10)}")


def column(page, field):
    return page.texts(f"#table .tabulator-row .tabulator-cell[tabulator-field={field}]")


def test_every_tab_loads_without_console_messages(browser, runs, tmp_path):
    page = opened(browser, runs[:1], tmp_path)
    page.until("document.querySelectorAll('#charts canvas').length > 3")
    names = page.get("[...document.querySelectorAll('.chart')].map((c) => c.dataset.metric)")
    assert {"reward/mean", "policy/entropy", "time/sample_s"} <= set(names) and names[-1] == "novel/thing"
    units = dict(zip(names, page.texts(".chart h4 small"), strict=True))
    titles = page.get("[...document.querySelectorAll('.chart h4')].map((h) => h.title)")
    about = dict(zip(names, titles, strict=True))
    assert units["policy/entropy"] == "nats" and units["eval/add3/pass@1"] == "share · bars: 95%"
    assert "eval/add3/pass@1_stderr" not in names
    assert "uncertainty of the policy about a token\nLook for: falls" in about["policy/entropy"]
    assert about["novel/thing"] == "novel/thing"
    for tab in ("timeline", "rollouts", "events", "settings"):
        page.click(f"nav [data-tab={tab}]")
        page.until(f"!document.getElementById('{tab}').hidden")
    page.click("nav [data-tab=rollouts]")  # again, after it was filled while hidden
    page.until("document.querySelector('#table .tabulator-row')")
    assert "rises" in page.text("#events-list")
    assert "versions.torch" in page.text("#environment-table")
    assert page.console() == []
    requests = "performance.getEntriesByType('resource').filter((e) => e.name.startsWith('http')).length"
    assert page.get(requests) == 0


def test_model_text_is_never_markup(browser, tmp_path):
    run = make_run(tmp_path / "run", steps=1, recorded=(1,), texts=lambda s, g, i: HOSTILE)
    page = opened(browser, [run], tmp_path, "rollouts")
    page.click("#table .tabulator-row")
    page.until("document.getElementById('group').open")
    text = page.text(".card .text")
    assert "</script><script>document.title='owned'</script>⟨2028⟩<!-- ⟨00⟩ <b>bold</b> &amp; ⟨202E⟩" in text
    page.set("#colour", "")
    assert page.text(".card .text") == text
    assert page.get("document.title") == "grpo-dist: run"
    assert page.get("document.querySelectorAll('.card b, #events-list b').length") == 0
    assert page.console() == []


def with_prompts_and_failures(table, ids):
    """Return ``table`` with the prompts' tokens, and with a first sample that could not be scored."""
    count, each = len(table), pa.list_(pa.string())
    rewards = [None, *table["reward"].to_pylist()[1:]]
    why = [["reward math: ValueError: no gold (rewards.py:3 in math)"], *[[]] * (count - 1)]
    prompts = [ids if i == 0 else None for i in table["sample"].to_pylist()]
    table = table.drop_columns(["reward", "reward/math"])
    for name, column in (("reward", rewards), ("reward/math", rewards)):
        table = table.append_column(name, pa.array(column, pa.float32()))
    table = table.append_column("failures", pa.array(why, each))
    return table.append_column("prompt_ids", pa.array(prompts, pa.list_(pa.int32())))


@pytest.mark.slow
def test_a_group_has_its_prompt_as_the_model_read_it_its_failures_and_an_address(browser, tmp_path):
    run = make_run(tmp_path / "run", steps=2)
    path = run / "samples/step_000002.parquet"
    text = "<think>add</think>1+1="
    ids = character_tokenizer()(text)["input_ids"]
    pq.write_table(with_prompts_and_failures(pq.read_table(path), ids), path)
    page = opened(browser, [run], tmp_path, "rollouts")
    assert column(page, "ending")[1] == "1+0=1 because 2 \\boxed{7}"
    assert column(page, "parts")[:2] == ["format 0.25 · math not scored", "format 0.25 · math 0"]
    filtered(page, "#f-scored", "no", 1)
    assert column(page, "reward") == ["not scored"]
    page.click("#table .tabulator-row")
    page.until("document.getElementById('group').open")
    assert page.text("#group-asked") == f"Prompt as the model read it: {len(ids)} tokens"
    assert page.text("#group-problem") == text and "<think>" in page.texts("#group-problem .token")
    assert "ValueError: no gold (rewards.py:3 in math)" in page.text(".card.chosen dl")
    address, title = page.get("location.href"), page.text("#group-title")
    assert address.endswith("#rollouts/0/2/training/p2-0")
    assert page.get("document.getElementById('group-link').href") == address
    page.browser.get("about:blank")
    page.open(address)
    page.until("document.getElementById('group').open")
    assert page.text("#group-title") == title
    page.click("#group-close")
    page.until("location.hash === '#rollouts'")
    assert page.console() == []


@pytest.mark.slow
def test_filters_show_exactly_the_matching_rows(browser, runs, tmp_path):
    page = opened(browser, runs[:1], tmp_path, "rollouts")
    assert rows_shown(page) == 6 * 16 + 2 * 8
    filtered(page, "#f-kind", "training", 96)
    filtered(page, "#f-step-min", "5", 32)
    assert set(column(page, "step")) == {"5", "6"} and set(column(page, "kind")) == {"training"}
    filtered(page, "#f-outcome", "wrong", 16)
    assert set(column(page, "found")) == {"7"} and set(column(page, "reward")) == {"0"}
    filtered(page, "#f-source", "source-0", 0)
    page.click("#f-clear")
    filtered(page, "#f-finish", "length", 6 * 4 + 2 * 4)
    assert set(column(page, "sample")) == {"0"}
    page.click("#f-clear")
    filtered(page, "#f-reward-min", "0.5", 56)
    page.click("#f-clear")
    filtered(page, "#f-recorded", "yes", 32)
    assert set(column(page, "advantage")) == {"0.5", "-0.5"}
    page.click("#f-clear")
    filtered(page, "#f-text", "BECAUSE 4 \\boxed{7", 8)
    assert set(column(page, "step")) == {"4"}
    filtered(page, "#f-text", "p4-1", 4)
    filtered(page, "#f-text", ".*", 0)
    assert "No rollout passes" in page.text("#table")
    page.click("#f-clear")
    filtered(page, "#f-length-max", "3", 0)
    assert page.console() == []


@pytest.mark.slow
def test_a_group_shows_all_its_completions_coloured_by_token(browser, runs, tmp_path):
    page = opened(browser, runs[:1], tmp_path, "rollouts")
    filtered(page, "#f-recorded", "yes", 32)
    page.click("#table .tabulator-row")
    page.until("document.querySelectorAll('.card').length === 4")
    assert "2 of 4 right" in page.text("#group-title") and "step 6" in page.text("#group-title")
    assert page.text("#group-problem") == "what is 0 and 6?" and page.text("#group-expected") == "6"
    assert page.texts(".card .badge") == ["correct", "wrong"] * 2
    facts = dict(zip(page.texts(".card:nth-child(2) dt"), page.texts(".card:nth-child(2) dd"), strict=True))
    tokens = page.get("document.querySelectorAll('.card:nth-child(2) .token').length")
    assert facts == {"found": "7", "reward": "0", "· math": "0", "· format": "0.25", "advantage": "-0.5",
                     "length": f"{tokens} tokens"}  # fmt: skip
    measures = page.get("[...document.querySelectorAll('#colour option:not(:disabled)')].map((o) => o.value)")
    assert measures == ["", "logprob", "log_ratio", "advantage", "kl"]
    styles = {}
    for measure in measures:
        page.set("#colour", measure)
        styles[measure] = page.get("[...document.querySelectorAll('.token')].map((t) => t.style.background)")
    assert set(styles[""]) == {""}
    assert len(set(styles["logprob"])) > 5 and all(styles["logprob"])
    assert styles["logprob"] != styles["kl"] and len({str(colours) for colours in styles.values()}) == 5
    a_card = len(styles["advantage"]) // 4
    assert len(set(styles["advantage"][:a_card])) == 1 and len(set(styles["advantage"])) == 2
    page.set("#colour", "log_ratio")
    assert "white: 1" in page.text("#scale")
    page.run(
        "const t = document.querySelector('.token');"
        "t.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: 200, clientY: 300}))"
    )
    tip = page.text("#tip")
    assert "token 1 of" in tip and '"1"' in tip and "ratio 1.0" in tip and "KL" in tip and "log-prob" in tip
    page.click("#group-next")
    page.until("document.getElementById('group-problem').textContent === 'what is 1 and 6?'")
    assert page.get("document.getElementById('colour').value") == "log_ratio"
    assert page.console() == []


@pytest.mark.slow
def test_two_runs_are_overlaid_and_can_be_hidden(browser, runs, tmp_path):
    page = opened(browser, runs, tmp_path)
    page.until("document.querySelectorAll('#charts canvas').length > 3")
    inked = """
        const chart = document.querySelector('.chart[data-metric="reward/mean"]');
        const canvas = chart.querySelector('canvas');
        const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        const count = (r, g, b) => {
          let found = 0;
          for (let i = 0; i < data.length; i += 4) {
            if (data[i] === r && data[i + 1] === g && data[i + 2] === b) found++;
          }
          return found;
        };
        return [count(0x1f, 0x5f, 0xa6), count(0xc4, 0x56, 0x1c)]"""
    blue, orange = page.run(inked)
    assert blue > 50 and orange > 50
    page.click("#runs .run:nth-child(2)")
    page.until(f"(() => {{ {inked} }})()[1] === 0")
    assert page.run(inked)[0] > 50
    page.click("nav [data-tab=rollouts]")
    page.until("document.querySelector('#table .tabulator-row')")
    assert rows_shown(page) == 112 and set(column(page, "run")) == {"first"}
    page.click("nav [data-tab=settings]")
    keys = page.texts("#settings-table td.key")
    assert set(keys) == {"name", "seed", "steps", "policy.optimizer.lr"}
    page.click("#differences")
    assert "model.path" in page.texts("#settings-table td.key")
    page.set("#axis", "hours")
    assert page.console() == []


@contextmanager
def serve(run):
    with (
        AnswerReader() as answers,
        ReportServer("127.0.0.1", 0, sources(open_runs([run]), ReportLimits(), answers)) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join(timeout=HANG_S)


@pytest.mark.slow
def test_a_served_page_follows_the_run_without_losing_filters(browser, tmp_path):
    run = make_run(tmp_path / "run", steps=3)
    rng = np.random.default_rng(0)
    with serve(run) as url:
        browser.console()
        page = browser.open(url + "#rollouts")
        page.until("document.querySelector('#table .tabulator-row')")
        assert rows_shown(page) == 56
        filtered(page, "#f-outcome", "correct", 28)
        with (run / "events.jsonl").open("a") as file:
            file.write('{"time": 1.7e9, "step": 4, "message": "a new warning"}\n')
        write_lines(run / "metrics.jsonl", [metrics_of(step, rng, step == 0) for step in range(5)])
        write_lines(run / "timeline.jsonl", [timeline_of(step) for step in range(1, 5)])
        write_samples(run / "samples/step_000004.parquet", 4, 4, 4, rng, recorded=True)
        page.until("document.getElementById('count').textContent.startsWith('36 of 72')")
        assert page.get("document.getElementById('f-outcome').value") == "correct"
        assert set(column(page, "outcome")) == {"correct"} and column(page, "step")[0] == "4"
        assert "a new warning" in page.text("#events-list")
        assert "4 of 3" in page.text("#summary")
        page.click("#table .tabulator-row")
        page.until("document.querySelectorAll('.token').length > 10")
        page.click("#group-close")
        page.click("nav [data-tab=timeline]")
        page.until("document.getElementById('timeline-to').value === '4'")
        # Rolled back to step 2: later steps are withdrawn, and another step 3 follows.
        write_lines(run / "metrics.jsonl", [metrics_of(step, rng, step == 0) for step in range(3)])
        write_samples(run / "samples/step_000003.parquet", 3, 2, 4, rng)
        page.until("document.getElementById('summary').textContent.includes('2 of 3')")
        page.until("document.getElementById('count').textContent.startsWith('32 of 64')")
        assert page.console() == []
    page.until("document.getElementById('state').textContent.includes('does not answer')")
    assert page.text("#count").startswith("32 of 64")
