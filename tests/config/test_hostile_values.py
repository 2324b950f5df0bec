"""Hostile configuration files, overrides and run files give one message that names the key or the file, and
never a traceback; limits of numbers.
"""

import contextlib
import json
import os

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import BaseModel

from grpo_dist.cli import main
from grpo_dist.config import Config, DataSourceConfig
from grpo_dist.config.files import dump_config, load_config, set_from_text
from grpo_dist.data.readers import read
from grpo_dist.errors import UserError
from grpo_dist.runs.run_directory import finished_steps
from grpo_dist.runtime.files import kept_lines
from grpo_dist.tools.bench.result import BenchResult
from grpo_dist.tools.recipe.record import read_record
from grpo_dist.tools.submit.job import read_record as read_submission

BASE = 'model: {path: "demo:tiny"}\ndata: {train: [{path: "demo:add3"}]}\n'
_BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "c.yaml"


def refused(path, text, *overrides):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as refusal:
        load_config(path, overrides)
    message = str(refusal.value)
    message.encode()  # it can be printed
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x: " + "[" * 50_000, "line 3: more than 32 levels deep"),
        ("x: " + "{a: " * 3_000, "line 3: more than 32 levels deep"),
        ("x:\n" + "".join(" " * i + "a:\n" for i in range(1, 200)), "more than 32 levels deep"),
        (_BOMB, "expansion exceeds"),
        ("x: &a [*a]\n", "recursive aliases"),
        ("name: " + "${" * 500 + "a" + "}" * 500, "recursion"),
        ("name: ${name}", "Recursive interpolation"),
        ("defaults: 5", "`defaults`: 5 is not a file name"),
        ("defaults: true", "`defaults`: True is not a file name"),
        ("defaults: {a: b}", "`defaults`: {'a': 'b'} is not a file name"),
        ("defaults: [[a]]", "is not a file name"),
        ("defaults: [null]", "`defaults`: None is not a file name"),
        ('defaults: [""]', "is not a file name"),
        ('defaults: ["a\\0b"]', "no configuration file (embedded null byte)"),
        (f"defaults: [{'a' * 5000}]", "no configuration file (File name too long)"),
        ('defaults: ["${nope}"]', "`defaults`: Interpolation key 'nope' not found"),
        ("steps: " + "9" * 5000, "4300 digits"),
        ("steps: 1\nsteps: 2", "duplicate key steps"),
        ("1: 2", "`1` = 1: keys should be strings"),
        ("? [a, b]\n: 2", "unhashable key"),
        ("rollout: {engine: {null: 2}}", "NoneType"),
        ("x: !!python/object/apply:os.system [echo]", "could not determine a constructor"),
        ('rewards: {functions: [{function: math, kwargs: {a: "x\\0"}}]}',
         "kwargs.a`: has the character U+0000"),
        ("5", "not valid YAML"),
        (b"name: \xff\xfe", "not valid YAML"),
        (b"name: \xed\xa0\x80", "not valid YAML"),  # a lone surrogate
        ('name: "\\ud800"', "not valid YAML"),
        ("steps: 010", "YAML reads 010 as 8; write the number that is meant"),
        ("cluster: {timeouts: {start_s: 1:30}}", "YAML reads 1:30 as 90"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_configuration_is_refused_in_one_line(path, text, words):
    whole = text if text == "5" else BASE.encode() + text if isinstance(text, bytes) else BASE + text
    assert words in refused(path, whole)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("name=\udcff", "has the character U+DCFF"),
        ("\udcff=1", "has the character U+DCFF"),
        ("rewards.functions=[{function: \udcff}]", "has the character U+DCFF"),
        ("x=" + "[" * 50_000, "more than 32 levels deep"),
        ("a." * 2000 + "b=1", "more than 32 levels"),
        ("." * 2000 + "=1", "more than 32 levels"),
        ("data.train.99.path=x", "list index out of range"),
        ("data.train.0.answer_pattern=#### (.+)", "begins a comment in YAML"),
        ("data.system_prompt=Solve. # Format: boxed", "begins a comment in YAML"),
        ("data.train=[{path: x, answer_pattern: #### (.+)}]", "put the text in quotes"),
        ("steps=010", "YAML reads 010 as 8; write the number that is meant"),
        ("seed=-0_10", "YAML reads -0_10 as -8"),
        ("batch.prompts_per_step=1:30", "YAML reads 1:30 as 90"),
        ("data.instruction=# Answer", "e.g. \"data.instruction='# Answer'\""),
    ],
)
def test_an_override_that_cannot_be_set_is_refused_in_one_line(path, override, words):
    assert words in refused(path, BASE, override)


