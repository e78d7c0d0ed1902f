"""Finds and loads models to measure: checkpoints of runs, and Hugging Face models in
folders and on the hub.

Activations are passed on one layer at a time, while the model runs.
``output_hidden_states=True`` of transformers would keep the activations of all layers
until the end of the forward pass. For a 32B model with 64 blocks of width 5120 and 8
sequences of 512 tokens in float32, all layers take 5.5 GB, and one layer takes 84 MB.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import errors, snapshot_download
from torch import Tensor, nn
from torch.nn.functional import pad
from torchtitan.components.tokenizer import BaseTokenizer

from titan_disp.data.tokenizer import check_fits, load_tokenizer
from titan_disp.dispersion.hooks import collect, outermost_lists
from titan_disp.errors import ConfigError, counted, reported
from titan_disp.lab.export.saved import (
    SavedModel,
    find_saved,
    load_causal_lm,
    load_model,
    load_weights,
    longest_sequence,
    saved_models,
)
from titan_disp.models.hf import INDEX
from titan_disp.run.reader import is_run

# files to download: config, tokenizer, weights
WANTED = ("*.json", "*.txt", "*.model", "*.jinja", "*.safetensors")
# weights of models that were never converted to safetensors
PICKLES = "pytorch_model*.bin"
# errors that a JSON file with unexpected content can cause
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")
CHUNK = 8192  # rows of an output layer that are converted to float64 at a time
Consume = Callable[[int, Tensor], None]
"""A function of (layer, z) that gets a layer's activations [B, N, F] on the model's
device. The function must not keep the activations.
"""
Encode = Callable[[str], list[int]]
Device = torch.device | Literal["auto"]
"""With "auto", accelerate spreads a Hugging Face model over all GPUs, and a run's model
uses the first GPU. Without GPUs, the CPU is used.
"""


def find_device(name: str, dtype: torch.dtype = torch.float32) -> torch.device:
    """Return the device named by --device.

    Raises ConfigError if this machine does not have the device, or the device does not
    support ``dtype``.
    """
    try:
        torch.empty(1, dtype=dtype, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"--device {name!r} cannot be used here: {str(error).splitlines()[0]}"
        ) from error


def parse_group(text: str) -> tuple[str, list[str]] | None:
    """Return (NAME, [A, B, C]) for ``NAME=A,B,C``.

    Returns None for a text without "=", an existing path, or RUN/STEP. Raises
    ConfigError if the name or a member is empty, or a member is repeated.
    """
    path = Path(text)
    if "=" not in text or path.exists() or _names_step(path):
        return None
    name, _, rest = text.partition("=")
    members = rest.split(",")
    if not name or not all(members) or len(set(members)) < len(members):
        raise ConfigError(
            f"{text!r} is not a group; expected NAME=A,B,C with a name, and each "
            "member once"
        )
    return name, members


def _names_step(path: Path) -> bool:
    """Return whether a path is RUN/STEP, with or without the folder of checkpoints."""
    has_number = re.fullmatch(r"(step-)?\d+", path.name)
    return bool(has_number) and any(map(is_run, path.parents[:2]))


@dataclass(frozen=True)
class HubModel:
    """A model on the Hugging Face hub, which the user names as ``MODEL@REVISION``."""

    id: str  # such as gpt2 or Qwen/Qwen3-0.6B
    revision: str | None  # branch, tag or commit; None means main

    def patterns(self, code: bool) -> list[str]:
        """Return patterns of the files to download; with ``code``, also Python files."""
        if code:
            return [*WANTED, "*.py"]
        return [*WANTED]

    def command(self, code: bool, more: Sequence[str] = ()) -> str:
        """Return the shell command that downloads the model to the cache.

        ``more`` are patterns of further files.
        """
        arguments = [repr(self.id)]
        if self.revision is not None:
            arguments.append(f"revision={self.revision!r}")
        arguments.append(f"allow_patterns={[*self.patterns(code), *more]}")
        call = f"snapshot_download({', '.join(arguments)})"
        return f'python -c "from huggingface_hub import snapshot_download; {call}"'


def parse_id(name: str) -> HubModel | None:
    """Return the model that ``MODEL`` or ``MODEL@REVISION`` names, or None for a text
    that cannot be an id of the hub, such as an absolute path.
    """
    if (matched := _ID.fullmatch(name)) is None:
        return None
    return HubModel(matched["id"], matched["revision"])


def find_snapshot(model: HubModel, code: bool) -> Path:
    """Return the model's folder in the cache, after downloading what is missing.

    With ``code``, the folder includes Python files. If the hub does not answer, the
    cache is used as it is. Raises ConfigError if the model cannot be found.
    """
    download = partial(snapshot_download, model.id, revision=model.revision)
    patterns = model.patterns(code)
    try:
        folder = Path(download(allow_patterns=patterns))
        if not any(folder.glob("*.safetensors")) and (folder / "config.json").is_file():
            folder = Path(download(allow_patterns=[*patterns, PICKLES]))
    except Exception as error:
        messages = {
            errors.LocalEntryNotFoundError: f"{model.id!r} is not a folder here. As a model of the Hugging Face hub, it is "
            "missing or incomplete in the cache, and the hub does not answer. Run "
            "this command on a machine with internet access, with HF_HOME on a disk "
            f"that this machine sees:\n  {model.command(code)}",
            errors.GatedRepoError: f"the hub requires permission to download {model.id!r}: request access at "
            f"https://huggingface.co/{model.id}, then log in (hf auth login, or HF_TOKEN)",
            errors.RevisionNotFoundError: f"{model.id!r} has no revision {model.revision!r} on the Hugging Face hub",
            errors.RepositoryNotFoundError: f"{model.id!r} does not exist as a folder here or on the Hugging Face hub (a "
            "private model needs HF_TOKEN)",
            # an error of the disk, or of requests or httpx (depending on
            # huggingface_hub)
            Exception: f"{model.id!r} cannot be fetched from the Hugging Face hub: {error}",
        }
        message = next(
            message
            for error_class, message in messages.items()
            if isinstance(error, error_class)
        )
        raise ConfigError(message) from error
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{model.id!r} has no config.json on the Hugging Face hub: transformers "
            "cannot load it"
        )
    return folder


def logits_root(head: Any) -> Tensor:
    """Return R with R Rᵀ = [W b]ᵀ[W b], [F + 1, F + 1] float64, for the output layer
    ``head`` with weight W and bias b.

    [h, 1] R has the lengths and angles of the logits W h + b, but only F + 1 features.
    Raises ConfigError if ``head`` is not a linear layer in memory.
    """
    if not isinstance(head, nn.Linear) or head.weight.is_meta:
        raise ConfigError(
            "--logits needs an output layer that is linear and in memory; this model has "
            "none"
        )
    rows = head.weight
    if head.bias is not None:
        rows = torch.cat([head.weight, head.bias[:, None]], 1)
    chunks = (
        pad(chunk.double(), (0, head.in_features + 1 - chunk.shape[1]))
        for chunk in rows.split(CHUNK)
    )
    values, vectors = torch.linalg.eigh(sum(chunk.T @ chunk for chunk in chunks))
    return vectors * values.clamp_min(0).sqrt()


def draw_weights(model: Any, seed: int) -> None:
    """Replace the weights of a model by random initial weights."""
    for part in (*model.modules(), *model.parameters(), *model.buffers()):
        # Otherwise, transformers would keep the weights that it has loaded.
        part._is_hf_initialized = False
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.init_weights()


class LoadedModel:
    """A model in eval mode that passes on the activations of its layers in order.

    Layer 0 is the input of the first block (the embedding), layer i + 1 is the output
    of block i, and the last layer is the output of the final norm. (The
    ``hidden_states`` of transformers lack the output of the last block.)

    Attributes:
        forward: maps [B, N] token ids to the output of the final norm, and runs
            ``blocks`` in order.
        head: output layer, or None. Only its weights may be used, because the output
            layer of a run's model then returns its input.
        untrain: replaces the weights by initial weights, drawn from a seed.
        layer_count: number of blocks + 2.
        parameters: number of parameters; a tied embedding counts once.
        device: where token ids are sent.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[Tensor], Tensor],
        blocks: Sequence[nn.Module],
    ) -> None:
        self.forward = forward
        self.blocks = blocks
        self.head: Any = None
        self.untrain: Callable[[int], None] = partial(draw_weights, model)
        self.layer_count = len(blocks) + 2
        self.parameters = _weights(model)
        self.device = next(model.parameters()).device
        if self.device.type == "meta":
            # accelerate has offloaded the weights, and moves token ids itself.
            self.device = torch.device("cpu")

    def __call__(self, tokens: Tensor, consume: Consume) -> None:
        """Run the model on [B, N] token ids, and call ``consume`` for each layer.

        The caller turns gradients off. Raises ConfigError unless activations are [B, N,
        F]. (In XLNet, activations are [N, B, F].)
        """

        def take(layer: int, h: Tensor) -> None:
            if h.ndim != 3 or h.shape[:2] != tokens.shape:
                raise ConfigError(
                    f"layer {layer} has the shape {list(h.shape)} for "
                    f"{list(tokens.shape)} tokens, expected [sequences, tokens, "
                    "features]: models of this kind cannot be measured"
                )
            consume(layer, h)

        def take_embedding(
            block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> None:
            if args:
                take(0, args[0])
            else:
                take(0, kwargs["hidden_states"])

        first_block, *_ = self.blocks
        with (
            first_block.register_forward_pre_hook(take_embedding, with_kwargs=True),
            collect(dict(enumerate(self.blocks, start=1)), take),
        ):
            normed = self.forward(tokens.to(self.device))
        take(self.layer_count - 1, normed)


def find_blocks(body: nn.Module, count: int) -> list[nn.Module]:
    """Return the blocks of a transformers model: an outermost list of ``count``
    modules.

    If there are several such lists, the list with the most weights is returned. Raises
    ConfigError if there is none.
    """
    lists = outermost_lists(body, lambda modules: len(modules) == count)
    if not lists:
        raise ConfigError(
            f"{type(body).__name__} has no list of its {count} layers: it cannot be "
            "measured"
        )
    candidates = (list(modules.values()) for modules in lists.values())
    return max(candidates, key=lambda blocks: sum(map(_weights, blocks)))


def _weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def hugging_face_layers(model: Any) -> LoadedModel:
    """Return an ``AutoModelForCausalLM`` as a model to measure.

    The output layer is not run, because its N × V logits are not needed.
    """
    body = model.base_model
    config = model.config.get_text_config()
    layers = LoadedModel(
        model,
        lambda tokens: body(tokens, use_cache=False)[0],
        find_blocks(body, config.num_hidden_layers),
    )
    # Models such as Gemma 2 limit the logits, which are then not linear.
    softcapping = getattr(config, "final_logit_softcapping", None)
    if not softcapping:
        layers.head = model.get_output_embeddings()
    return layers


@dataclass(frozen=True)
class SpecialTokens:
    """The tokens that a tokenizer puts before and after a text by default."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Target:
    """A model whose weights are not loaded yet, and its tokenizer.

    Attributes:
        path: the folder of the run or the model, or the id on the hub. Output files get
            their names from this path.
        max_tokens: tokens in the longest sequence; None means any number.
        encode: maps text to token ids without special tokens.
        special_tokens: the tokens that the tokenizer adds by default; for a run, the
            BOS token, if there is one.
        load: maps (device, dtype) to the model, with dtypes as for ``load_causal_lm``.
            Raises ConfigError if weights are missing, or the blocks cannot be found.
        run, step: the run's folder and the step, for a checkpoint.
        revision: revision of a model on the hub, if the user named one.
        called: the names that the user typed for this model.
    """

    folder: Path
    path: Path
    max_tokens: int | None
    vocab_size: int
    encode: Encode
    special_tokens: SpecialTokens
    load: Callable[[Device, str], LoadedModel]
    run: Path | None = None
    step: int | None = None
    revision: str | None = None
    called: tuple[str, ...] = ()


def find_targets(
    names: Sequence[str],
    all_steps: bool,
    tokenizer: Path | None,
    trust_remote_code: bool = False,
) -> dict[str, Target]:
    """Return targets by unique names, from which output files get their names.

    Args:
        names: each one is RUN (the newest checkpoint, or all checkpoints with
            ``all_steps``), RUN/STEP, a Hugging Face folder, or MODEL or MODEL@REVISION
            of the Hugging Face hub. A repeated model counts once, at its first place.
        tokenizer: folder that replaces the tokenizers of all models.

    Raises ConfigError if a name is not a model, or a tokenizer does not fit.
    """
    if not names:
        raise ConfigError(
            "no target is given; expected a run's folder (job.dump_folder) or Hugging "
            "Face model"
        )
    if all_steps and not any(is_run(name) for name in names):
        raise ConfigError(
            "--all-steps needs a run's folder (job.dump_folder); found "
            f"{', '.join(names)}"
        )
    by_folder: dict[Path, Target] = {}
    for name in names:
        for target in _targets_of(name, all_steps, tokenizer, trust_remote_code):
            folder = target.folder.resolve()
            target = by_folder.get(folder, target)
            called = dict.fromkeys([*target.called, name])
            by_folder[folder] = replace(target, called=tuple(called))
    targets = by_folder.values()
    return dict(zip(_file_names(targets), targets, strict=True))


def _targets_of(
    name: str, all_steps: bool, tokenizer: Path | None, trust_remote_code: bool
) -> list[Target]:
    path = Path(name)
    if (path / "config.json").is_file() and not is_run(path):
        return [_hugging_face_target(path, None, tokenizer, trust_remote_code)]
    model = None
    if not path.exists() and not _names_step(path):
        model = parse_id(name)
    if model is not None:
        folder = find_snapshot(model, trust_remote_code)
        return [_hugging_face_target(folder, model, tokenizer, trust_remote_code)]
    if all_steps and is_run(name):
        return [_run_target(saved, tokenizer) for saved in saved_models(name)]
    return [_run_target(find_saved(name), tokenizer)]


def _file_names(targets: Iterable[Target]) -> list[str]:
    """Return a unique name for each target: the last parts of its path, and its step or
    revision.

    All names have the same number of parts, the smallest number that makes names
    unique.
    """
    paths = [target.path.parts for target in targets]
    ends = [end_of_name(target) for target in targets]
    for depth in range(1, max(map(len, paths)) + 1):
        names = [
            "-".join(parts[-depth:]) + end
            for parts, end in zip(paths, ends, strict=True)
        ]
        if len(set(names)) == len(names):
            return names
    # Paths such as /a/b-c and /a-b/c give the same name.
    return [f"{i}-{name}" for i, name in enumerate(names)]


def end_of_name(target: Target) -> str:
    """Return the end of a target's name: its revision or its step, such as "-step-300",
    or "" if it has none.
    """
    if target.revision is not None:
        return "@" + target.revision.replace("/", "-")
    if target.step is not None:
        return f"-step-{target.step}"
    return ""


def name_of(called: str, targets: Mapping[str, Target]) -> str:
    """Return the name in ``targets`` of the model that the user typed as ``called``.

    If there are several steps of this model, the name is that of the newest step.
    """
    steps = {
        name: target.step or 0
        for name, target in targets.items()
        if called in target.called
    }
    return max(steps, key=lambda name: steps[name])


def _run_target(saved: SavedModel, tokenizer_folder: Path | None) -> Target:
    args = saved.model_args()
    tokenizer = saved.tokenizer(tokenizer_folder)

    def load(device: Device, dtype: str) -> LoadedModel:
        if device == "auto":
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = load_model(saved)
        if dtype != "auto":  # a checkpoint's weights are float32
            # The rotary table is a buffer, and stays float32 until it is used.
            for parameter in model.parameters():
                parameter.data = parameter.data.to(getattr(torch, dtype))

        def untrain(seed: int) -> None:
            if (first := saved_models(saved.run)[0]).step == 0:
                # not strict: the weights lack a tied output.weight
                model.load_state_dict(load_weights(first), strict=False)
            else:
                seed_of_run = saved.config["debug"]["seed"]
                if seed_of_run is not None:
                    seed = seed_of_run
                draw_weights(model, seed)

        layers = LoadedModel(model.to(device), model, list(model.layers.values()))
        layers.head = model.output
        layers.untrain = untrain
        # The model then returns the output of the final norm, not N × V logits.
        model.output.forward = lambda h: h
        return layers

    return Target(
        folder=saved.folder,
        path=saved.run.resolve().relative_to("/"),
        max_tokens=args.max_seq_len,
        vocab_size=args.vocab_size,
        encode=tokenizer.plain,
        special_tokens=_bos(tokenizer),
        load=load,
        run=saved.run,
        step=saved.step,
    )


def _bos(tokenizer: BaseTokenizer) -> SpecialTokens:
    if tokenizer.bos_id is None:
        return SpecialTokens()
    return SpecialTokens(before=(tokenizer.bos_id,))


def _hugging_face_target(
    folder: Path,
    model: HubModel | None,
    tokenizer_folder: Path | None,
    trust_remote_code: bool,
) -> Target:
    import transformers  # the import takes seconds, and runs do not need it

    if lacking := _missing_weights(folder):
        advice = "expected a run's folder or a Hugging Face model"
        if model is not None:
            more_patterns = []
            if not (folder / INDEX).is_file():
                more_patterns = [PICKLES]
            command = model.command(trust_remote_code, more_patterns)
            advice = f"download them on a machine with internet access:\n  {command}"
        raise ConfigError(f"{str(folder)!r} {lacking}; {advice}")
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        ).get_text_config()
    except (OSError, ValueError) as error:
        advice = _advice_on_custom_code(error)
        raise ConfigError(
            f"{str(folder)!r} is no model of transformers: {error}{advice}"
        ) from error
    if tokenizer_folder is not None:
        tokenizer = load_tokenizer(tokenizer_folder)
        encode = tokenizer.plain
        tokens = tokenizer.get_vocab_size()
        special_tokens = _bos(tokenizer)
    else:
        tokenizer = _hf_tokenizer(folder, trust_remote_code)
        encode = partial(_hf_encode, tokenizer)
        tokens = len(tokenizer)
        special_tokens = _hf_special_tokens(tokenizer)
    check_fits(
        tokens,
        tokenizer_folder or folder,
        config.vocab_size,
        model=f"the model {str(folder)!r}",
        advice="it is not this model's tokenizer",
    )

    def load(device: Device, dtype: str) -> LoadedModel:
        if device == "auto":
            causal_lm = load_causal_lm(folder, dtype, "auto", trust_remote_code)
        else:
            causal_lm = load_causal_lm(folder, dtype, None, trust_remote_code)
            causal_lm.to(device)
        return hugging_face_layers(causal_lm)

    path = folder.resolve().relative_to("/")
    revision = None
    if model is not None:
        path = Path(model.id)
        revision = model.revision
    return Target(
        folder=folder,
        path=path,
        max_tokens=longest_sequence(config),
        vocab_size=config.vocab_size,
        encode=encode,
        special_tokens=special_tokens,
        load=load,
        revision=revision,
    )


def _missing_weights(folder: Path) -> str:
    """Return which weights are missing after an interrupted download, or "".

    The text completes a sentence that begins with the folder. Raises ConfigError if the
    index of weights cannot be read.
    """
    has_safetensors = any(folder.glob("*.safetensors")) or (folder / INDEX).is_file()
    index = folder / "pytorch_model.bin.index.json"
    if has_safetensors:
        index = folder / INDEX
    has_single_file = (folder / index.name.removesuffix(".index.json")).is_file()
    if index.is_file() and not has_single_file:
        with reported(f"{str(index)!r} is no index of weights", *UNREADABLE):
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [file for file in files if not (folder / file).is_file()]
        if not missing:
            return ""
        count = counted(len(files), "file")
        return f"lacks {len(missing)} of its {count} of weights, such as {missing[0]!r}"
    if has_safetensors or any(folder.glob(PICKLES)):
        return ""
    return "has a config.json but no weights (*.safetensors or pytorch_model*.bin)"


def _advice_on_custom_code(error: Exception) -> str:
    """Return advice if an error says that a model needs its own code, or else ""."""
    if "trust_remote_code" not in str(error):
        return ""
    return (
        " The code may do anything. If you trust its authors, add --trust-remote-code."
    )


def _hf_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    hint = "Name another folder with --tokenizer DIR"
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # tokenizers raises plain Exceptions
        advice = _advice_on_custom_code(error)
        raise ConfigError(
            f"{str(folder)!r} has no usable tokenizer: {error}.{advice} {hint}"
        ) from error
    # Without files, transformers 5 creates a tokenizer that has only special tokens.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ConfigError(f"{str(folder)!r} holds no tokenizer. {hint}")
    return tokenizer


def _hf_encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _hf_special_tokens(tokenizer: Any) -> SpecialTokens:
    """Return the tokens that the tokenizer adds before and after a text of one letter."""
    bare = _hf_encode(tokenizer, "a")
    with_special_tokens = tokenizer("a", verbose=False)["input_ids"]
    for start in range(len(with_special_tokens) - len(bare) + 1):
        end = start + len(bare)
        if with_special_tokens[start:end] == bare:
            return SpecialTokens(
                before=tuple(with_special_tokens[:start]),
                after=tuple(with_special_tokens[end:]),
            )
    # Special tokens change the text's own tokens: which are special is unknown.
    return SpecialTokens()
