"""A cluster that a run starts is for its user alone."""

import os
import stat

import pytest

from actors.private_ray import close_session, prepare_token


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    before = os.umask(0o022)
    yield tmp_path
    os.umask(before)


def test_only_its_user_can_read_the_token(home):
    prepare_token()
    token = home / ".ray/auth_token"
    text = token.read_text()
    assert mode(token) == 0o600 and mode(token.parent) == 0o700 and len(text) == 64
    token.chmod(0o644)  # as Ray itself writes it
    prepare_token()
    assert mode(token) == 0o600 and token.read_text() == text


@pytest.mark.parametrize(("name", "value"), [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "x" * 64)])
def test_no_token_is_written_where_none_is_read(home, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    prepare_token()
    assert not (home / ".ray").exists()


def test_a_token_somewhere_else_is_left_as_it_is_with_a_warning(home, monkeypatch, caplog):
    other = home / "token"
    other.write_text("x" * 64)
    other.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(other))
    prepare_token()
    assert mode(other) == 0o644 and "can be read by others; chmod 600 it" in caplog.text


def test_other_users_can_neither_enter_nor_rename_a_session(tmp_path):
    shared = tmp_path / "ray"
    (shared / "session_1").mkdir(parents=True)
    for path in (shared, shared / "session_1"):
        path.chmod(0o777)  # as Ray does
    close_session(shared / "session_1")
    assert mode(shared / "session_1") == 0o700 and mode(shared) == 0o1777
