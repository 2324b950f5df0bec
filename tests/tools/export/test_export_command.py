"""`grpo-dist export`: the files are the model of the checkpoint; what is refused; the upload."""

import json
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import huggingface_hub
import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_dist.cli import main
from grpo_dist.policy.full_weights import why_no_export
from grpo_dist.runs.model_card import VLLM_RANKS, model_card
from grpo_dist.tools.export import export as exporting
from tests.support import fakes
from tests.support.made_weights import write_run, write_scores
from tests.support.tiers import slow_after

IDS = torch.arange(11, 43)[None]


@pytest.fixture(scope="module")
def base_run(tiny_model, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("made") / "mine", tiny_model)


@pytest.fixture
def run(base_run, tmp_path, monkeypatch):
    """A run of four steps with checkpoints of 2 and 3, of which only 2 was evaluated."""
    monkeypatch.chdir(tmp_path)
    run_dir, model = base_run
    return Path(shutil.copytree(run_dir, tmp_path / "runs/mine")), model


def make_run(run_dir, base, dtype=torch.float32, **changes):
    name = str(dtype).removeprefix("torch.")
    config = fakes.config(model={"path": str(base), "dtype": name}, name="mine", steps=4, **changes)
    for step in (2, 3):
        model = write_run(run_dir, config, base, step, dtype)
    write_scores(run_dir, {0: (0.25, 0.03), 1: (0.3, 0.03), 2: (0.5, 0.04), 3: (None, None)})
    return run_dir, model


