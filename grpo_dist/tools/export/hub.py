"""The upload of an export to the Hugging Face hub. Its library reads HF_TOKEN, HF_ENDPOINT and the login."""

from __future__ import annotations

from pathlib import Path

from grpo_dist.errors import UserError
from grpo_dist.policy.full_weights import EXPORT_LIST


def check_push(repository: str) -> None:
    """Raise UserError where ``repository`` is no name of one, or there is no token."""
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
    """Upload an export and return its address. Raises UserError where the hub refuses or is not reached."""
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
