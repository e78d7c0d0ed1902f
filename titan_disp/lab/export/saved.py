"""Loads models on a CPU: from a run's checkpoints, of any mesh and without the
optimizer, and from Hugging Face folders.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException

from titan_disp import safe_dcp
from titan_disp.data.tokenizer import AnyTokenizer, check_fits, tokenizer_of_export
from titan_disp.errors import CheckpointError, ConfigError, counted, reported
from titan_disp.lab.export.inventory import verify
from titan_disp.models.arguments import DispModelArgs, architecture_of, text_of_flavor
from titan_disp.models.decoder import DispModel
from titan_disp.models.hf import HfAdapter, check_weights, stored_weights
from titan_disp.models.registry import MODELS, ModelEntry, find_model, model_args
from titan_disp.run.identity import identity_changes, read_identity
from titan_disp.run.integrity import checkpoints, warn_without_hashes
from titan_disp.run.reader import is_run, read_config


@dataclass(frozen=True)
class SavedModel:
    """One checkpoint of a run, in DCP's format or safetensors
    (``checkpoint.last_save_in_hf``).
    """

    run: Path  # job.dump_folder
    step: int
    folder: Path
    config: dict[str, Any]  # the resolved config, from config.json

    @property
    def name(self) -> str:
        return f"{self.run.resolve().name}/step-{self.step}"

    @property
    def in_hf_format(self) -> bool:
        return not (self.folder / safe_dcp.METADATA).is_file()

    @property
    def entry(self) -> ModelEntry:
        return find_model(self.config["model"]["name"])

    def model_args(self) -> DispModelArgs:
        """Return the flavor's arguments with model.overrides and the run's sequence
        length.
        """
        model = self.config["model"]
        args = model_args(model["name"], model["flavor"], model["overrides"])
        args.max_seq_len = self.config["training"]["seq_len"]
        return args

    def adapter(self) -> HfAdapter:
        return self.entry.adapter(self.model_args(), None)

    @property
    def flavor(self) -> str:
        """The flavor and its overrides, as text."""
        return text_of_flavor(
            self.config["model"]["flavor"], self.config["model"]["overrides"]
        )

    def tokenizer_folder(self, override: str | Path | None = None) -> Path:
        """Return the folder of the tokenizer: ``override`` or ``model.hf_assets_path``.

        A relative ``model.hf_assets_path`` is tried from the current folder, from the
        run's folder, and from the folders above the run's folder, because a run is
        usually started in one of these folders. Raises ConfigError if the tokenizer's
        folder does not exist.
        """
        folder = Path(override or self.config["model"]["hf_assets_path"])
        run = self.run.resolve()
        candidates = [folder]
        if not override:
            candidates += [start / folder for start in (run, *run.parents)]
        for candidate in candidates:
            if candidate.is_dir():
                return candidate
        raise ConfigError(
            f"{self.name}: the tokenizer's folder {str(folder)!r} does not exist "
            "here; run this command where the training was started, or name the "
            "folder with --tokenizer DIR"
        )

    def tokenizer(self, override: str | Path | None = None) -> AnyTokenizer:
        """Return the tokenizer that the run trained with, or the tokenizer in the
        folder ``override``.

        The EOS token is the run's separator, or the tokenizer's own EOS if the run had
        no separator. Raises ConfigError if the tokenizer does not fit the model's
        vocabulary.
        """
        folder = self.tokenizer_folder(override)
        separator = self.config["stream"].get("separator", "")  # not in older runs
        tokenizer = tokenizer_of_export(folder, separator)
        args = self.model_args()
        advice = "it is not the tokenizer of this run"
        check_fits(
            tokenizer.get_vocab_size(),
            folder,
            args.vocab_size,
            model=self.name,
            advice=advice,
        )
        return tokenizer


def saved_models(run: str | Path) -> list[SavedModel]:
    """Return all complete checkpoints of a run, at least one, by ascending step.

    Step 0 (``checkpoint.create_seed_checkpoint``) is included. Raises ConfigError if
    there is no checkpoint, or ``run`` is not a run's folder.
    """
    run = Path(run)
    if not is_run(run):
        problem = "does not exist"
        if run.exists():
            problem = "is not a run's folder (with config.json and metrics.jsonl)"
        raise ConfigError(
            f"{str(run)!r} {problem}; expected a run's job.dump_folder, or RUN/STEP "
            "for a checkpoint"
        )
    config = read_config(run)
    if (name := config.get("model", {}).get("name")) not in MODELS:
        expected = " or ".join(MODELS)
        raise ConfigError(
            f"{str(run)!r} trained the model {name!r}, expected {expected}"
        )
    folder = run / config["checkpoint"]["folder"]
    steps = checkpoints(folder, hugging_face=True)
    saved = [SavedModel(run, step, folder / f"step-{step}", config) for step in steps]
    if not saved:
        raise ConfigError(
            f"{str(folder)!r} holds no complete checkpoint: wait for one, or set "
            "checkpoint.enable"
        )
    return saved


def find_saved(target: str | Path) -> SavedModel:
    """Return the checkpoint that ``target`` names: ``RUN/300``, ``RUN/step-300`` or
    ``RUN/checkpoint/step-300``, or ``RUN`` for the newest checkpoint.

    Raises ConfigError if the run or the step does not exist.
    """
    path = Path(target)
    matched = re.fullmatch(r"(?:step-)?(\d+)", path.name)
    if is_run(path) or not matched:
        return saved_models(path)[-1]
    run = next((p for p in (path.parent, path.parent.parent) if is_run(p)), path.parent)
    by_step = {saved.step: saved for saved in saved_models(run)}
    step = int(matched.group(1))
    if step not in by_step:
        raise ConfigError(
            f"{str(run)!r} has no checkpoint of step {step}; it has "
            f"{', '.join(map(str, by_step))}"
        )
    return by_step[step]


def load_weights(saved: SavedModel) -> dict[str, torch.Tensor]:
    """Return the weights by the model's names, in float32 on the CPU.

    A tied ``output.weight`` is left out. Raises CheckpointError, or ConfigError for
    safetensors, if the checkpoint is damaged or holds another model than the config
    describes.
    """
    if saved.in_hf_format:
        weights = _load_hugging_face(saved)
    else:
        weights = _load_dcp(saved)
    if saved.model_args().enable_weight_tying:
        weights.pop("output.weight", None)
    return weights


def _load_hugging_face(saved: SavedModel) -> dict[str, torch.Tensor]:
    adapter = saved.adapter()
    where = f"the checkpoint {str(saved.folder)!r}"
    check_weights(stored_weights(saved.folder, adapter, where), adapter, where)
    hf: dict[str, torch.Tensor] = {}
    for file in sorted(saved.folder.glob("*.safetensors")):
        hf |= load_file(file)
    return {name: weight.float() for name, weight in adapter.from_hf(hf).items()}


def _load_dcp(saved: SavedModel) -> dict[str, torch.Tensor]:
    if reason := verify(saved.folder):
        raise CheckpointError(
            f"the checkpoint {str(saved.folder)!r} cannot be read: {reason}"
        )
    warn_without_hashes(saved.folder)
    args = saved.model_args()
    with torch.device("meta"):
        wanted = saved.entry.model_cls(args).state_dict()
    if args.enable_weight_tying:
        wanted.pop("output.weight")
    saved_identity = read_identity(str(saved.folder))
    if changed := identity_changes(saved_identity, architecture_of(args)):
        raise CheckpointError(
            "config.json of the run does not belong to the checkpoint "
            f"{str(saved.folder)!r}: {'; '.join(changed)}. A later start with another "
            "config has replaced config.json: restore model.flavor and model.overrides "
            "in it"
        )
    in_checkpoint = safe_dcp.read_metadata(saved.folder).state_dict_metadata
    if missing := sorted(wanted.keys() - in_checkpoint.keys()):
        raise CheckpointError(
            f"the checkpoint {str(saved.folder)!r} holds no model of flavor "
            f"{saved.flavor!r}: it lacks {len(missing)} of {len(wanted)} weights, such "
            f"as {missing[0]!r}"
        )
    weights = {}
    for name, like in wanted.items():
        if (size := in_checkpoint[name].size) != like.shape:  # type: ignore[union-attr]
            raise CheckpointError(
                f"the checkpoint {str(saved.folder)!r} has {name} of shape {tuple(size)}, expected "
                f"{tuple(like.shape)} for flavor {saved.flavor!r}"
            )
        weights[name] = torch.empty(like.shape, dtype=torch.float32)
    try:
        safe_dcp.load(weights, saved.folder, no_dist=True)
    # CheckpointException derives from BaseException, not from Exception
    except (Exception, CheckpointException) as error:
        reason = " ".join(str(error).split())[-400:]
        raise CheckpointError(
            f"the checkpoint {str(saved.folder)!r} cannot be read: {reason}"
        ) from error
    return weights


def load_model(saved: SavedModel) -> DispModel:
    """Return the model in float32 on the CPU, in eval mode.

    Raises the errors of ``load_weights``.
    """
    with torch.device("meta"):
        model = saved.entry.model_cls(saved.model_args())
    model.to_empty(device="cpu")
    model.tie_weights()
    model.init_buffers(torch.device("cpu"))
    # not strict: the weights lack a tied output.weight
    model.load_state_dict(load_weights(saved), strict=False)
    return model.eval()


def load_causal_lm(
    folder: str | Path,
    dtype: str = "float32",
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Return the ``AutoModelForCausalLM`` of a local folder, in eval mode.

    Raises ConfigError if the model cannot be loaded, or if weights are missing, which
    transformers would initialize randomly.

    Args:
        dtype: "float32", "bfloat16", "float16", or "auto" for the dtype of the files.
        device_map: "auto" spreads the blocks over all GPUs (accelerate); None loads the
            model on the CPU.
        trust_remote_code: whether Python files of the folder may run if transformers
            does not know the model.
    """
    from transformers import AutoModelForCausalLM  # the import takes seconds

    with reported(f"transformers cannot load the model {str(folder)!r}", Exception):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        lacks = f"it lacks {counted(len(missing), 'weight')}, such as {missing[0]!r}"
        raise ConfigError(
            f"{str(folder)!r} holds an incomplete causal language model: {lacks}"
        )
    return model.eval()


def longest_sequence(config: Any) -> int | None:
    """Return the largest number of tokens that a transformers model reads, or None if
    its config has no ``max_position_embeddings``.

    For an exported GPT-2, this is the sequence length of training, which may be smaller
    than the number of positions.
    """
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions is None:
        return None
    return min(positions, getattr(config, "trained_seq_len", positions))
