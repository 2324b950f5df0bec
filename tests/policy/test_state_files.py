"""Checkpoint files of a rank: they hold the state at the time of the call, and loading executes no code."""

import os
import pickle

import pytest
import torch

from grpo_dist.policy.saved_state import PolicyFiles, snapshot


def test_a_file_written_in_the_background_holds_the_state_at_the_call(tmp_path):
    files = PolicyFiles()
    weight = torch.arange(6.0).view(2, 3)
    state = {"w": weight, "tied": weight, "part": weight[0], "steps": [1, {"lr": 0.1}], "none": None}
    files.blocking = False
    files.save(state, str(tmp_path / "state.pt"))
    weight.zero_()
    state["steps"][1]["lr"] = 7.0
    while not files.written():
        pass
    loaded = files.load(str(tmp_path / "state.pt"))
    assert torch.equal(loaded["w"], torch.arange(6.0).view(2, 3))
    assert torch.equal(loaded["part"], torch.arange(3.0))
    assert loaded["tied"].data_ptr() == loaded["w"].data_ptr()  # tied in memory and in the file
    assert loaded["steps"] == [1, {"lr": 0.1}] and loaded["none"] is None


def test_views_of_one_buffer_are_stored_without_the_rest_of_it():
    flat = torch.zeros(1_000_000)
    stored = snapshot({"a": flat[:10], "b": flat[10:20]})
    assert [t.untyped_storage().nbytes() for t in stored.values()] == [40, 40]


class Hostile:
    def __reduce__(self):
        return os.mkdir, (os.environ["HOSTILE"],)


def test_a_file_that_would_execute_code_is_refused_and_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("HOSTILE", str(tmp_path / "ran"))
    torch.save({"w": torch.zeros(1), "x": Hostile()}, tmp_path / "zip.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Hostile()))
    for name in ("zip.pt", "plain.pt"):
        with pytest.raises(ValueError, match=rf"{name}: cannot be read as a policy state .* use another"):
            PolicyFiles().load(str(tmp_path / name))
    assert not (tmp_path / "ran").exists()


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    files = PolicyFiles()
    with pytest.raises(OSError, match=r"absent/state\.pt: cannot be written"):
        files.save({}, str(tmp_path / "absent" / "state.pt"))
    files.blocking = False
    files.save({}, str(tmp_path / "absent" / "state.pt"))
    with pytest.raises(OSError, match=r"absent/state\.pt: cannot be written"):
        while not files.written():
            pass
