"""``titan-disp condensation``: how condensed the embeddings of trained models are, layer by layer, on the same text."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from titan_disp.condensation.measure import Accumulator
from titan_disp.condensation.record import Condensation
from titan_disp.errors import ConfigError
from titan_disp.inspection.report import table, write_figures, write_metrics
from titan_disp.inspection.targets import Target, find_targets
from titan_disp.inspection.texts import cut_sequences, read_texts


@torch.no_grad()
def measure(name: str, target: Target, tokens: Tensor, batch_size: int, device: torch.device) -> Condensation:
    """Every layer of one model on [count, length] token ids, the last block's before and after the final norm; a progress bar on
    stderr.

    Raises:
        ConfigError: weights that are missing or damaged, or give values that are not finite.
    """
    layers = target.load(device)
    sums: Accumulator | None = None
    with tqdm(total=len(tokens), desc=name, unit="seq", disable=None) as progress:
        for batch in tokens.split(batch_size):
            activations = layers(batch.to(device))
            if sums is None:
                sums = Accumulator(len(activations), device)
            for layer, z in enumerate(activations):
                if not z.isfinite().all():
                    raise ConfigError(f"{name}: layer {layer} has values that are not finite: the model has diverged")
                sums.add(layer, z)
            progress.update(len(batch))
    assert sums is not None
    return sums.result(tokens.shape[1], final_norm=True)


def condensation(
    names: Sequence[str],
    text: Path | None,
    dataset: str | None,
    out: Path,
    sequences: int,
    max_length: int,
    seed: int,
    all_steps: bool,
    tokenizer: Path | None,
    batch_size: int,
    device: str,
) -> dict[str, Condensation]:
    """Measure models on a random sample of a text, in float32, and write numbers and pictures into ``out``.

    All models read sequences of the same length, which the one with the fewest positions limits: the mean over all N²
    pairs depends on N, as the N of a token with itself are among them. Files in ``out`` of the same names are overwritten.

    Args:
        names, all_steps, tokenizer: as ``find_targets`` takes them.
        text, dataset, seed: as ``read_texts`` takes them.
        sequences, max_length: at most so many sequences, of so many tokens.
        batch_size: sequences per forward.
        device: "cpu", "cuda" or "cuda:N".

    Returns:
        The measurements by target.

    Raises:
        ConfigError: no such model, text or device, or a number out of range; but for what is wrong with weights, before
            anything is measured.
    """
    least = {"--sequences": (sequences, 1), "--max-length": (max_length, 2), "--batch-size": (batch_size, 1)}
    for option, (value, minimum) in least.items():
        if value < minimum:
            raise ConfigError(f"{option} is {value}, expected at least {minimum}")
    torch_device = _find_device(device)
    targets = find_targets(names, all_steps, tokenizer)
    shortest = min(targets, key=lambda name: targets[name].max_tokens or sys.maxsize)
    length = min(max_length, targets[shortest].max_tokens or sys.maxsize)
    if length < max_length:
        print(f"sequences of {length} tokens, not {max_length}: {shortest} has no more positions", file=sys.stderr)
    texts = read_texts(text, dataset, seed)
    samples = {name: _sample(name, target, texts, sequences, length) for name, target in targets.items()}
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {str(out)!r} is no folder to write into: {error}") from error
    found = {}
    for name, target in targets.items():
        found[name] = measure(name, target, samples[name], batch_size, torch_device)
        found[name].save(out / f"{name}.npz")
    settings = {"text": str(text or dataset), "seed": seed}
    files = [*write_metrics(out, targets, found, settings), *write_figures(out, targets, found)]
    print(table(found))
    print(f"{out}: {', '.join([*(f'{name}.npz' for name in found), *files])}")
    return found


def _find_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, dtype=torch.float64, device=device)  # in which cosines are taken
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(f"--device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return device


def _sample(name: str, target: Target, texts: Sequence[str], sequences: int, length: int) -> Tensor:
    tokens = cut_sequences(texts, target.encode, sequences, length)
    if tokens.max() >= target.vocab_size:
        raise ConfigError(
            f"the tokenizer gives the id {tokens.max()}, but {name} has a vocabulary of {target.vocab_size}: it is not this "
            "model's tokenizer"
        )
    if tokens.shape != (sequences, length):
        count, n = tokens.shape
        print(f"{name}: the text gives {count} sequences of {n} tokens, not {sequences} of {length}", file=sys.stderr)
    return tokens
