"""The heads of the shipped recipes say what the plan says of them now."""

import re

import pytest

from grpo_dist.config.files import load_config
from grpo_dist.errors import UserError
from grpo_dist.tools.bench.several import load_set
from grpo_dist.tools.plan.accelerators import parse_cluster
from grpo_dist.tools.plan.command import made_setting
from grpo_dist.tools.plan.heads import CONFIGS, GPUS, Head, cluster_of, main, read, recipes, with_head
from grpo_dist.tools.plan.options import option_of

NAMES = [path.relative_to(CONFIGS).as_posix() for path in recipes()]


@pytest.mark.parametrize("name", NAMES)
def test_a_head_states_memory_and_bounds_as_they_are_planned_now(name):
    """After a change of a recipe or of the plan: `python -m grpo_dist.tools.plan.heads`."""
    head, lines = Head.of(CONFIGS / name), read(CONFIGS / name)
    stated = list(head.digests(lines))
    rows = [line for line in lines if re.search(r" \[\w{8}\]$", line)]
    assert len(stated) == len(rows) >= 1
    assert [then for then, _ in stated] == [now for _, now in stated]


@pytest.mark.parametrize("name", NAMES)
def test_a_head_has_the_times_of_the_file_as_it_is(name):
    assert read(CONFIGS / name)[1] == Head.of(CONFIGS / name).own_row()


@pytest.mark.parametrize("name", NAMES)
def test_a_head_has_every_size_and_names_its_record(name):
    first, own, *sizes, source = read(CONFIGS / name)
    assert first.startswith("Expected by `python -m grpo_dist.tools.plan.heads`")
    assert own.startswith("as it is, ")
    if Head.of(CONFIGS / name).is_for_cpus:
        record = "smollm2" if "smollm2" in name else "demo"
        assert not sizes and f"configs/bench/measured/{record}_2cores.json" in source
    else:
        assert [line.partition(":")[0] for line in sizes] == [cluster_of(gpus) for gpus in GPUS]
        assert "no benchmark of a GPU is recorded" in source


def test_gpus_are_counted_in_nodes_of_eight():
    assert [cluster_of(n) for n in (1, 4, 8, 16, 64, 128)] == [
        "1x1xH100", "1x4xH100", "1x8xH100", "2x8xH100", "8x8xH100", "16x8xH100"
    ]  # fmt: skip


def test_a_head_replaces_the_one_before_and_nothing_else():
    text = "# What it is.\n#| old\n#| old\nname: x  # a comment\n#| old\nsteps: 3\n"
    once = with_head(text, ["#| new"])
    assert once == "# What it is.\n#| new\nname: x  # a comment\nsteps: 3\n"
    assert with_head(once, ["#| new"]) == once


def test_the_command_finds_a_stale_head_and_repairs_it(tmp_path, monkeypatch, capsys):
    recipe = tmp_path / "small.yaml"
    recipe.write_text(
        "model: {path: Qwen/Qwen2.5-0.5B}\ndata: {train: [{path: 'demo:add3'}]}\n"
        "batch: {prompts_per_step: 2, samples_per_prompt: 2}\nsampling: {max_new_tokens: 8}\n"
        "bench: {lengths: {kind: fixed}}\ncluster: {placement: colocated}\n"
    )
    monkeypatch.setattr("grpo_dist.tools.plan.heads.recipes", lambda: [recipe])
    monkeypatch.setattr("grpo_dist.tools.plan.heads.GPUS", (1,))
    assert main(["--check"]) == 1 and not read(recipe)
    assert main([]) == 0 and main(["--check"]) == 0
    assert read(recipe)[1].startswith(
        "as it is, 1x1xH100: 1 rank(s) of ZeRO-2, 1 engine(s) x TP 1, colocated; "
    )
    recipe.write_text(recipe.read_text().replace(" tokens/s", "0 tokens/s", 1))
    assert main(["--check"]) == 1
    assert "small.yaml: changed" in capsys.readouterr().out


def test_a_recipe_that_does_not_fit_as_it_is_gets_no_head(tmp_path, monkeypatch):
    recipe = tmp_path / "large.yaml"
    recipe.write_text(
        "model: {path: Qwen/Qwen2.5-7B}\ndata: {train: [{path: 'demo:add3'}]}\n"
        "cluster: {placement: colocated}\n"
    )
    monkeypatch.setattr("grpo_dist.tools.plan.heads.recipes", lambda: [recipe])
    words = "large.yaml: as it is, it cannot run on 1x1xH100: policy: a worker needs"
    for arguments in ([], ["--check"]):
        with pytest.raises(UserError, match=words):
            main(arguments)
    assert not read(recipe)


def test_the_benchmarks_of_one_gpu_fit_it():
    path = CONFIGS / "bench/sets/gpu.yaml"
    for run in load_set(path).runs:
        config = load_config(*run.arguments(path.parent))
        option = option_of(config, made_setting(config, parse_cluster("1x1xH100")))
        assert option.problems == [] and option.roles.colocated, run.name


def test_help_and_unknown_options_write_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("grpo_dist.tools.plan.heads.recipes", lambda: pytest.fail("it plans"))
    for option, status in (("--help", 0), ("--chekc", 2)):
        with pytest.raises(SystemExit) as ended:
            main([option])
        assert ended.value.code == status
    assert "--check" in capsys.readouterr().out


def test_recipes_are_there_for_every_size():
    own = {re.search(r"as it is, (\S+):", "\n".join(read(path)))[1] for path in CONFIGS.glob("*.yaml")}
    assert own == {"1x0xCPU", "1x1xH100", "1x4xH100", "1x8xH100", "2x8xH100", "8x8xH100", "16x8xH100"}
