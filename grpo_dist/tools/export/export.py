"""Writes a checkpoint as a transformers directory: to a temporary directory, then verified, then renamed.

The log-probs of a fixed text from the written files in transformers are compared on the host with the
log-probs of the model loaded from the checkpoint:

    weights as trained             max |difference| <= 1e-3 nats. The same weights give the same numbers;
                                   adapters merged in float32 add the same products in another order.
    rounded weights                mean |difference| <= 0.1 nats: another dtype than the run's, and
                                   adapters merged in bfloat16. Each weight keeps 8 significant bits, which
                                   moves log-probs by hundredths of a nat; a wrong weight moves them by nats.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_dist.config import Config
from grpo_dist.config.files import load_recorded
from grpo_dist.errors import RunEnded, UserError, as_user_errors, expanded
from grpo_dist.policy.full_weights import EXPORT_LIST, add_file, is_export_from, record_origin
from grpo_dist.policy.lora import find_base_model
from grpo_dist.policy.model import load_causal_lm
from grpo_dist.policy.text_model import find_wrapper, read_wrapper_type
from grpo_dist.runs.checkpoint import CHECKPOINTS, MANIFEST, list_checkpoints, step_of
from grpo_dist.runs.model_card import CARD, model_card
from grpo_dist.runs.models import load_tokenizer, starting_model
from grpo_dist.runs.run_directory import MODEL
from grpo_dist.runs.run_weights import find_checkpoint, load_weights, write_loaded
from grpo_dist.runtime.files import publish, read_json
from grpo_dist.runtime.model_files import ADAPTER_CONFIG, fingerprint, is_checkpoint, split_reference
from grpo_dist.runtime.stage_log import stage

_TEXT = "The sum of 127 and 385 is 512, because 7 + 5 = 12 carries 1, and 1 + 2 + 8 = 11 carries 1 again."
_SAME_MAX, _ROUNDED_MEAN = 1e-3, 0.1  # nats


def export(
    run: str,
    say: Callable[[str], None],
    *,
    out: Path | None = None,
    dtype: str | None = None,
    adapter: bool = False,
    push: str | None = None,
) -> Path:
    """Write a checkpoint of ``run`` to ``out`` and return that directory. ``run``: RUN@STEP, or a run
    directory for its newest undamaged checkpoint.

    Args:
        out: None: `export/step_000020` or the like in the run's directory.
        dtype: None: the training dtype.
        adapter: write only the LoRA adapter; else it is merged.
        push: hub repository to upload to.

    Raises:
        UserError: invalid input, before anything is written; or the upload fails.
        RunEnded: the files' log-probs differ from the checkpoint's. The files are removed.
    """
    with as_user_errors():
        if push:
            check_push(push)
        checkpoint = _find_checkpoint(run, say)
        run_dir, step = checkpoint.parents[1], step_of(checkpoint)
        with _deletion_explained([checkpoint]):
            config = load_recorded(checkpoint / "config.yaml")
            origin = {"checkpoint": fingerprint(checkpoint / MANIFEST), "dtype": dtype, "adapter": adapter}
        if adapter and config.policy.lora is None:
            raise UserError(f"--adapter: {run_dir} trained all weights (no `policy.lora`); leave it out")
        name = checkpoint.name + ("_adapter" if adapter else "") + (f"_{dtype}" if dtype else "")
        out = out or run_dir / "export" / name
        if push and is_export_from(out, origin):
            say(f"{out}: step {step} of {run_dir}, exported before")
        else:
            _check_free(out, push)
            with stage("model", "with which the run began"):
                base = starting_model(config, run_dir, say)
            out.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
                target = Path(folder) / "model"
                with _deletion_explained([checkpoint]):
                    measured = _write(config, base, checkpoint, target, dtype, adapter=adapter)
                add_file(target, CARD, model_card(config, run_dir, step, adapter=adapter))
                record_origin(target, origin)
                publish(target, out)
            say(f"{out}: step {step} of {run_dir}; {measured}")
        adapted = read_json(out / ADAPTER_CONFIG)["base_model_name_or_path"] if adapter else ""
        if Path(adapted).is_absolute():  # not a hub model
            say(
                f"note: the base model of the adapter is {adapted}, on this machine alone; without --adapter "
                "the export needs no other files"
            )
    if push:
        with stage("upload", f"to {push}"):
            say(upload(out, push, f"Step {step} of {config.name}"))
    return out


@contextmanager
def _deletion_explained(checkpoints: Sequence[Path]) -> Iterator[None]:
    """Raise UserError if the block fails because the run deleted one of ``checkpoints``."""
    try:
        yield
    except (OSError, ValueError) as error:
        if not (deleted := [checkpoint for checkpoint in checkpoints if not checkpoint.is_dir()]):
            raise
        raise UserError(
            f"{deleted[-1]}: the run deleted it meanwhile (`checkpoint.keep`); export a newer step"
        ) from error


def _find_checkpoint(run: str, say: Callable[[str], None]) -> Path:
    """Return the checkpoint. Raises ValueError."""
    run_dir, named = split_reference(run) if is_checkpoint(run) else (expanded(run), "latest")
    if not (run_dir / "config.yaml").is_file() and not (run_dir / CHECKPOINTS).is_dir():
        raise ValueError(f"{run_dir}: no run directory (no config.yaml); expected one such as runs/demo")
    if not (checkpoints := list_checkpoints(run_dir / CHECKPOINTS)):
        has_model = (run_dir / MODEL / "config.json").is_file()
        hint = f"; its trained model is in {run_dir / MODEL}" if has_model else "; train on, and it saves one"
        raise ValueError(f"{run_dir}: no checkpoint in {run_dir / CHECKPOINTS}{hint}")
    with _deletion_explained([c for c in checkpoints if named == "latest" or step_of(c) == int(named)]):
        return find_checkpoint(f"{run_dir}@{named}", say)


def _check_free(out: Path, push: str | None) -> None:
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"{out}: a file or link; name a new directory with --out")
    if out.is_dir() and any(out.iterdir()):
        upload_it = f"; to upload what it holds: `hf upload {push} {out}`" if push else ""
        raise UserError(
            f"{out}: the directory is not empty; name a new one with --out, or remove it{upload_it}"
        )


def _write(
    config: Config, base: Path, checkpoint: Path, directory: Path, dtype: str | None, *, adapter: bool
) -> str:
    """Write the files and describe their log-prob difference. Raises RunEnded if it is too large."""
    trusted = config.model.trust_remote_code
    ids = torch.tensor([load_tokenizer(base, trusted)(_TEXT, add_special_tokens=False).input_ids])
    with stage("checkpoint", f"{checkpoint} is read"):
        model = load_weights(config, base, checkpoint)
        trained = model.dtype
        expected = text_logprobs(model, ids)
    if dtype is not None and (target_dtype := getattr(torch, dtype)) != trained:
        del model
        with stage("checkpoint", f"is read as {dtype}"):
            model = load_weights(config, base, checkpoint, target_dtype)
    with stage("export", "the model is written"):
        write_loaded(model, config, base, directory, adapter_alone=adapter)
    written = model.dtype
    del model
    with stage("log-probs", "of the written files are compared with the checkpoint's"):
        loaded = _load(directory, base, written, trusted, adapter=adapter)
        difference = (text_logprobs(loaded, ids) - expected).abs()
    is_merged = config.policy.lora is not None and not adapter
    rounds = trained != written or (is_merged and written != torch.float32)
    return _describe_difference(difference, rounds=rounds)


def _load(directory: Path, base: Path, dtype: torch.dtype, trusted: bool, *, adapter: bool) -> Any:
    """Load the model in ``directory`` by transformers, with its adapter by peft."""
    wrapper = find_wrapper(base)
    whole = Path(wrapper[0] if wrapper else find_base_model(base)) if adapter else directory
    if read_wrapper_type(base):
        from transformers import AutoModelForImageTextToText  # slow to import

        loaded: Any = AutoModelForImageTextToText.from_pretrained(whole, dtype=dtype)
    else:
        loaded = load_causal_lm(str(whole), dtype=dtype, attention="auto", trust_remote_code=trusted)
    if adapter:
        from peft import PeftModel  # slow to import

        # Keeps the training dtype: peft's default is float32.
        loaded = PeftModel.from_pretrained(loaded, str(directory), autocast_adapter_dtype=False)
    return loaded.eval()


def text_logprobs(model: Any, ids: Tensor) -> Float[Tensor, " T-1"]:
    """Return the model's log-probs of the tokens ``ids``, int64 [1, T], except the first."""
    with torch.inference_mode():
        logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0]


