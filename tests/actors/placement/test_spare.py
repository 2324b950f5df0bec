"""Room for guests, and the file that says how many engines are wanted."""

import logging

from actors.placement.elasticity import wanted_in
from actors.placement.spare import pick

GPUS = {"a": (2.0, 8.0), "b": (1.0, 8.0), "c": (4.0, 1.0)}


def test_guests_go_to_the_fullest_nodes_that_have_all_they_take():
    assert pick(GPUS, 1, 1, 10) == ["b", "a", "a", "c"]  # c has four GPUs and one CPU
    assert pick(GPUS, 0, 2, 10) == ["a", "c", "c"]
    assert pick(GPUS, 0, 2, 1) == ["a"]
    assert pick(GPUS, 0, 5, 1) == []


def test_the_wanted_number_is_read_from_a_file_and_what_is_no_number_is_reported_once(tmp_path, caplog):
    path = tmp_path / "engines"
    wanted = wanted_in(path)
    assert wanted() is None
    path.write_text(" 3\n")
    assert wanted() == 3
    with caplog.at_level(logging.WARNING, "grpo_dist"):
        for text in ("three", "three", "-1", "1e3"):
            path.write_text(text)
            assert wanted() is None
    told = [record.args[1] for record in caplog.records if record.name == "grpo_dist"]
    assert told == ["three", "-1", "1e3"]
    path.write_text("2")
    assert wanted() == 2
