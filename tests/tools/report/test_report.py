"""`grpo-dist report` without a browser: what it reads, omits and refuses."""

import base64
import gzip
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import numpy as np
import pyarrow.parquet as pq
import pytest

from grpo_dist.cli import main
from grpo_dist.demo.tokenizer import character_decoder, character_tokenizer
from grpo_dist.tools.report import rollouts
from grpo_dist.tools.report.command import write_report
from grpo_dist.tools.report.line_files import Encoded, LineFile
from grpo_dist.tools.report.rollouts import AnswerReader
from grpo_dist.tools.report.run_dir import open_runs, sample_files
from grpo_dist.tools.report.server import ReportServer
from grpo_dist.tools.report.source import ReportLimits, Source
from grpo_dist.tools.report.tokens import SCALES, TokenTexts
from tests.support.patience import HANG_S
from tests.support.reports import HOSTILE, make_run, metrics_of, pieces, write_lines, write_samples


def build_page(runs, tmp_path, **limits):
    messages = []
    target = write_report(
        [str(run) for run in runs], str(tmp_path / "out.html"), ReportLimits(**limits), messages.append
    )
    return *pieces(target), target, messages


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "one", recorded=(2, 5), evals=(0, 6))


def test_a_page_contains_the_whole_run_and_loads_nothing(run, tmp_path):
    manifest, data, target, messages = build_page([run], tmp_path)
    (info,) = manifest["runs"]
    assert info["label"] == "one" and not info["about"]["notices"]
    keys = [e["key"] for e in info["samples"]]
    assert keys[:2] == ["samples/eval_add3_step_000000/0", "samples/step_000001/0"]
    assert data["0/metrics/0"]["step"] == list(range(7))
    assert data["0/metrics/0"]["columns"]["ref/kl"][2:5] == [0.02, None, 0.04]
    assert info["about"]["config"]["policy.optimizer.lr"] == "0.0001"
    assert info["about"]["config"]["rewards.api_key"] == "***"
    assert info["about"]["environment"]["versions.torch"] == "2.13.0"
    assert info["about"]["ledger"] == {"trained": 24}
    rows = data["0/rows/samples/step_000002/0"]
    assert rows["sample"][:5] == [0, 1, 2, 3, 0] and rows["group"][:5] == [0, 0, 0, 0, 1]
    assert rows["reward"][:2] == [1.0, 0.0] and rows["parts"]["format"][:2] == [0.25, 0.25]
    assert rows["advantage"][:2] == [0.5, -0.5]
    assert [rows["found"]["values"][i] for i in rows["found"]["index"][:2]] == ["6", "7"]
    text = target.read_text()
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=(?!\"data:,\")", text)
    assert "open it in a browser" in messages[0]


def test_token_values_are_the_recorded_ones_within_rounding(run, tmp_path):
    _, data, _, _ = build_page([run], tmp_path)
    tokens = data["0/tokens/samples/step_000002/0"]
    table = pq.read_table(run / "samples/step_000002.parquet").to_pylist()
    for i in (0, 7):
        assert "".join(tokens["vocabulary"][t] for t in tokens["tokens"][i]) == table[i]["completion"]
        got = np.array(tokens["logprob"][i]) / SCALES["logprob"]
        assert np.abs(got - np.array(table[i]["logprobs"])).max() <= 0.0005 + 1e-9
        assert tokens["log_ratio"][i] == 100 or set(tokens["log_ratio"][i]) <= {99, 100, 101}  # 0.01
        assert tokens["advantage"][i] == round(1000 * table[i]["advantages"][0])
        # k3 of a difference of 0.11: e^-0.11 - 1 + 0.11
        kl = tokens["kl"][i]
        assert {kl} if isinstance(kl, int) else set(kl) <= {58, 59}
    assert data["0/tokens/samples/step_000001/0"]["kl"][0] is None


def test_hostile_text_reaches_the_page_intact_and_never_as_markup(tmp_path):
    run = make_run(tmp_path / 'a<b>"&', steps=1, texts=lambda s, g, i: HOSTILE)
    _, data, target, _ = build_page([run], tmp_path)
    assert data["0/texts/samples/step_000001/0"]["completion"][0] == HOSTILE
    text = target.read_text()
    assert "owned" not in text and "<b>" not in text.split("</title>")[0]
    assert "<title>grpo-dist: a&lt;b&gt;&quot;&amp;</title>" in text