def read_card(directory):
    """Return the metadata and the text of a model card."""
    _, metadata, text = (directory / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(metadata), text


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_the_newest_checkpoint_becomes_a_directory_of_transformers(run, tiny_model, capsys):
    run_dir, trained = run
    assert main(["export", str(run_dir)]) == 0
    out = run_dir / "export/step_000003"
    assert f"{out}: step 3" in capsys.readouterr().out
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.float32 and torch.equal(logits(loaded), logits(trained))
    theirs, ours = (AutoTokenizer.from_pretrained(path) for path in (tiny_model, out))
    assert ours.chat_template == theirs.chat_template is not None
    assert (out / "generation_config.json").is_file() and why_no_export(out) == ""
    assert [path.name for path in out.parent.iterdir()] == ["step_000003"]  # nothing half-written


def test_the_card_names_model_data_settings_and_accuracy(run):
    run_dir, _ = run
    assert main(["export", f"{run_dir}@2", "--out", "out"]) == 0
    metadata, text = read_card(run_dir.parents[1] / "out")
    assert metadata["library_name"] == "transformers" and "base_model" not in metadata
    assert "2 of 4 steps of reinforcement learning (GRPO)" in text
    assert "| held | pass@1 | 25.0% ± 3.0% | 50.0% ± 4.0% |" in text
    assert "| data | add3 (demo:add3) |" in text and "| rewards | math × 1 |" in text
    assert "4 prompts × 2 samples" in text and str(run_dir.parent) not in text


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of the hub that has two models and a data set."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("models--Qwen--Qwen3-4B", "datasets--openai--gsm8k", "models--runs--local"):
        (tmp_path / "hub" / name / "snapshots/1cfa9a7").mkdir(parents=True)


@pytest.mark.parametrize(("path", "base"), [
    ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
    ("/secret/model", None),
    ("secret/model", None),  # relative to where the run was started
    ("secret/model.gguf", None),
    ("runs/local", None),
])  # fmt: skip
def test_the_card_names_a_model_and_data_of_the_hub_but_no_path_of_the_machine(tmp_path, hub, path, base):
    (tmp_path / "runs/local").mkdir(parents=True)  # a run reads it, whatever the hub has
    train = [{"path": p} for p in ("openai/gsm8k", "/secret/a.jsonl", "secret/b.jsonl", "secret/rows")]
    card = model_card(fakes.config(model={"path": path}, data={"train": train}), tmp_path / "runs/mine", 3)
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert metadata.get("base_model") == base and metadata["datasets"] == ["openai/gsm8k"]
    assert "| data | gsm8k (openai/gsm8k), a, b, rows |" in card
    assert not any(word in card for word in ("secret/", "runs/")) and "It was not measured." in card


SERVE = "vllm serve {} --enable-lora --max-lora-rank 32 --lora-modules trained=THIS_DIRECTORY"


@pytest.mark.parametrize(("changes", "adapter", "base", "words"), [
    ({"model": {"path": "Qwen/Qwen3-4B"}}, True, "Qwen/Qwen3-4B", [SERVE.format("Qwen/Qwen3-4B")]),
    ({"model": {"path": "demo:tiny"}}, True, None, [SERVE.format("BASE_MODEL"), "adapter_config.json"]),
    ({"model": {"path": "sft"}}, True, None,
     ["for the cold start of its run, which is supervised training of [Qwen/Qwen3-4B]",
      SERVE.format("BASE_MODEL"), "`base_model_name_or_path`", "without `--adapter`"]),
    ({"model": {"path": "sft"}}, False, "Qwen/Qwen3-4B", ["vllm serve THIS_DIRECTORY", "supervised first"]),
    ({"policy": {"lora": {"rank": 600}}}, True, None, ["vLLM serves adapters up to rank 512"]),
])  # fmt: skip
def test_the_card_of_an_adapter_names_the_weights_that_it_fits(tmp_path, hub, changes, adapter, base, words):
    sft = {"model": "Qwen/Qwen3-4B", "data": ["right.jsonl"]}
    base_config = {"policy": {"lora": {"rank": 20}}, "sft": sft}
    card = model_card(fakes.config(**base_config | changes), tmp_path, 3, adapter=adapter)
    assert yaml.safe_load(card.split("---\n")[1]).get("base_model") == base
    assert all(word in card for word in words), card


def test_ranks_are_those_that_the_installed_vllm_takes():
    source = Path(find_spec("vllm").origin).with_name("config") / "lora.py"
    assert f"MaxLoRARanks = Literal[{', '.join(map(str, VLLM_RANKS))}]" in source.read_text()


@pytest.mark.parametrize(("rewards", "row"), [
    ({"overlong_buffer": {"tokens": 2, "penalty": 0.5}}, "math × 1, overlong × 0.5"),
    ({"functions": [{"function": "math", "gate": "format", "gate_above": 0.5}, {"function": "format"}]},
     "math × 1 where format > 0.5, format × 1"),
    ({"by_source": {"add3": {"functions": [{"function": "exact", "weight": 2}], "models": ["taste"]},
                    "add4": {"functions": [{"function": "choice"}]},
                    "add5": {"functions": [{"function": "choice"}]}},
      "models": [{"name": "taste", "path": "/secret/judge", "weight": 0.1}],
      "overlong_buffer": {"tokens": 2, "penalty": 0.5}},
     "add3: exact × 2, overlong × 0.5, taste × 0.1; add4, add5: choice × 1, overlong × 0.5"),
])  # fmt: skip
def test_the_card_has_the_rewards_of_each_source(tmp_path, rewards, row):
    data = {"train": [{"path": f"demo:{name}"} for name in ("add3", "add4", "add5")]}
    card = model_card(fakes.config(rewards=rewards, data=data), tmp_path, 3)
    assert f"| rewards | {row} |" in card, card


def test_weights_are_written_in_another_type(run):
    run_dir, trained = run
    assert main(["export", str(run_dir), "--dtype", "bfloat16"]) == 0
    tensors = load_file(run_dir / "export/step_000003_bfloat16/model.safetensors")
    weights = trained.state_dict()
    assert all(torch.equal(tensor, weights[name].bfloat16()) for name, tensor in tensors.items())


@pytest.mark.slow
def test_a_run_in_bfloat16_is_exported_in_it_on_any_machine(tiny_model, tmp_path):
    run_dir, trained = make_run(tmp_path / "run", tiny_model, torch.bfloat16)
    assert main(["export", str(run_dir)]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(run_dir / "export/step_000003")
    assert loaded.dtype == torch.bfloat16 and torch.equal(logits(loaded), logits(trained))


@pytest.mark.parametrize(("policy", "options", "bound"), slow_after([
    ({}, [], "largest difference of log-probs from the checkpoint 0 nats (bound 0.001)"),
    ({}, ["--dtype", "float32"], "(bound 0.1)"),
    ({"lora": {"rank": 4}}, [], "(bound 0.1)"),
    ({"lora": {"rank": 4}}, ["--adapter"], "largest difference of log-probs from the checkpoint 0 nats"),
], 1))  # fmt: skip
def test_only_rounded_weights_may_give_other_log_probs(tiny_model, tmp_path, capsys, policy, options, bound):
    run_dir, _ = make_run(tmp_path / "run", tiny_model, torch.bfloat16, policy=policy)
    assert main(["export", str(run_dir), *options]) == 0
    assert bound in capsys.readouterr().out


def test_an_adapter_is_merged_or_written_alone(tiny_model, tmp_path, capsys):
    run_dir, trained = make_run(tmp_path / "run", tiny_model, policy={"lora": {"rank": 4}})
    assert main(["export", str(run_dir)]) == main(["export", str(run_dir), "--adapter"]) == 0
    merged, alone = run_dir / "export/step_000003", run_dir / "export/step_000003_adapter"
    expected = logits(trained)
    assert (expected - logits(AutoModelForCausalLM.from_pretrained(tiny_model))).abs().max() > 0.01
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(merged)), expected, atol=1e-5)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), alone)
    assert torch.allclose(logits(adapted.eval()), expected, atol=1e-5)
    assert f"the base model of the adapter is {tiny_model}, on this machine alone" in capsys.readouterr().out
    assert not (alone / "model.safetensors").exists() and (alone / "tokenizer.json").is_file()
    metadata, text = read_card(alone)
    assert metadata["library_name"] == "peft" and "--enable-lora" in text and "| LoRA | rank 4" in text


