"""Models to look into: checkpoints of runs, and Hugging Face folders of causal language models."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titan_disp.data.hf_tokenizer import plain_encoder
from titan_disp.data.tokenizer import check_fits, load_tokenizer
from titan_disp.errors import ConfigError
from titan_disp.results.hugging_face import load_causal_lm
from titan_disp.results.saved import SavedModel, find_saved, is_run, load_model, saved_models

Encode = Callable[[str], list[int]]
Layers = Callable[[Tensor], Sequence[Tensor]]
"""[B, N] token ids → activations [B, N, F] of the embedding, of every block, and of the final norm.

The last two are what Hugging Face's hidden states leave out and what they end with.
"""


@dataclass(frozen=True)
class Target:
    """A model that has been found, with its tokenizer; the weights are read by ``load``.

    Attributes:
        folder: of the checkpoint or of the Hugging Face model.
        run, step: of a checkpoint; None for a Hugging Face model.
        max_tokens: positions that the model knows; None: any number.
        vocab_size: token ids that it knows.
        encode: text → token ids, without special tokens.
        load: device → the model's layers, in float32 and eval mode. Raises ConfigError where weights are missing, or the last
            block cannot be found.
    """

    folder: Path
    run: Path | None
    step: int | None
    max_tokens: int | None
    vocab_size: int
    encode: Encode
    load: Callable[[torch.device], Layers]


def find_targets(names: Sequence[str], all_steps: bool, tokenizer: Path | None) -> dict[str, Target]:
    """The models by a name for files, each model once.

    Args:
        names: RUN, RUN/STEP, or a Hugging Face folder.
        all_steps: all checkpoints of a RUN, not the newest only.
        tokenizer: folder to use instead of each model's own tokenizer.

    Raises:
        ConfigError: nothing there, no model, or a tokenizer that does not fit.
    """
    if not names:
        raise ConfigError("expected at least one target: a run's folder (job.dump_folder), or a Hugging Face model")
    if all_steps and not any(is_run(name) for name in names):
        raise ConfigError(f"--all-steps needs a run's folder (job.dump_folder), but was given {', '.join(names)}")
    found: dict[Path, Target] = {}
    for name in names:
        if _is_hugging_face(Path(name)):
            targets = [_hugging_face_target(Path(name), tokenizer)]
        else:
            saved = saved_models(name) if all_steps and is_run(name) else [find_saved(name)]
            targets = [_run_target(one, tokenizer) for one in saved]
        found |= {target.folder.resolve(): target for target in targets}
    return dict(zip(_file_names(found.values()), found.values(), strict=True))


def _file_names(targets: Iterable[Target]) -> list[str]:
    """The folder's name, and the step; as many parent folders before it as tell all targets apart."""
    paths = [(target.run or target.folder).resolve().parts[1:] for target in targets]
    steps = ["" if target.step is None else f"-step-{target.step}" for target in targets]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["-".join(parts[-depth:]) + step for parts, step in zip(paths, steps, strict=True)]
        if len(set(names)) == len(names):
            return names
    return [f"{i}-{name}" for i, name in enumerate(names)]  # /a/b-c and /a-b/c


def _run_target(saved: SavedModel, tokenizer: Path | None) -> Target:
    args = saved.model_args()

    def load(device: torch.device) -> Layers:
        model = load_model(saved).to(device)
        model.output = torch.nn.Identity()  # the "logits" are then what the final norm gives, without N × V numbers

        def layers(tokens: Tensor) -> Sequence[Tensor]:
            normed, activations = model(tokens, return_activations=range(args.n_layers + 1))
            return [*activations, normed]

        return layers

    return Target(
        folder=saved.folder,
        run=saved.run,
        step=saved.step,
        max_tokens=args.max_seq_len,
        vocab_size=args.vocab_size,
        encode=plain_encoder(saved.tokenizer(tokenizer)),
        load=load,
    )


def _is_hugging_face(folder: Path) -> bool:
    return (folder / "config.json").is_file() and not is_run(folder)


def _hugging_face_target(folder: Path, tokenizer_folder: Path | None) -> Target:
    import transformers  # seconds, which runs alone do not need

    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise ConfigError(
            f"{str(folder)!r} has a config.json but no weights (*.safetensors or pytorch_model*.bin); "
            "expected a run's folder or a Hugging Face model"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(folder)!r} is not a model that transformers knows: {error}") from error
    if tokenizer_folder is not None:
        own = load_tokenizer(tokenizer_folder)
        encode, tokens = plain_encoder(own), own.get_vocab_size()
    else:
        theirs = _their_tokenizer(folder)
        encode, tokens = partial(_encode_theirs, theirs), len(theirs)
    advice = "it is not this model's tokenizer"
    check_fits(tokens, tokenizer_folder or folder, config.vocab_size, f"the model {str(folder)!r}", advice)
    return Target(
        folder=folder,
        run=None,
        step=None,
        max_tokens=getattr(config, "max_position_embeddings", None),
        vocab_size=config.vocab_size,
        encode=encode,
        load=partial(_load_hugging_face, folder),
    )


def _their_tokenizer(folder: Path) -> Any:
    import transformers

    hint = "Name another folder with --tokenizer DIR"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ConfigError(f"transformers cannot load the tokenizer in {str(folder)!r}: {error}. {hint}") from error
    # transformers 5 makes one of nothing but special tokens where there are no files.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ConfigError(f"{str(folder)!r} holds no tokenizer. {hint}")
    return tokenizer


def _encode_theirs(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _load_hugging_face(folder: Path, device: torch.device) -> Layers:
    body = load_causal_lm(folder).to(device).base_model  # without the output layer: N × V logits that nobody needs

    blocks: list[Tensor] = []

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        blocks.append(output if isinstance(output, Tensor) else output[0])

    _last_block(body, folder).register_forward_hook(keep)

    def layers(tokens: Tensor) -> Sequence[Tensor]:
        found = body(tokens, output_hidden_states=True, use_cache=False)
        return [*found.hidden_states[:-1], blocks.pop(), found.last_hidden_state]

    return layers


def _last_block(body: nn.Module, folder: Path) -> nn.Module:
    """The last of a Hugging Face model's blocks: its largest list of as many modules as there are layers."""
    layers: int = body.config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
    lists = [module for module in body.modules() if isinstance(module, nn.ModuleList) and len(module) == layers]
    if not lists:
        raise ConfigError(
            f"{str(folder)!r} has no list of its {layers} layers among its modules, so that the last one's output, before the "
            "final norm, cannot be found"
        )
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))[-1]
