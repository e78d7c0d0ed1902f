"""``titan-disp condensation`` measures trained models, layer by layer on the same text,
and writes numbers and pictures.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from titan_disp.condensation.measure import Accumulator, AveragedCosines, Covariance
from titan_disp.condensation.record import OF_COVARIANCE, PLACES, Measurement
from titan_disp.config.command_options import CondensationOptions, check_least
from titan_disp.errors import ConfigError, counted
from titan_disp.files import make_writable, progress
from titan_disp.lab import plots
from titan_disp.lab.inspection import targets
from titan_disp.lab.inspection.padding import COLUMNS, PaddedCosines
from titan_disp.lab.inspection.texts import (
    MARGIN,
    contiguous_sequences,
    cut_sequences,
    read_texts,
    surround,
)
from titan_disp.run.storage import write_json
from titan_disp.text import csv_text, markdown_table, number


@dataclass(frozen=True)
class Measured:
    """A model, the number of its parameters (a tied embedding counts once), and its
    measurement.
    """

    target: targets.Target
    parameters: int
    condensation: Measurement
    padded: np.ndarray | None = None  # of ``PaddedCosines``, with --pad


def write_metrics(
    out: Path, found: Mapping[str, Measured], settings: Mapping[str, Any]
) -> list[str]:
    """Write metrics.json, which includes ``settings``, and metrics.csv, with a row for
    each layer of each target.

    Both files name the layers. They give ρ and τ over depth for the sets of layers in
    ``PLACES``. The names of the files are returned.
    """
    content = []
    rows = []
    for name, one in found.items():
        told = one.condensation.to_json()
        by_layer = one.condensation.by_layer()
        target = {
            "name": name,
            "folder": str(one.target.folder),
            "step": one.target.step,
        }
        target |= {"revision": one.target.revision, "parameters": one.parameters}
        content.append(
            {**target, **told, "mean_cosine_of_last": one.condensation.of_last_layers()}
        )
        correlations = {}
        for place in PLACES:
            for rank, value in told[place].items():
                correlations[f"{rank}_{place}"] = value
        for layer, layer_name in enumerate(told["layers"]):
            numbers = {key: values[layer] for key, values in by_layer.items()}
            rows.append(
                {
                    "target": name,
                    "layer": layer,
                    "layer_name": layer_name,
                    **numbers,
                    **correlations,
                }
            )
    write_json(out / "metrics.json", {**settings, "targets": content})
    (out / "metrics.csv").write_text(
        csv_text([list(rows[0]), *(list(row.values()) for row in rows)])
    )
    return ["metrics.json", "metrics.csv"]


def write_figures(
    out: Path,
    found: Mapping[str, Measured],
    families: Mapping[str, Sequence[str]],
    pairs: Sequence[tuple[str, str]],
    formats: Sequence[str],
) -> list[str]:
    """Draw all pictures, and return the names of their files.

    These are two heatmaps of each target, all targets' heatmaps of a kind side by side,
    mean cosines, ρ and τ. Several steps of a run or revisions of a model are drawn over
    training, families by size, and pairs side by side.
    """
    measured = {name: one.condensation for name, one in found.items()}
    averaged = {name: plots.averaged(one) for name, one in measured.items()}
    both = {
        name: {plots.POOLED: one, plots.AVERAGED: averaged[name]}
        for name, one in measured.items()
    }
    figures = {
        f"heatmap-{name}": plots.side_by_side(two, name) for name, two in both.items()
    }
    figures["side_by_side_pooled"] = plots.side_by_side(measured, plots.POOLED)
    figures["side_by_side_averaged"] = plots.side_by_side(averaged, plots.AVERAGED)
    figures["mean_cosine"] = plots.mean_cosine_by_layer(measured)
    figures["depth"] = plots.depth_bars(measured)
    over_training = _over_training(found)
    by_step = {
        name: group
        for name, group in over_training.items()
        if all(isinstance(step, int) for step in group)
    }
    if over_training:
        figures["over_training"] = plots.over_training(by_step | over_training)
    if by_step:
        figures["over_steps"] = plots.over_steps(by_step)
    if families:
        sizes = {
            name: (one.parameters, one.condensation) for name, one in found.items()
        }
        by_family = {
            family: {name: sizes[name] for name in members}
            for family, members in families.items()
        }
        figures["by_size"] = plots.by_size(by_family)
    if pairs:
        figures["pairs"] = plots.pairs(
            [((a, measured[a]), (b, measured[b])) for a, b in pairs]
        )
    names = [f"{name}.{suffix}" for name in figures for suffix in formats]
    for name in names:
        figures[name.rpartition(".")[0]].savefig(out / name, dpi=150)
    return names


def _over_training(found: Mapping[str, Measured]) -> dict[str, dict[Any, Measurement]]:
    """Group the measurements of several steps of a run, or revisions of a model, by
    ascending step.

    Revisions that do not name steps are grouped by their names, in the given order.
    """
    several: dict[str, list[Measured]] = defaultdict(list)
    for name, one in found.items():
        if end := targets.end_of_name(one.target):
            several[name.removesuffix(end)].append(one)
    groups: dict[str, dict[Any, Measurement]] = {}
    for name, many in several.items():
        by_step = {step_of(one.target): one.condensation for one in many}
        if None not in by_step and len(by_step) == len(many):
            groups[name] = dict(sorted(by_step.items()))
        else:
            groups[name] = {str(one.target.revision): one.condensation for one in many}
    return {name: group for name, group in groups.items() if len(group) > 1}


def step_of(target: targets.Target) -> int | None:
    """Return the step of a checkpoint or revision, such as step1000 (Pythia) or
    stage1-step140000-tokens294B (OLMo).
    """
    matched = re.search(r"step[-_]?(\d+)", target.revision or "")
    return int(matched[1]) if matched else target.step


def table(found: Mapping[str, Measurement], last_n: int) -> str:
    """Render a table of mean cosines, and one of their ρ and τ with depth and of the
    last block's covariance.
    """
    headings = [
        "embedding",
        "mid block",
        "last block",
        "untrained",
        "final norm",
        f"last {last_n}",
        "logits",
        "random",
    ]
    cosines = [["mean cosine", *headings]]
    numbers = [["", *(f"ρ, τ, range: {place}" for place in PLACES), *OF_COVARIANCE]]
    for name, one in found.items():
        mean = one.mean_cosine
        last = one.last_block
        before = one.untrained_mean_cosine
        shown = [
            *mean[[0, (last + 1) // 2, last]],
            None if before is None else before[last],
            mean[last + 1],
        ]
        shown += [
            one.of_last_layers()[:last_n][-1],
            mean[-1] if one.logits else None,
            1 / one.tokens,
        ]
        cosines.append([name, *(number(cosine, 3) for cosine in shown)])
        ranks = [
            " ".join(number(cell, 3) for cell in (at.spearman, at.kendall, at.range))
            for at in one.over_depth.values()
        ]
        numbers.append(
            [
                name,
                *ranks,
                *(number(one.by_layer()[key][last], 3) for key in OF_COVARIANCE),
            ]
        )
    return f"{markdown_table(cosines, 1)}\n\n{markdown_table(numbers, 1)}"


@torch.no_grad()
def measure(
    name: str,
    layers: targets.LoadedModel,
    tokens: Tensor,
    options: CondensationOptions,
    padded: PaddedCosines | None = None,
) -> Measurement:
    """Measure every layer of one model on [count, length] token ids.

    ``name`` is for messages and a progress bar. ``padded`` gets all layers but the
    logits.
    """
    logits = options.logits
    pooled = Accumulator(layers.layer_count + logits, layers.device)
    averaged = AveragedCosines()
    covariance = Covariance()
    root = targets.logits_root(layers.head) if logits else None

    def take_in(layer: int, z: Tensor) -> None:
        if not z.isfinite().all():
            raise ConfigError(
                f"{name}: layer {layer} has values that are not finite: the model has "
                "diverged"
            )
        for sums in (pooled, averaged, covariance):
            sums.add(layer, z)
        if padded is not None and layer < layers.layer_count:
            padded.add(layer, z)
        if root is not None and layer == layers.layer_count - 1:
            take_in(
                layers.layer_count,
                pad(z.double(), (0, 1), value=1.0) @ root.to(z.device),
            )

    with progress(name, "sequence", total=len(tokens)) as bar:
        for batch in tokens.split(options.batch_size):
            layers(batch, take_in)
            bar.update(len(batch))
    found = pooled.result(tokens.shape[1])
    features = [
        *[found.features] * layers.layer_count,
        *([layers.head.out_features] if logits else []),
    ]
    numbers = np.array(
        [covariance.result(layer, f, options.zeta) for layer, f in enumerate(features)]
    ).T
    return replace(
        found,
        averaged_histogram=averaged.histogram(),
        covariance=numbers,
        logits=logits,
    )


def condensation(options: CondensationOptions) -> dict[str, Measurement]:
    """Measure models on a random sample of a text, and write numbers and pictures to
    ``options.out``.

    All models read sequences of the same length, which is limited by the model with the
    fewest positions. The length matters: the mean over all N² pairs of tokens includes
    the N pairs of a token with itself. Files of the same names in ``out`` are
    overwritten. Returns the measurements by target.

    Raises ConfigError, and CheckpointError if the weights of a run cannot be read.
    Errors of weights may come after the first measurement; all other errors come before
    it.
    """
    check_least(options, sequences=1, max_length=2, batch_size=1, last_n=1)
    plots.picture_formats(options.format)
    if not 0 <= options.zeta < 1:
        raise ConfigError(
            f"--zeta is {options.zeta}, expected at least 0, and less than 1"
        )
    device = _device(options.device)
    families = dict(_members(family, "--family") for family in options.family)
    pairs = [_pair(pair) for pair in options.pair]
    names = [*options.targets, *chain(*families.values()), *chain(*pairs)]
    models = targets.find_targets(
        list(dict.fromkeys(names)),
        options.all_steps,
        options.tokenizer,
        options.trust_remote_code,
    )
    samples = _samples(models, options)
    make_writable(options.out, "--out")
    measured = _measure_all(models, samples, device, options)
    by_family = {
        family: [targets.name_of(member, models) for member in members]
        for family, members in families.items()
    }
    by_pair = [
        (targets.name_of(base, models), targets.name_of(other, models))
        for base, other in pairs
    ]
    files = _write(measured, by_family, by_pair, options)
    measurements = {name: one.condensation for name, one in measured.items()}
    print(table(measurements, options.last_n))
    print(f"{options.out}: {', '.join(files)}")
    return measurements


def _device(name: str) -> targets.Device:
    if name != "auto":
        return targets.find_device(name, torch.float64)  # of the cosines
    if find_spec("accelerate") is None:
        raise ConfigError(
            "--device auto needs accelerate, which spreads a model over the GPUs: pip "
            "install accelerate"
        )
    return "auto"


def _samples(
    models: Mapping[str, targets.Target], options: CondensationOptions
) -> dict[str, Tensor]:
    """Return each model's token ids, [count, length], of one length for all."""

    def positions(name: str) -> int:
        return models[name].max_tokens or sys.maxsize

    shortest = min(models, key=positions)
    length = min(options.max_length, positions(shortest))
    if length < options.max_length:
        print(
            f"sequences have {length} tokens, not {options.max_length}, because "
            f"{shortest} has no more positions",
            file=sys.stderr,
        )
    texts = read_texts(
        text=options.text,
        dataset=options.dataset,
        seed=options.seed,
        in_order=options.contiguous,
        text_field=options.text_field,
    )
    cut = replace(options, max_length=length)
    return {name: _sample(name, target, texts, cut) for name, target in models.items()}


