"""The live view of a run in a terminal."""

import io
import sys
import threading

import pytest
from rich.console import Console as RichConsole

from grpo_dist.observe import console as console_module
from grpo_dist.observe.console import Console, LiveView, print_before_after
from grpo_dist.runtime.metering import Span, Usage


def step(view, number, *, seconds=4.0):
    loop_spans = [Span("sample", 0, 0.75 * seconds), Span("update", 0, 0.25 * seconds)]
    engines = {
        "rollout-0": Usage({"sample": 0.5 * seconds}, peak_bytes=2**30),
        "rollout-1": Usage({"sample": 0.25 * seconds}, peak_bytes=2**31),
    }
    view.took(loop_spans, engines)
    view.step(number, {"restarts/rollout": 1})


@pytest.mark.slow
def test_the_view_is_drawn_while_its_state_changes():
    """A change while the terminal's thread draws must not end that thread."""
    view, failures = LiveView("demo", 50, 10), []

    def draw():
        try:
            for _ in range(2000):
                view.__rich__()
        except Exception as error:
            failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = threading.Thread(target=draw)
        thread.start()
        number = 10
        while thread.is_alive():
            number += 1
            step(view, number)
    finally:
        sys.setswitchinterval(before)
    assert failures == []


def test_without_a_terminal_only_lines_are_printed(monkeypatch, capsys):
    console = Console("demo", 3, 0)
    metrics = {"time/step_s": 1.0, "throughput/completion_tokens_per_s": 10.0, "reward/mean": 0.25}
    console.log(1, metrics)
    console.warn("careful")
    console.close(failed=False)
    text = capsys.readouterr().out
    assert [line[:9] for line in text.splitlines()] == ["step    1", "careful"]
    assert "\x1b" not in text


def test_names_in_brackets_are_not_read_as_markup(capsys):
    scores = {"eval/[bold]x/pass@1": 0.5, "eval/[bold]x/pass@1_stderr": 0.1}
    Console("demo", 3, 0).log(1, scores)
    print_before_after({}, scores, "runs/a[red]")
    out = capsys.readouterr().out
    assert "eval after step 1  [bold]x: pass@1 0.500 ± 0.100" in out
    assert "│ [bold]x │" in out and "run directory: runs/a[red]\n" in out


def test_a_terminal_shows_the_view_below_its_lines_and_is_restored(monkeypatch):
    out = io.StringIO()
    out.isatty = lambda: True
    terminal = RichConsole(file=out, force_interactive=True, width=100, soft_wrap=True, highlight=False)
    monkeypatch.setattr(console_module, "Terminal", lambda **_: terminal)
    console = Console("demo", 3, 0)
    console.view.phase("sample")
    console.log(1, {"time/step_s": 1.0, "throughput/completion_tokens_per_s": 10.0, "reward/mean": 0.25})
    console.close(failed=False)
    text = out.getvalue()
    assert "step    1" in text and "1/3" in text
    assert text.rstrip().endswith("\x1b[2K") or "\x1b[?25h" in text  # the cursor is visible again
