"""Uploads an exported folder to the Hugging Face hub, when asked to."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from spectrain.errors import UserError

NETWORK_ERROR = HfHubHTTPError.__bases__[0]  # of the HTTP library that this version of huggingface_hub stands on


def check_repository(name: object) -> None:
    """Raise UserError where a folder could not be uploaded under this name; ask nobody."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"push_to_hub={name} is no name of a repository; give <user>/<name>") from error
    if "/" not in str(name):
        raise UserError(f"push_to_hub={name} names no user; give <user>/{name}")
    if get_token() is None:
        raise UserError(
            f"push_to_hub={name} needs a token of the Hugging Face hub; give one with `hf auth login`, or as HF_TOKEN"
        )


def push(folder: Path, name: str, private: bool) -> str:
    """Upload a folder as one commit to <user>/<name>, with the user's token; return the address.

    A repository that does not exist is made, `private` or not. Raise UserError where the hub cannot be reached or
    refuses.
    """
    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="spectrain.export")
    except (NETWORK_ERROR, OSError) as error:  # what the hub answers, and what the network does
        line = (str(error).strip().splitlines() or ["no message"])[0]
        raise UserError(
            f"{folder} is exported, but could not be uploaded to {name} ({type(error).__name__}: {line}); try again "
            f"with `hf upload {name} {folder}`"
        ) from error
    return f"https://huggingface.co/{name}"