def _measure_all(
    models: Mapping[str, targets.Target],
    samples: Mapping[str, Tensor],
    device: targets.Device,
    options: CondensationOptions,
) -> dict[str, Measured]:
    """Measure one model after another, and save each measurement."""
    measured: dict[str, Measured] = {}
    # mean cosines by run or model: its steps or revisions share them
    untrained: dict[Path, np.ndarray] = {}
    for name, target in models.items():
        layers = target.load(device, options.dtype)
        padded = None
        if options.pad is not None:
            padded = PaddedCosines(options.pad, options.seed)
        measurement = measure(name, layers, samples[name], options, padded)
        batch = samples[name][: options.batch_size]
        if not options.skip_untrained and target.path not in untrained:
            layers.untrain(options.seed)
            untrained[target.path] = measure(
                f"{name}, untrained", layers, batch, options
            ).mean_cosine
        measurement = replace(
            measurement, untrained_mean_cosine=untrained.get(target.path)
        )
        measurement.save(options.out / f"{name}.npz")
        measured[name] = Measured(
            target=target,
            parameters=layers.parameters,
            condensation=measurement,
            padded=None if padded is None else padded.result(),
        )
        del layers  # frees the memory before the next model is loaded
    return measured


def _write(
    measured: Mapping[str, Measured],
    families: Mapping[str, Sequence[str]],
    pairs: Sequence[tuple[str, str]],
    options: CondensationOptions,
) -> list[str]:
    """Write numbers and pictures, and return the names of all files."""
    kept = ("seed", "dtype", "contiguous", "special_tokens", "zeta")
    settings = {
        "text": str(options.text or options.dataset),
        **{name: getattr(options, name) for name in kept},
    }
    files = [f"{name}.npz" for name in measured]
    files += write_metrics(options.out, measured, settings)
    if options.pad is not None:
        files.append(write_padded(options.out, measured, options.pad))
    formats = plots.picture_formats(options.format)
    return files + write_figures(options.out, measured, families, pairs, formats)