def test_invalid_utf8_and_lone_surrogates_are_shown(tmp_path):
    import pyarrow as pa

    run = make_run(tmp_path / "run", steps=1)
    path = run / "samples/step_000001.parquet"
    table = pq.read_table(path)
    raw = pa.array([b"\xff\xfe\\boxed{1}"] * len(table), pa.binary()).view(pa.string())
    pq.write_table(table.set_column(table.schema.get_field_index("completion"), "completion", raw), path)
    (run / "events.jsonl").write_text('{"time": 1, "step": 1, "message": "\\ud800 lone"}\n')
    _, data, _, _ = build_page([run], tmp_path)
    assert data["0/texts/samples/step_000001/0"]["completion"][0] == "\ufffd\ufffd\\boxed{1}"
    assert data["0/events/0"] == [[1.0, 1, "\ud800 lone"]]


def test_torn_and_missing_files_are_reported_and_the_rest_is_shown(tmp_path):
    run = make_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('[1, 2]\n{"step": 7, "rew')
    (run / "samples/step_000003.parquet").write_bytes(b"PAR1 torn")
    (run / "timeline.jsonl").unlink()
    (run / "config.yaml").write_text("a: [")
    (run / "environment.json").write_text("{")
    manifest, data, _, _ = build_page([run], tmp_path)
    notices = "\n".join(manifest["runs"][0]["about"]["notices"])
    assert "metrics.jsonl: 2 unreadable line(s)" in notices
    assert "samples/step_000003.parquet: cannot be read" in notices
    assert "missing or empty: timeline.jsonl" in notices
    assert "config.yaml: cannot be read" in notices and "environment.json: cannot be read" in notices
    assert data["0/metrics/0"]["step"] == list(range(7))
    assert "samples/step_000002/0" in [e["key"] for e in manifest["runs"][0]["samples"]]


@pytest.mark.parametrize(("name", "text"), [
    ("ledger.jsonl", '{"step": 1, "trained": 3, "no_signal": null, "unscored": ["p"]}'),
    ("events.jsonl", "[" * 100_000),
    ("events.jsonl", '{"message": {"a": 1}, "step": {"b": NaN}, "time": "x"}'),
    ("timeline.jsonl", f'{{"step": 1, "spans": [["a", "b", 1{"0" * 400}, 2]]}}'),
    ("metrics.jsonl", f'{{"step": 1, "reward/mean": "x", "loss/total": 1{"0" * 400}}}'),
    ("config.yaml", "model: foo\nsft: 3"),
    ("environment.json", "[1"),
    ("timeline.jsonl", '{"step": 1, "spans": 5}'),
    ("config.yaml", '{"a":' * 100_000),
    ("config.yaml", b"a: \xff"),
    ("environment.json", '{"a":' * 100_000),
    ("events.jsonl", b'{"a":' * 100_000 + b'\n\xff\n[]\n{"message": "\\ud800"}\n{"step": "x", "message": 5}'),
])  # fmt: skip
def test_no_content_of_a_file_stops_a_report(tmp_path, name, text):
    run = make_run(tmp_path / "run", steps=1)
    (run / name).write_bytes((text if isinstance(text, bytes) else text.encode()) + b"\n")
    manifest, data, _, _ = build_page([run], tmp_path)
    assert data["0/rows/samples/step_000001/0"]
    if name == "ledger.jsonl":
        assert manifest["runs"][0]["about"]["ledger"] == {"unscored": 1}


def test_a_group_is_never_split_and_one_prompt_may_have_several(tmp_path):
    path = tmp_path / "samples/step_000001.parquet"
    path.parent.mkdir()
    write_samples(path, 1, 700, 3, np.random.default_rng(0))
    parts, _ = rollouts.cut(path)
    assert parts == [range(2001), range(2001, 2100)]
    table = rollouts.read_rows(path, parts[1])
    assert table["sample"].to_pylist() == [0, 1, 2] * 33
    assert table["uid"][0].as_py() == "p1-667"
    whole = pq.read_table(path)
    for size in (400, 2001):  # sizes of row groups; batches of rows do not fit into them
        pq.write_table(whole, path, row_group_size=size)
        read = [rollouts.read_rows(path, part, ["uid", "sample"]) for part in (*parts, range(399, 402))]
        assert [t.to_pylist() for t in read] == [
            whole.select(["uid", "sample"]).slice(a, b - a).to_pylist()
            for a, b in ((0, 2001), (2001, 2100), (399, 402))
        ]
    twice = pq.read_table(path).slice(0, 3)
    import pyarrow as pa

    assert rollouts.group_starts(pa.concat_tables([twice, twice])) == [0, 3]