@pytest.mark.parametrize(("value", "steps"), [("007", 7), ("1_0", 10), ("0x10", 16), ("8", 8)])
def test_an_unambiguous_number_is_read(path, value, steps):
    path.write_text(BASE)
    assert load_config(path, [f"steps={value}", "name='010'", "data.train.0.name=09:30"]).steps == steps


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policy.optimizer.betas", "[true, 0.9]"),
        ("evaluation.k", "[true]"),
        ("profile.steps", "[true]"),
        ("algorithm.kl.target", "false"),
        ("algorithm.loss.clip_low", "true"),
        ("data.train.0.max_rows", "true"),
        ("rewards.functions.0.weight", "true"),
        ("sampling.temperature.schedule", "[[0, true]]"),
        ("sampling.max_new_tokens.schedule", "[[0, 8], [true, 9]]"),
    ],
)
def test_booleans_are_refused_for_numbers(path, key, value):
    word = next(word for word in ("true", "false") if word in value)
    message = refused(path, BASE + "rewards: {functions: [{function: math}]}", f"{key}={value}")
    assert f"`{key}`: {word} is not a number" in message


def _fields(section, prefix=""):
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _fields(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


@pytest.mark.parametrize("key", [key for key, kind in _fields(Config) if kind in (int, float)])
def test_numeric_keys_refuse_booleans_and_non_finite_or_huge_numbers(path, key):
    for value, words in (
        ("true", "is not a number"), (".nan", "finite"), (".inf", "finite"), ("1e300", "`"), ("-1e300", "`"),
        ("9" * 40, "`"),
    ):  # fmt: skip
        assert f"`{key}`" in (message := refused(path, BASE, f"{key}={value}")) and words in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rewards.timeout_s=1e10", "`rewards.timeout_s`: 1e+10 is too large; expected at most 100000000"),
        ("rewards.memory_mb=1e18", "`rewards.memory_mb`: 1e+18 is too large; expected at most 1073741824"),
        ("rollout.kv_cache_gib=1e20", "expected at most 1048576"),
        ("checkpoint.grace_s=1e12", "expected at most 100000000"),
        ("policy.optimizer.lr=1e-320", "is too close to 0; expected 0 or at least 1e-30"),
        ("steps=1e12", "`steps`: 1000000000000 is too large; expected at most 2147483647"),
        ("sampling.max_new_tokens={schedule: [[0, 8], [5, 1000000000000]]}",
         "schedule`: 1000000000000 is too large; expected at most 2147483647"),
        ("sampling.temperature=0.001", "greater than or equal to 0.01"),
        ("rejection.temperature=0.001", "greater than or equal to 0.01"),
        ("evaluation.temperature=0.001", "0.001 is below 0.01, and the engine would raise it"),
    ],
)  # fmt: skip
def test_numbers_beyond_the_limits_of_machine_or_engine_are_refused(path, override, words):
    assert words in refused(path, BASE, override)


def test_numbers_at_the_limits_are_accepted(path):
    path.write_text(BASE)
    config = load_config(
        path, ["rewards.timeout_s=1e8", "evaluation.temperature=0", "sampling.temperature=0.01", "steps=1e3"]
    )
    assert (config.rewards.timeout_s, config.evaluation.temperature, config.steps) == (1e8, 0.0, 1000)


_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.dates(),
    st.binary(max_size=4),
    st.sampled_from(["${name}", "${", "???", "*", "${oc.env:HOME}", "demo:tiny", "\x85", "\u2028"]),
)  # fmt: skip
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | _SCALARS, inner, max_size=3)
    ),
    max_leaves=8,
)
_KEYS = [key for key, _ in _fields(Config)] + ["model", "data", "data.train.0", "defaults", "algorithm"]


@pytest.mark.slow
@settings(max_examples=100)
@given(key=st.sampled_from(_KEYS), value=_VALUES)
def test_any_text_in_a_file_is_read_or_refused(path, key, value):
    """Only UserError is raised; a file that loads can be dumped."""
    tree = yaml.safe_load(BASE)
    *sections, last = key.split(".")
    place = tree
    for name in sections:
        place = place[int(name)] if isinstance(place, list) else place.setdefault(name, {})
    place[int(last) if isinstance(place, list) else last] = value
    with contextlib.suppress(UserError, yaml.YAMLError, TypeError):
        path.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
        with contextlib.suppress(UserError):
            _load(path)


def _load(path):
    """Load and dump. The YAML dump above may raise a TypeError; from the loader it is a failure."""
    try:
        dump_config(load_config(path)).encode()
    except UserError:
        raise
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from error


