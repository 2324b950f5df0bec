"""The page of configuration keys is complete, current and correct."""

import re

import pytest

from grpo_dist.config import Config
from grpo_dist.config.base import tagged_unions
from grpo_dist.config.files import checked
from grpo_dist.tools.config_reference import PAGE, anchor, keys, main, meaning, page, sections
from grpo_dist.tools.recipe.config import PipelineFile

ROOTS = (Config, PipelineFile)


def row(path: str) -> list[str]:
    """Return key, value, default and meaning of a key's row on the page."""
    line = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{path}` |"))
    key, value, meaning = [cell.strip() for cell in line.strip("|").split(" | ")]
    values, _, default = value.rpartition("; ")
    return [key, values, default, meaning]


def test_the_page_is_made_from_the_code():
    assert main(["--check"]) == 0, "make reference"


@pytest.mark.parametrize("root", ROOTS)
def test_every_key_has_a_meaning(root):
    all_keys = [key for prefix, section in sections(root) for key in keys(section, prefix)]
    assert [key.path for key in all_keys if len(meaning(key)) < 5] == []
    assert not [key.path for key in all_keys if "\n" in meaning(key)]


def test_the_page_has_a_row_for_every_key_that_a_dumped_configuration_has():
    """The keys come from a configuration with an entry in every list and optional section."""
    filled = {
        "model": {"path": "m"},
        "data": {"train": [{"path": "x"}], "eval": [{"path": "y"}]},
        "rewards": {"models": [{"name": "q", "path": "r"}], "functions": [{"function": "math"}]},
        "policy": {"lora": {}},
        "sft": {"model": "demo:tiny", "data": "demo:add3"},
    }
    dumped = checked(filled, "test", Config).model_dump(mode="json")
    text = PAGE.read_text()
    page_keys = set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))
    for heading in re.findall(r"^### (.+)$", text, re.MULTILINE):
        page_keys |= set(re.findall(r"`([^`]+)`", heading))
    same = {"data.eval.N": "data.train.N", "sft.data.N": "demonstrations.data.N"}  # share one table
    one_place = {
        next((path.replace(a, b) for a, b in same.items() if path.startswith(f"{a}.")), path)
        for path in paths(dumped)
    }
    chosen = {".".join((*path, union[0].tag)).replace("*", "N") for path, union in tagged_unions(Config)}
    assert len(one_place) > 150 and one_place - page_keys == chosen & one_place  # tags: values of a section


def paths(value, prefix=""):
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield f"{prefix}{name}"
            yield from paths(inner, f"{prefix}{name}.")
    elif isinstance(value, list):
        for inner in value:
            yield from paths(inner, f"{prefix}N.")


def test_documented_values_ranges_and_defaults_are_those_of_the_code():
    assert row("batch.samples_per_prompt")[1:3] == ["> 0", "`8`"]
    assert row("algorithm.loss.clip_low")[1:3] == ["> 0 ≤ 1", "`0.2`"]
    names, default = row("algorithm.advantage")[1:3]
    assert names.startswith("[name](#algorithmadvantage-datatrainnalgorithmadvantage") and default == "`grpo`"
    assert "\n| `policy_gradient`, `topr`, `topr_token` | | Losses without settings. |\n" in PAGE.read_text()
    tau = row("algorithm.loss.tau_negative")
    assert tau[1:] == ["> 0", "`1.05`", "sapo: temperature for negative advantages"]
    assert row("weight_sync.mode")[1:3] == ["`drain`, `keep`", "`drain`"]
    assert row("model.path")[1:3] == ["text", "required"]
    assert row("rewards.functions")[2] == "`[{function: math}]`"
    assert row("policy.optimizer.betas")[1:3] == ["list of 2: number ≥ 0.0 ≤ 1.0", "`[0.9, 0.95]`"]
    assert row("demonstrations")[1:3] == ["[section](#demonstrations)", "`null`"]
    assert row("policy.optimizer.schedule")[1] == "`constant`, `linear`, `cosine`"


@pytest.mark.parametrize("root", ROOTS)
def test_every_link_of_the_page_has_its_heading(root):
    text = page(root, "The run")
    anchors = {anchor(heading) for heading in re.findall(r"^### (.+)$", text, re.MULTILINE)}
    links = set(re.findall(r"\]\(#([^)]+)\)", text))
    assert links and links <= anchors