def test_a_file_has_the_newest_rollouts_that_fit(run, tmp_path, monkeypatch):
    whole, data, _, _ = build_page([run], tmp_path)
    last = whole["runs"][0]["samples"][-1]
    size = sum(len(base64.b64encode(gzip.compress(json.dumps(data[f"0/{kind}/{last['key']}"]).encode())))
               for kind in ("rows", "texts"))  # fmt: skip
    monkeypatch.setattr("grpo_dist.tools.report.page._SAMPLES", 2 * size)
    manifest, data, _, _ = build_page([run], tmp_path)
    (info,) = manifest["runs"]
    keys = [entry["key"] for entry in info["samples"]]
    assert 0 < len(keys) < 4 and keys == [entry["key"] for entry in whole["runs"][0]["samples"]][-len(keys) :]
    rows = sum(entry["rows"] for entry in whole["runs"][0]["samples"])
    assert info["about"]["left_out"]["rollouts"] == rows - sum(entry["rows"] for entry in info["samples"])
    assert sum("/rows/" in name for name in data) == len(keys)
    larger, _, _, _ = build_page([run], tmp_path, rollouts=1000)
    assert larger["runs"][0]["about"]["left_out"] == {"rollouts": 0, "tables": 0}


def test_token_values_stay_within_their_limit_with_recorded_steps_first(run, tmp_path):
    _, everything, _, _ = build_page([run], tmp_path)
    a_group = sum(map(len, everything["0/tokens/samples/step_000005/0"]["tokens"][:4]))
    manifest, data, _, _ = build_page([run], tmp_path, tokens=2 * a_group + 5)
    assert [name for name in data if "/tokens/" in name] == ["0/tokens/samples/step_000005/0"]
    assert len(data["0/tokens/samples/step_000005/0"]["tokens"]) == 8
    assert [e["key"] for e in manifest["runs"][0]["samples"] if e.get("tokens")] == ["samples/step_000005/0"]
    _, data, _, _ = build_page([run], tmp_path, tokens=0)
    assert not [name for name in data if "/tokens/" in name]


def test_a_wrong_tokenizer_is_detected(tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    character_tokenizer(ascii_only=True).save_pretrained(run / "model")
    manifest, data, _, _ = build_page([run], tmp_path)
    assert not [name for name in data if "/tokens/" in name]
    assert "do not match" in "\n".join(manifest["runs"][0]["about"]["notices"])


def test_a_report_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", steps=1)

    def interrupted(*_):
        yield "<!DOCTYPE html>"
        raise KeyboardInterrupt

    monkeypatch.setattr("grpo_dist.tools.report.page.whole_page", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_report([str(run)], None, ReportLimits(), print)
    assert not list(run.glob("*report.html*")) and not list(run.glob(".report*"))


@pytest.mark.parametrize("path", ["./qwen", "../qwen", "~/qwen", "qwen/", "models/a b"])
def test_a_local_path_of_the_model_is_not_looked_up_as_a_name_of_the_hub(tmp_path, path):
    run = make_run(tmp_path / "run", steps=1, config={"model": {"path": path}})
    manifest, _, _, _ = build_page([run], tmp_path)
    assert path in manifest["runs"][0]["about"]["tokenizer"]
    character_tokenizer().save_pretrained(run / "model")
    assert build_page([run], tmp_path)[0]["runs"][0]["has_tokens"]


@pytest.mark.parametrize("text", ["a  b", "Ωm漢字🎉!", "line\n\n\\boxed{ 1}"])
def test_token_texts_concatenate_to_the_text(text):
    ids = np.array(character_tokenizer()(text, add_special_tokens=False)["input_ids"])
    texts = TokenTexts(character_decoder()).split(ids)
    assert "".join(texts) == text and len(texts) == len(ids)
    middle = len(ids) // 2
    halves = [TokenTexts(character_decoder()).split(half) for half in (ids[:middle], ids[middle:])]
    assert TokenTexts(character_decoder()).split(ids, [0, middle]) == [*halves[0], *halves[1]]


@pytest.mark.slow
def test_extracted_answers_are_those_of_the_grader():
    completions = ["\\boxed{1} no, \\boxed{2}", "The final answer is $8$.", "nothing", "so\nParis"]
    with AnswerReader() as answers:
        extracted = answers.read(completions, ["correct", "wrong", "no_answer", ""])
        assert answers.not_searched == 0
    assert extracted == ["2", "8", None, "Paris"]


@pytest.mark.slow
@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN], ids=["terminal", "script"])
def test_an_interrupt_ends_a_server_cleanly(tmp_path, before):
    """SIG_IGN: a script starts background processes with SIGINT ignored."""
    run = make_run(tmp_path / "run", steps=1)
    command = [sys.executable, "-m", "grpo_dist.cli", "report", str(run), "--serve", "--port", "0"]

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    begin = {"preexec_fn": lambda: signal.signal(signal.SIGINT, before)}
    with subprocess.Popen(command, **begin, **pipes) as process:
        try:
            line = process.stdout.readline()
            assert b"<!DOCTYPE html>" in ask(re.search(r"http://127\.0\.0\.1:\d+/", line)[0])[1]
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
    assert process.returncode == 0 and errors == ""