def write_padded(out: Path, measured: Mapping[str, Measured], features: int) -> str:
    """Write padded.csv, with a row for each layer, and return its name."""
    rows: list[list[Any]] = [["target", "layer", "layer_name", "padded_to", *COLUMNS]]
    for name, one in measured.items():
        assert one.padded is not None
        names = one.condensation.layer_names
        for layer, numbers in enumerate(one.padded.tolist()):
            rows.append([name, layer, names[layer], features, *numbers])
    (out / "padded.csv").write_text(csv_text(rows))
    return "padded.csv"


def _members(text: str, option: str) -> tuple[str, list[str]]:
    group = targets.parse_group(text)
    if group is None or len(group[1]) < 2:
        raise ConfigError(
            f"{option} is {text!r}, expected NAME=MODEL,MODEL,… with at least two "
            "models"
        )
    return group


def _pair(text: str) -> tuple[str, str]:
    members = text.split(",")
    if len(members) != 2 or not all(members):
        raise ConfigError(f"--pair is {text!r}, expected two models: BASE,MODEL")
    return members[0], members[1]


def _sample(
    name: str,
    target: targets.Target,
    texts: Sequence[str],
    options: CondensationOptions,
) -> Tensor:
    special = (
        target.special_tokens if options.special_tokens else targets.SpecialTokens()
    )
    count = options.sequences
    length = options.max_length - len(special.before) - len(special.after)
    if length < 2:
        raise ConfigError(
            f"--max-length {options.max_length} leaves no room for text next to "
            f"{name}'s special tokens"
        )
    if options.contiguous:
        tokens = contiguous_sequences(texts, target.encode, count, length, options.seed)
        if (
            sum(map(len, texts)) < count * length * MARGIN
            and (found := len(target.encode("".join(texts)))) < count * length
        ):
            print(
                f"{name}: the text has {found:,} tokens, and {count} sequences of "
                f"{length} take {count * length:,}: they overlap, and are not {count} "
                "independent samples",
                file=sys.stderr,
            )
    else:
        tokens = cut_sequences(texts, target.encode, count, length)
    if tokens.max() >= target.vocab_size:
        told = f"the tokenizer gives the id {tokens.max()}, but {name} has a vocabulary of {target.vocab_size}"
        raise ConfigError(f"{told}: it is not this model's tokenizer")
    tokens = surround(tokens, special.before, special.after)
    if tokens.shape != (options.sequences, options.max_length):
        count, n = tokens.shape
        asked = f"{options.sequences} of {options.max_length}"
        print(
            f"{name}: the text gives {counted(count, 'sequence')} of {n} tokens instead of {asked}",
            file=sys.stderr,
        )
    return tokens
