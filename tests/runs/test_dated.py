"""Chat templates write the date of the run's start, on whatever day they are rendered."""

import json
from datetime import date

import pytest
from transformers import AutoTokenizer

from grpo_dist.config import Config, SFTConfig
from grpo_dist.config.files import dump_config
from grpo_dist.data.demonstrations import load_demonstrations
from grpo_dist.data.prompts import PromptFormat, build_prompts
from grpo_dist.data.readers import DataRow
from grpo_dist.environments.dialogue import Renderer
from grpo_dist.runs import cold_start
from grpo_dist.runs.identity import DataOrigin, data_digest, fingerprint
from grpo_dist.runs.run_directory import read_template_date, set_template_date
from grpo_dist.types import Task
from tests.support.chat_templates import templated_tokenizer, trl_templates
from tests.support.made_groups import load_pairs

DAY = "2026-07-31"


def config(**data):
    plain = {"model": {"path": "demo:tiny"}, "data": {"train": [{"path": "demo:add3"}], **data}}
    return Config.model_validate(plain)


def save(directory, template):
    templated_tokenizer(template, "<|eot_id|>", "<s>").save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)


def prompts(tokenizer, settings):
    row = DataRow("1+1=", "2", "set", "set.jsonl:1", {})
    return build_prompts(
        [row], tokenizer, PromptFormat.from_config(settings.data), max_prompt_tokens=999
    ).prompts


def test_a_resumed_run_keeps_the_date_of_its_start(tmp_path):
    assert set_template_date(config()).data.template_date == date.today().isoformat()
    assert read_template_date(tmp_path) is None
    first = set_template_date(config(), DAY)
    (tmp_path / "config.yaml").write_text(dump_config(first))
    assert set_template_date(config(), read_template_date(tmp_path)).data.day == date(2026, 7, 31)
    assert set_template_date(config(template_date="2020-01-02"), DAY).data.template_date == "2020-01-02"
    (tmp_path / "config.yaml").write_text("- not a configuration")
    assert read_template_date(tmp_path) is None


def test_the_date_is_no_part_of_a_runs_identity_but_its_prompts_are(tmp_path):
    """If no template writes the date, another date is the same run."""
    assert (
        fingerprint(set_template_date(config()))
        == fingerprint(set_template_date(config(), DAY))
        == fingerprint(config())
    )
    plain, dating = (save(tmp_path / n, trl_templates()[n]) for n in ("llama3", "llama3_2"))
    first, second = set_template_date(config(), DAY), set_template_date(config(), "2026-08-01")
    assert data_digest(prompts(plain, first)) == data_digest(prompts(plain, second))
    assert data_digest(prompts(dating, first)) != data_digest(prompts(dating, second))
    old, new = (DataOrigin.from_rows(["a"], dating, tmp_path / "llama3_2", c.data) for c in (first, second))
    assert old.rows == new.rows
    assert new.changes(old.reading) == [
        f"the date that the chat template writes (`data.template_date`) was {DAY} and is 2026-08-01"
    ]
    assert not DataOrigin.from_rows(["a"], plain, tmp_path / "llama3", first.data).changes(
        DataOrigin.from_rows(["a"], plain, tmp_path / "llama3", second.data).reading
    )


def test_other_tokenizer_files_are_named(tmp_path):
    tokenizer, data = save(tmp_path, trl_templates()["llama3"]), config().data
    before = DataOrigin.from_rows(["a"], tokenizer, tmp_path, data)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    [change] = DataOrigin.from_rows(["a"], tokenizer, tmp_path, data).changes(before.reading)
    assert "tokenizer files" in change
    assert DataOrigin.from_rows(["b"], tokenizer, tmp_path, data).rows != before.rows


def test_later_turns_and_demonstrations_have_the_date_of_the_run(tmp_path):
    tokenizer, settings = save(tmp_path, trl_templates()["llama3_2"]), set_template_date(config(), DAY)
    task = Task("e", messages=({"role": "user", "content": "1+1="},))
    renderer = Renderer(tokenizer, settings.data, settings.environments)
    assert "31 Jul 2026" in renderer.prompt(task)
    later_turn = [{"role": "user", "content": "more"}]
    assert "31 Jul 2026" in renderer.conversation(task, task.messages, "2", later_turn).text
    path = tmp_path / "sft.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    sft = SFTConfig(model="demo:tiny", data=str(path))
    [row] = load_demonstrations(sft, tokenizer, day=settings.data.day)
    assert row.token_ids.tolist() == prompts(tokenizer, settings)[0].token_ids.tolist()
    [other] = load_demonstrations(sft, tokenizer, day=date(2026, 8, 1))
    assert row.uid != other.uid and row.row_uid == other.row_uid


def test_a_date_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"'31.7.2026' is no date; expected year-month-day"):
        config(template_date="31.7.2026")


def test_a_cold_start_has_the_date_of_its_run(tmp_path, monkeypatch):
    """If the template writes a date; otherwise one cold start serves all days."""
    monkeypatch.setenv("GRPO_DIST_CACHE", str(tmp_path / "cache"))
    rows = tmp_path / "sft.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    settings, days = SFTConfig(model="demo:tiny", data=str(rows)), []

    def fake_train(settings, model_dir, tokenizer, out, say, day):
        days.append(day)
        (out / "tokens").write_text(str(load_pairs(settings, tokenizer, day=day)))

    monkeypatch.setattr(cold_start, "_train", fake_train)
    for name, models in (("llama3_2", 2), ("llama3", 1)):
        messages = []
        save(tmp_path / name, trl_templates()[name])
        first, second, again = (
            cold_start.run_sft(settings, tmp_path / name, messages.append, day=date.fromisoformat(day))
            for day in (DAY, "2026-08-01", DAY)
        )
        assert first == again and len({first, second}) == models == len(days)
        assert any(f"every demonstration: {DAY}" in message for message in messages) == (models == 2)
        if models == 2:
            assert days == [date(2026, 7, 31), date(2026, 8, 1)]
            assert (first / "tokens").read_text() != (second / "tokens").read_text()
        days.clear()
