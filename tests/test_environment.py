"""What a run directory says of where and with what it was started."""

import json
import sys

from grpo_dist import __version__
from grpo_dist.environment import ENVIRONMENT, _without_secret, installed, write_environment


def test_versions_and_machine_are_those_of_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo-dist", "train", "a.yaml", "steps=3", "judge.api_key=sesame"])
    write_environment(tmp_path)
    text = (tmp_path / ENVIRONMENT).read_text()
    found = json.loads(text)
    assert found["versions"]["grpo-dist"] == __version__
    assert found["versions"]["torch"] == installed("torch")
    assert found["python"] == sys.version.split()[0] and found["cpus"] >= 1 and found["memory_gib"] > 0
    assert found["command"] == ["grpo-dist", "train", "a.yaml", "steps=3", "judge.api_key=***"]
    assert "sesame" not in text


def test_a_command_line_is_recorded_without_the_secrets_in_its_settings():
    assert _without_secret("a={function: judge, kwargs: {api_key: sesame}}") == (
        "a={function: judge, kwargs: {api_key: '***'}}"
    )
    assert _without_secret("a.kwargs.api_key={sesame: 1") == "a.kwargs.api_key=***"
    assert _without_secret("http://me:sesame@host/data") == "http://***@host/data"
    for plain in ("steps=3", "a=[1, 2]", "a={b: [1,2]}", "--verbose", "+algorithm=dapo", "a=b=c"):
        assert _without_secret(plain) == plain


def test_a_package_that_is_not_there_has_no_version():
    assert installed("no-such-package-anywhere") is None
