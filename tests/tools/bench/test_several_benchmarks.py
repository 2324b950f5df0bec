"""Benchmarks of one file: what is started, the table of all, a benchmark that fails, and refusals."""

from pathlib import Path

import pytest
from rich.console import Console

from grpo_dist.cli import main
from grpo_dist.config.files import load_config
from grpo_dist.errors import RunEnded
from grpo_dist.runs import directories
from grpo_dist.runs.directories import make_free_directory
from grpo_dist.tools.bench import run as bench_run
from grpo_dist.tools.bench.result import BenchResult
from grpo_dist.tools.bench.several import BenchSet, bench_set, print_set

SETS = sorted((Path(__file__).resolve().parents[3] / "configs/bench/sets").glob("*.yaml"))
FIGURES = {
    "loop/step_s": 10.0, "generation/step_s": 4.0, "loop/step_over_limit": 1.25, "of_limit/generation": 0.9,
    "of_limit/training": 0.8, "of_limit/sync": 0.1,
}  # fmt: skip
CONFIG = """
model: {path: simulated}
data: {train: [{path: simulated}]}
"""


def result(**figures):
    return BenchResult(
        "made", {}, {}, {}, FIGURES | figures, {}, actors=[], steps=[], timeline=[], timeline_s=1.0
    )


def set_file(tmp_path, runs, **own):
    (tmp_path / "one.yaml").write_text(CONFIG)
    lines = "".join(f"  - {run}\n" for run in runs)
    text = f"name: made\noutput_dir: {tmp_path}/out\n" + "".join(f"{k}: {v}\n" for k, v in own.items())
    (tmp_path / "set.yaml").write_text(f"{text}runs:\n{lines}")
    return tmp_path / "set.yaml"


class Started:
    """In place of processes: writes the results named by run, and fails for the others."""

    def __init__(self, **results):
        self.results, self.arguments = results, []

    def __call__(self, arguments):
        self.arguments.append(list(arguments))
        own = dict(text.split("=", 1) for text in arguments[2:])
        if own["name"] not in self.results:
            return 3
        directory = Path(own["output_dir"]) / own["name"]
        directory.mkdir(parents=True)
        self.results[own["name"]].write(directory / "bench.json")
        return 0


AHEAD = "overrides: {max_staleness: 1, batch.order: finished}, against: plain"
RUNS = ["{name: plain, config: one.yaml}", f"{{name: ahead, config: one.yaml, {AHEAD}}}"]


def test_each_run_is_a_benchmark_with_its_overrides_and_then_those_of_the_command(tmp_path):
    started = Started(plain=result(), ahead=result())
    directory = bench_set(set_file(tmp_path, RUNS), ["bench.steps=2"], started)
    config = str(tmp_path / "one.yaml")
    changed = ["max_staleness=1", 'batch.order="finished"']
    place = f"output_dir={tmp_path}/out/made"
    assert directory == tmp_path / "out/made"
    assert started.arguments == [
        ["bench", config, "bench.steps=2", "name=plain", place],
        ["bench", config, *changed, "bench.steps=2", "name=ahead", place],
    ]
    again = bench_set(set_file(tmp_path, RUNS), (), Started(plain=result(), ahead=result()))
    assert again == tmp_path / "out/made-2"


def test_sets_that_run_at_once_have_their_own_results(tmp_path):
    file, inner = set_file(tmp_path, RUNS[:1]), Started(plain=result())
    made = []

    def start(arguments):
        made.append(bench_set(file, (), inner))  # another process, meanwhile
        return Started(plain=result())(arguments)

    made.append(bench_set(file, (), start))
    assert made == [tmp_path / "out/made-2", tmp_path / "out/made"]
    assert all((directory / "plain/bench.json").is_file() for directory in made)


def test_a_free_directory_is_made_for_one_process_alone(tmp_path, monkeypatch):
    base = tmp_path / "out/made"
    assert make_free_directory(base) == base
    chosen = [base, tmp_path / "out/made-2"]  # the first was free when it was looked for
    monkeypatch.setattr(directories, "free_directory", lambda base: chosen.pop(0))
    assert make_free_directory(base) == tmp_path / "out/made-2"
    monkeypatch.undo()
    (tmp_path / "out/made-3").symlink_to("nowhere")
    assert make_free_directory(base) == tmp_path / "out/made-4"