@pytest.mark.parametrize(("dtype", "factor"), slow_after([(torch.float32, 1.5), (torch.bfloat16, 1.01)], 1))
def test_files_that_are_not_the_checkpoint_are_removed(
    tiny_model, tmp_path, monkeypatch, capsys, dtype, factor
):
    """A weight that is off by one per cent is far below what rounding would explain."""
    run_dir, _ = make_run(tmp_path / "run", tiny_model, dtype)
    write = exporting.write_loaded

    def spoiled(model, *rest, **how):
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(factor)
        write(model, *rest, **how)

    monkeypatch.setattr(exporting, "write_loaded", spoiled)
    assert main(["export", str(run_dir)]) == 1
    assert "difference of log-probs from the checkpoint" in capsys.readouterr().err
    assert list((run_dir / "export").iterdir()) == []


@pytest.mark.parametrize(("arguments", "words"), [
    (["runs/none"], "runs/none: no run directory"),
    (["runs/mine@7"], "no such checkpoint in runs/mine/checkpoints; it has 2, 3"),
    (["runs/mine", "--adapter"], "--adapter: runs/mine trained all weights"),
    (["runs/mine", "--out", "runs"], "runs: the directory is not empty"),
    (["runs/mine", "--out", "runs/mine/config.yaml"], "config.yaml: a file or link"),
    (["runs/mine", "--push", "x"], "--push x: no repository's name; expected USER/REPO"),
    (["runs/mine", "--push", "me/x"], "--push me/x: no token for the hub; set HF_TOKEN"),
    (["runs/mine", "steps=3"], "steps=3: export takes one run directory and no settings"),
])  # fmt: skip
def test_what_cannot_be_exported_is_refused_before_anything_is_written(
    run, monkeypatch, capsys, arguments, words
):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert main(["export", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not (run[0] / "export").exists()


def test_a_run_without_checkpoints_leads_to_its_model(run, capsys):
    run_dir, _ = run
    for step in ("2", "3"):
        (run_dir / f"checkpoints/step_00000{step}").rename(run_dir / f"gone{step}")
    assert main(["export", str(run_dir)]) == 2
    assert "no checkpoint in" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_named(run, capsys):
    run_dir, _ = run
    (run_dir / "checkpoints/step_000002/state.json").write_text("damaged")
    assert main(["export", f"{run_dir}@2"]) == 2
    assert "damaged checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    "when", slow_after(["find_checkpoint", "load_recorded", "load_weights", "text_logprobs"], 1)
)
@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file"), ValueError("no file *.pt")])
def test_a_checkpoint_that_the_run_deletes_meanwhile_is_named(run, monkeypatch, capsys, when, error):
    run_dir, _ = run

    def deleted(*_, **__):
        shutil.rmtree(run_dir / "checkpoints/step_000003", ignore_errors=True)
        raise error

    monkeypatch.setattr(exporting, when, deleted)
    assert main(["export", str(run_dir)]) == 2
    message = capsys.readouterr().err
    assert "checkpoints/step_000003: the run deleted it meanwhile (`checkpoint.keep`)" in message
    assert str(error) not in message and not any(run_dir.glob("export/*"))


class Hub:
    """Stands in for `HfApi`, and records the calls."""

    endpoint, calls = "https://hub", []

    def create_repo(self, repository, **how):
        self.calls.append(("create", repository, how))

    def upload_folder(self, **how):
        self.calls.append(("upload", how["repo_id"], sorted(p.name for p in how["folder_path"].iterdir())))


@pytest.fixture
def uploads(monkeypatch):
    """Return the calls of a hub that accepts every upload."""
    monkeypatch.setenv("HF_TOKEN", "hf_made_for_a_test")
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [])
    return Hub.calls


