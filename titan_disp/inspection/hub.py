"""Models of the Hugging Face hub by their ids: downloaded, or taken from the local cache where the hub does not answer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_disp.errors import ConfigError

WANTED = ("*.json", "*.txt", "*.model", "*.jinja", "*.safetensors")  # config, tokenizer, weights
CODE = "*.py"
PICKLES = "pytorch_model*.bin"  # of models that were never converted to safetensors
_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubModel:
    """``MODEL@REVISION``: an id such as gpt2 or Qwen/Qwen3-0.6B, and a branch, tag or commit; without one, main."""

    id: str
    revision: str | None

    def patterns(self, code: bool) -> list[str]:
        return [*WANTED, *([CODE] if code else [])]

    def command(self, code: bool, more: Sequence[str] = ()) -> str:
        """What to type where there is internet, to have the model in the cache; ``more``: patterns of further files."""
        revision = "" if self.revision is None else f"revision={self.revision!r}, "
        call = f"snapshot_download({self.id!r}, {revision}allow_patterns={[*self.patterns(code), *more]})"
        return f'python -c "from huggingface_hub import snapshot_download; {call}"'


def parse_id(name: str) -> HubModel | None:
    """None where the name cannot be an id of the hub, such as an absolute path."""
    matched = _ID.fullmatch(name)
    return None if matched is None else HubModel(matched["id"], matched["revision"])


def find_snapshot(model: HubModel, code: bool) -> Path:
    """The model's folder in the cache of huggingface_hub, as up to date as the hub says, if it answers.

    Args:
        code: fetch the repository's Python files, too.

    Raises:
        ConfigError: no such model or revision, no access to it, or no hub and not in the cache: with the command that fetches it.
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
            f"{model.id!r} is no folder here, and as a model of the Hugging Face hub it is not in the cache, or not all of it, "
            "while the hub does not answer. Where there is internet, with HF_HOME on a disk that this machine sees:\n  "
            + model.command(code)
        ) from error
    except GatedRepoError as error:
        raise ConfigError(
            f"the hub asks for permission to download {model.id!r}: ask for it at https://huggingface.co/{model.id}, then "
            "log in (huggingface-cli login, or HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{model.id!r} has no revision {model.revision!r} on the Hugging Face hub") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{model.id!r} does not exist, neither as a folder here nor on the Hugging Face hub (or it is private: HF_TOKEN)"
        ) from error
    except Exception as error:  # of requests, httpx or httpx2, by the hub's version; or a full disk
        raise ConfigError(f"{model.id!r} cannot be fetched from the Hugging Face hub: {error}") from error
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{model.id!r} has no config.json on the Hugging Face hub: it is no model for transformers")
    return folder
