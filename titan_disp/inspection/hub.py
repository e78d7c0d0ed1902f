"""This module finds models of the Hugging Face hub by their ids. It uses the local cache if the hub does not answer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_disp.errors import ConfigError

WANTED = ("*.json", "*.txt", "*.model", "*.jinja", "*.safetensors")  # config, tokenizer, weights
CODE = "*.py"
PICKLES = "pytorch_model*.bin"  # weights of models that were never converted to safetensors
_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubModel:
    """``MODEL@REVISION``: an id such as gpt2 or Qwen/Qwen3-0.6B, and a branch, tag or commit. None means main."""

    id: str
    revision: str | None

    def patterns(self, code: bool) -> list[str]:
        """Return the patterns of files to download. ``code`` adds Python files."""
        return [*WANTED, *([CODE] if code else [])]

    def command(self, code: bool, more: Sequence[str] = ()) -> str:
        """Return the command that downloads the model to the cache. ``more`` has patterns of further files."""
        revision = "" if self.revision is None else f"revision={self.revision!r}, "
        call = f"snapshot_download({self.id!r}, {revision}allow_patterns={[*self.patterns(code), *more]})"
        return f'python -c "from huggingface_hub import snapshot_download; {call}"'


def parse_id(name: str) -> HubModel | None:
    """Parse an id of the hub. Returns None for a name that cannot be one, such as an absolute path."""
    matched = _ID.fullmatch(name)
    return None if matched is None else HubModel(matched["id"], matched["revision"])


def find_snapshot(model: HubModel, code: bool) -> Path:
    """Return the model's folder in the cache of huggingface_hub. It is updated if the hub answers.

    Args:
        model: the model.
        code: whether to download the repository's Python files, too.

    Raises:
        ConfigError: The model or revision does not exist, access is denied, or the hub does not answer and the cache
            does not have the model. In this case, the message has the command that downloads it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def download(patterns: list[str]) -> Path:
        return Path(snapshot_download(model.id, revision=model.revision, allow_patterns=patterns))

    try:
        folder = download(model.patterns(code))
        if not any(folder.glob("*.safetensors")) and (folder / "config.json").is_file():
            folder = download([*model.patterns(code), PICKLES])
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{model.id!r} is not a folder here. As a model of the Hugging Face hub, it is missing or incomplete in "
            "the cache, and the hub does not answer. Run this command on a machine with internet access, with HF_HOME "
            "on a disk that this machine sees:\n  " + model.command(code)
        ) from error
    except GatedRepoError as error:
        raise ConfigError(
            f"the hub requires permission to download {model.id!r}: request access at "
            f"https://huggingface.co/{model.id}, then log in (hf auth login, or HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{model.id!r} has no revision {model.revision!r} on the Hugging Face hub") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{model.id!r} does not exist as a folder here or on the Hugging Face hub (a private model needs HF_TOKEN)"
        ) from error
    except Exception as error:  # of requests, httpx or httpx2, by the version of huggingface_hub; or a full disk
        raise ConfigError(f"{model.id!r} cannot be fetched from the Hugging Face hub: {error}") from error
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{model.id!r} has no config.json on the Hugging Face hub: transformers cannot load it")
    return folder