def test_an_export_is_uploaded_to_a_repository_that_is_private_if_it_is_new(run, uploads, capsys):
    run_dir, _ = run
    assert main(["export", str(run_dir), "--push", "me/mine"]) == 0
    created, uploaded = uploads
    assert created == ("create", "me/mine", {"private": True, "exist_ok": True})
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {*uploaded[2]}
    assert "https://hub/me/mine" in capsys.readouterr().out


def test_an_earlier_export_of_the_same_settings_is_uploaded(run, uploads, monkeypatch, capsys):
    run_dir, _ = run
    assert main(["export", str(run_dir)]) == 0
    monkeypatch.delattr(exporting, "load_weights")  # nothing is read or written again
    assert main(["export", str(run_dir), "--push", "me/mine"]) == 0
    assert main(["export", str(run_dir), "--push", "me/mine"]) == 0  # a failed upload is repeated
    assert [call[0] for call in uploads] == ["create", "upload"] * 2
    assert "exported before" in capsys.readouterr().out


@pytest.mark.parametrize(
    "how", slow_after(["another step", "another type", "a file is missing", "a file was added"], 1)
)
def test_what_is_another_export_is_not_uploaded(run, uploads, capsys, how):
    run_dir, _ = run
    assert main(["export", str(run_dir), "--out", "out"]) == 0
    out = run_dir.parents[1] / "out"
    if how == "a file is missing":
        (out / "model.safetensors").unlink()
    if how == "a file was added":
        (out / "notes.txt").write_text("")
    which = f"{run_dir}@2" if how == "another step" else str(run_dir)
    options = ["--dtype", "bfloat16"] if how == "another type" else []
    assert main(["export", which, "--out", "out", "--push", "me/mine", *options]) == 2
    assert "out: the directory is not empty" in (message := capsys.readouterr().err)
    assert "`hf upload me/mine out`" in message and uploads == []


@pytest.mark.slow
def test_a_refused_upload_keeps_the_files_and_says_how_to_go_on(run, monkeypatch, capsys):
    """The real client of the hub, and a server that refuses every token."""
    run_dir, _ = run

    class Refuse(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(401)
            self.end_headers()
            self.wfile.write(json.dumps({"error": "Invalid username or password."}).encode())

        def log_message(self, *_):
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_TOKEN", "hf_made_for_a_test")
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # tests may have met no hub
        assert main(["export", str(run_dir), "--push", "me/mine"]) == 2
        server.shutdown()
    message = capsys.readouterr().err
    assert "--push me/mine: the hub did not take the files" in message and "401" in message
    assert "hf upload me/mine" in message and "hf_made_for_a_test" not in message
    assert (run_dir / "export/step_000003/model.safetensors").is_file()