@pytest.mark.parametrize(("arguments", "words"), [
    (["nowhere"], "no such directory"),
    (["."], "not a run directory"),
    (["run", "run"], "given twice"),
    (["run", "--output", "run"], "a directory"),
    (["run", "--output", "none/such/x.html"], "cannot be written"),
    (["run", "--serve", "--output", "x.html"], "--serve writes no file"),
    (["run", "--rollouts", "-1"], "expected 0 or more"),
    (["run", "--output", "fifo"], "fifo: a device, FIFO or socket, which a file would replace"),
    (["run", "--output", "link"], "link: a device, FIFO or socket, which a file would replace"),
])  # fmt: skip
def test_what_cannot_be_reported_is_refused_with_exit_code_2(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("")
    os.mkfifo("fifo")
    os.symlink("fifo", "link")
    assert main(["report", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert stat.S_ISFIFO(os.stat("link").st_mode)


def test_the_command_writes_into_the_run(tmp_path, monkeypatch, capsys):
    run = make_run(tmp_path / "run", steps=1)
    assert main(["report", str(run)]) == 0
    manifest, _ = pieces(run / "report.html")
    assert manifest["runs"][0]["label"] == "run"
    other = make_run(tmp_path / "other", steps=1)
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run), str(other)]) == 0
    assert len(pieces(tmp_path / "report.html")[0]["runs"]) == 2
    assert not list(tmp_path.rglob("*.partial"))


def test_only_changed_lines_are_read_again(tmp_path):
    encoded = []

    def encode(lines):
        encoded.append([line["step"] for line in lines])
        return Encoded([line["step"] for line in lines], weight=len(lines))

    path = tmp_path / "lines.jsonl"
    file = LineFile(path, encode, per_part=2)
    file.look()
    assert file.parts == []
    write_lines(path, [{"step": s} for s in (1, 2, 3)])
    file.look()
    before = [part.version for part in file.parts]
    write_lines(path, [{"step": s} for s in (1, 2, 3, 4, 5)])
    file.look()
    assert encoded == [[1, 2], [3], [3, 4], [5]]
    assert file.parts[0].version == before[0] and file.parts[1].version != before[1]
    write_lines(path, [{"step": 1}])  # rolled back
    file.look()
    assert [part.payload for part in file.parts] == [[1]]