def _describe_difference(difference: Tensor, *, rounds: bool) -> str:
    """Describe the ``difference`` of log-probs in nats. ``rounds``: the export rounded the weights.
    Raises RunEnded if it exceeds the bound.
    """
    value, bound = (
        (float(difference.mean()), _ROUNDED_MEAN) if rounds else (float(difference.max()), _SAME_MAX)
    )
    what = f"{'mean' if rounds else 'largest'} difference of log-probs from the checkpoint {value:.2g} nats"
    if not value <= bound:
        raise RunEnded(
            f"export: {what} on {len(difference)} tokens, above {bound:g}: the files are not the model of "
            "the checkpoint, and are removed. Please report this with the model's name"
        )
    return f"{what} (bound {bound:g})"


# The Hugging Face hub, whose library reads HF_TOKEN, HF_ENDPOINT and the login.


def check_push(repository: str) -> None:
    """Raise UserError if ``repository`` is not a valid name or no token is set."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
        is_name = repository.count("/") == 1
    except HFValidationError:
        is_name = False
    if not is_name:
        raise UserError(f"--push {repository}: no repository's name; expected USER/REPO, e.g. me/my-model")
    if get_token() is None:
        raise UserError(
            f"--push {repository}: no token for the hub; set HF_TOKEN to one that may write, or run "
            "`hf auth login`"
        )


def upload(directory: Path, repository: str, message: str) -> str:
    """Upload an export and return its address. Raises UserError if the hub refuses it or is unreachable."""
    from huggingface_hub import HfApi  # slow to import
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=directory,
            commit_message=message,
            ignore_patterns=[EXPORT_LIST],
        )
    except (OSError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"--push {repository}: the hub did not take the files ({reason}); {directory} has them: check "
            f"token, name and network, then `hf upload {repository} {directory}`"
        ) from error
    return f"{api.endpoint}/{repository}"