@settings(max_examples=100)
@given(
    text=st.binary(max_size=60) | st.text("{}[]:,&*!|>'\"-?# \n\tab${}.0~<%@`", max_size=40).map(str.encode)
)
def test_any_bytes_in_a_file_are_read_or_refused(path, text):
    path.write_bytes(BASE.encode() + text)
    with contextlib.suppress(UserError):
        load_config(path)


@settings(max_examples=100)
@given(
    key=st.sampled_from(_KEYS) | st.text(max_size=10), value=st.text(max_size=20), sign=st.sampled_from("=+")
)
def test_any_override_is_set_or_refused(path, key, value, sign):
    path.write_text(BASE)
    with contextlib.suppress(UserError):
        load_config(path, [f"{key}{sign}{value}"])


@pytest.mark.parametrize("value", ["'#### (.+)'", '"#### (.+)"', "a#b", "[a#b, '# c']", '{x: "y # z"}'])
def test_a_number_sign_inside_text_is_text(value):
    tree = OmegaConf.create({})
    set_from_text(tree, f"data.x={value}")
    assert OmegaConf.to_container(tree)["data"]["x"] == yaml.safe_load(value)


@pytest.mark.parametrize("column", ["problem", "answer"])
def test_a_row_with_a_lone_surrogate_is_refused_with_file_and_line(tmp_path, column):
    rows = [{"problem": "1+1=", "answer": "2"}, {"problem": "1+1=", "answer": "2", column: "2\ud800"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2.*`{column}`: has the character U\+D800"):
        read(DataSourceConfig(path=str(file)))
    file.write_text(json.dumps({"problem": "\U0001f600 \\u", "answer": "2"}) + "\n")
    assert read(DataSourceConfig(path=str(file)))[0].problem == "\U0001f600 \\u"


@pytest.mark.parametrize(
    "content", ["many", "", "1.5", b"\xff", "\ud800".encode("utf-8", "surrogatepass"), None]
)
def test_a_done_file_without_a_number_is_refused(tmp_path, content):
    done = tmp_path / "DONE"
    data = content.encode() if isinstance(content, str) else content
    done.mkdir() if data is None else done.write_bytes(data)
    with pytest.raises(UserError, match=r"DONE: expected a file with the number of steps.*remove it"):
        finished_steps(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.yaml", "environment.json", "metrics.jsonl", "events.jsonl", "ledger.jsonl"]
)
def test_a_directory_instead_of_a_run_file_is_refused_before_anything_starts(here, capsys, name):
    (here / "runs/run" / name / "inside").mkdir(parents=True)
    assert main(["train", "config.yaml"]) == 2
    output = capsys.readouterr().err
    assert name in output and "Is a directory" in output and "Traceback" not in output


_DEEP = b'{"a":' * 100_000


@pytest.mark.parametrize("content", [_DEEP, b"\xff", b"", b"[]", b'{"schema": 2}', b"null"])
def test_damaged_json_files_are_refused_by_name(tmp_path, content):
    for name, reader in (("stage.json", read_record), ("submitted.json", read_submission)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            reader(tmp_path)
    (tmp_path / "bench.json").write_bytes(content)
    with pytest.raises(UserError, match=r"bench\.json"):
        BenchResult.read(tmp_path / "bench.json")


def test_damaged_lines_of_a_run_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n' + _DEEP + b'\n"\\ud800"\n{"step": 2}\n{"step": 3}')
    assert kept_lines(path, 9) == ['{"step": 1}\n', '{"step": 2}\n']


@pytest.mark.parametrize(("kind", "words"), [("pipe", "Not a regular file"), ("directory", "Is a directory")])
def test_reading_a_pipe_does_not_block(tmp_path, kind, words):
    path = tmp_path / "bench.json"
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with pytest.raises(UserError, match=rf"bench\.json: cannot be read \({words}\)"):
        BenchResult.read(path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "{}", "data.train.0.path=~no-such-user/x.jsonl"],
        ["train", "{}", "output_dir=~no-such-user/runs"],
        ["train", "{}", "model.path=~no-such-user/model"],
        ["score", "~no-such-user/c.jsonl"],
        ["eval", "~no-such-user/model", "gsm8k"],
        ["report", "~no-such-user/run"],
    ],
)
def test_the_home_of_an_unknown_user_is_refused_in_one_line(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    config = "model: {path: 'demo:tiny'}\ndata: {train: [{path: 'demo:add3'}]}\n"
    (tmp_path / "c.yaml").write_text(config)
    assert main([text.format("c.yaml") for text in arguments]) == 2
    output = capsys.readouterr().err
    assert "~no-such-user names no user with a home directory" in output and output.count("\n") == 1