@pytest.mark.parametrize("label", ["training", "quarantine"])
def test_an_evaluation_set_is_never_taken_for_a_table_of_the_run(tmp_path, label):
    run = make_run(tmp_path / "run", steps=1, evals=())
    write_samples(run / f"samples/eval_{label}_step_000001.parquet", 1, 1, 1, np.random.default_rng(0))
    (run / "quarantine").mkdir()
    write_samples(run / "quarantine/step_000001.parquet", 1, 1, 1, np.random.default_rng(0))
    kinds = {file.key: file.kind for file in sample_files(run)}
    assert kinds == {
        "samples/step_000001": "training",
        "quarantine/step_000001": "quarantine",
        f"samples/eval_{label}_step_000001": f"eval {label}",
    }
    evaluation = tmp_path / "evaluation"
    write_samples(evaluation / f"samples/{label}/part_0.parquet", 1, 1, 1, np.random.default_rng(0))
    (evaluation / "evaluation.json").write_text("{}")
    assert [file.kind for file in sample_files(evaluation)] == [f"eval {label}"]


@pytest.fixture
def served(tmp_path):
    run = make_run(tmp_path / "run", steps=3, recorded=(2,))
    with AnswerReader() as answers:
        source = Source(open_runs([str(run)])[0], ReportLimits(), answers)
        with ReportServer("127.0.0.1", 0, [source]) as server:
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            yield run, server.url
            server.shutdown()
            thread.join(timeout=HANG_S)


def ask(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=HANG_S) as answer:
        body = answer.read()
        return answer, gzip.decompress(body) if answer.headers["Content-Encoding"] else body


def test_a_server_sends_only_changes(served):
    run, url = served
    answer, body = ask(url + "manifest")
    before = json.loads(body)["runs"][0]
    tag = answer.headers["ETag"]
    with pytest.raises(urllib.error.HTTPError, match="304"):
        ask(url + "manifest", **{"If-None-Match": tag})
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_of(4, np.random.default_rng(1), False)) + "\n")
    write_samples(run / "samples/step_000004.parquet", 4, 2, 2, np.random.default_rng(1))
    _, body = ask(url + "manifest", **{"If-None-Match": tag})
    after = json.loads(body)["runs"][0]
    assert before["metrics"] != after["metrics"] and before["clock"] == after["clock"]
    new = [e["key"] for e in after["samples"] if e not in before["samples"]]
    assert new == ["samples/step_000004/0"]
    assert json.loads(ask(f"{url}0/rows/{new[0]}")[1])["sample"] == [0, 1, 0, 1]
    assert json.loads(ask(f"{url}0/tokens/samples/step_000002/0")[1])["kl"][0] is not None
    assert b"<!DOCTYPE html>" in ask(url)[1]


@pytest.mark.parametrize(
    "path", ["5/metrics/0", "0/metrics/99", "0/rows/../../../etc/passwd", "0/nothing", "x/y"]
)
def test_a_server_serves_only_the_files_of_the_page(served, path):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        ask(served[1] + path)


def test_a_server_answers_only_to_its_own_host_name(served):
    with pytest.raises(urllib.error.HTTPError, match="403"):
        ask(served[1], Host="evil.example:80")


def test_a_server_on_all_interfaces_answers_to_any_host_name():
    with ReportServer("0.0.0.0", 0, []) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        _, body = ask(f"http://127.0.0.1:{server.server_port}/manifest", Host="head-node:80")
        server.shutdown()
        thread.join(timeout=HANG_S)
    assert json.loads(body) == {"live": True, "runs": []}


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl"])
def test_a_pipe_in_a_run_directory_is_refused_by_name(tmp_path, capsys, name):
    run = make_run(tmp_path / "run", steps=1)
    (run / "environment.json").unlink()
    (run / name).unlink()
    os.mkfifo(run / name)
    assert main(["report", str(run)]) == 2
    assert f"{name}: Not a regular file; make it readable" in capsys.readouterr().err


def test_the_answer_shown_is_not_a_guess_in_a_closed_thought():
    with AnswerReader() as answers:
        texts = ["\\boxed{3}?</think>\\boxed{7}", "so \\boxed{3}</think>", "\\boxed{3}?</think>seven"]
        assert answers.read(texts, ["correct", "wrong", ""]) == ["7", "3", "seven"]


def test_tables_of_older_runs_may_lack_columns(tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    path = run / "samples/step_000001.parquet"
    table = pq.read_table(path)
    pq.write_table(table.select(["uid", "sample", "completion", "reward"]), path)
    _, data, _, _ = build_page([run], tmp_path)
    rows = data["0/rows/samples/step_000001/0"]
    assert rows["length"][0] is None and rows["advantage"][0] is None and rows["parts"] == {}
