"""A problem that refers to an image is named: the model reads text alone."""

import pytest

from grpo_dist.data.readers import DataRow, media_problem


def rows(*problems):
    return [DataRow(problem, "1", "geo", f"geo.jsonl:{i + 1}", {}) for i, problem in enumerate(problems)]


@pytest.mark.parametrize(
    "placeholder",
    ["<image>", "<image_1>", "<image1>", "<video>", "<audio>", "<|image_pad|>", "<|image|>", 
     "<|vision_start|>", "<start_of_image>", "<image_soft_token>", "[IMG]"],
)  # fmt: skip
def test_placeholders_are_counted_and_the_first_row_is_named(placeholder):
    said = media_problem(rows("1 + 1", f"{placeholder}Find x.", f"In {placeholder}, find y."))
    assert said.startswith("2 of 3 problems have a placeholder")
    assert f"(the first is geo.jsonl:2, {placeholder})" in said


def test_other_text_is_text():
    assert media_problem(rows("Let <x> be the image of f.", "a<b>c", "image>1", "[IMGS]")) == ""