def test_a_benchmark_that_fails_leaves_no_empty_directory(tmp_path, monkeypatch):
    made = []

    async def failing(config, prepared, directory):
        made.append(directory)
        assert directory.is_dir()  # before anything is measured
        raise ArithmeticError

    for name, stand_in in (("prepare", lambda *a, **k: None), ("_loop", failing)):
        monkeypatch.setattr(bench_run, name, stand_in)
    set_file(tmp_path, RUNS)
    config = load_config(
        tmp_path / "one.yaml", [f"output_dir={tmp_path}/out", "name=x", "cluster.num_cpus=8"]
    )
    with pytest.raises(ArithmeticError):
        bench_run.bench(config)
    assert made == [tmp_path / "out/x"] and not made[0].exists()


def test_the_results_go_where_the_command_says(tmp_path):
    places = [f"output_dir={tmp_path}/other", "name=mine"]
    started = Started(plain=result(), ahead=result())
    assert bench_set(set_file(tmp_path, RUNS), places, started) == tmp_path / "other/mine"
    assert all(own[-1] == f"output_dir={tmp_path}/other/mine" for own in started.arguments)
    assert not (tmp_path / "out").exists()


def test_the_table_has_shares_of_limits_and_how_many_times_as_fast_a_run_is(tmp_path):
    runs = BenchSet.model_validate(
        {"runs": [{"name": "plain", "config": "a"}, {"name": "ahead", "config": "a", "against": "plain"},
                  {"name": "failed", "config": "a"}]}
    ).runs  # fmt: skip
    other = {"loop/step_s": 8.0, "generation/step_s": 5.0, "tail/staleness": 0.5, "sync/changed_share": 0.04,
             "sync/bytes": 2e6, "training/needed_share": 0.97, "tail/waited_steps": 0.25,
             "tail/length_bias": -0.03}  # fmt: skip
    console = Console(width=160, record=True, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115
    print_set(runs, {"plain": result(), "ahead": result(**other)}, console)
    lines = console.export_text().splitlines()
    (plain,) = [line for line in lines if "plain" in line and "10.00 s" in line]
    (ahead,) = [line for line in lines if "8.00 s" in line]
    assert all(word in plain for word in ("1.25 x", "90.0 %", "80.0 %", "10.0 %"))
    assert "plain" in ahead and "1.25 x" in ahead and "0.80 x" in ahead
    said = "\n".join(line for line in lines if line.startswith("ahead: "))
    assert all(word in said for word in ("97.0 %", "0.50 steps", "0.25 steps", "-3.0 %", "4.0 %", "2.0 MB"))
    assert not [line for line in lines if "failed" in line or line.startswith("plain: ")]


def test_a_benchmark_that_fails_does_not_keep_the_next_from_running(tmp_path, capsys):
    started = Started(ahead=result())
    with pytest.raises(RunEnded, match=r"1 of 2 benchmarks failed: plain \(exit code 3\)"):
        bench_set(set_file(tmp_path, RUNS), (), started)
    assert len(started.arguments) == 2
    assert "ahead" in capsys.readouterr().out and RunEnded.exit_code == 1


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (["{name: a, config: one.yaml}", "{name: a, config: one.yaml}"], ["two runs are called `a`"]),
        (["{name: a, config: one.yaml, against: b}"], ["run `a`: against 'b'", "earlier run: none"]),
        (["{name: a, config: one.yaml, overrides: {stepz: 1}}"], ["run `a`", "stepz"]),
        (["{name: a, config: none.yaml}"], ["run `a`", "no such configuration file"]),
        (["{name: a b, config: one.yaml}"], ["runs.0.name"]),
    ],
)
def test_a_file_that_cannot_be_run_is_refused_before_anything_starts(tmp_path, capsys, runs, words):
    path = set_file(tmp_path, runs)
    assert main(["bench", str(path)]) == 2
    said = capsys.readouterr().err
    assert "set.yaml" in said and all(word in said for word in words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", SETS, ids=lambda path: path.stem)
def test_the_files_of_this_project_are_valid(path, tmp_path):
    started = Started()
    with pytest.raises(RunEnded, match="benchmarks failed"):
        bench_set(path, [], lambda arguments: started([*arguments, f"output_dir={tmp_path}"]))
    assert started.arguments
