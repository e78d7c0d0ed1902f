"""``titan-disp condensation`` measures the condensation of trained models by layer, on the
same text, and writes numbers and pictures.
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
    """A model and its measurement."""

    target: targets.Target
    parameters: int  # a tied embedding counts once
    condensation: Measurement
    padded: np.ndarray | None = None  # ``PaddedCosines.result``, with --pad


def write_metrics(
    out: Path, measured: Mapping[str, Measured], settings: Mapping[str, Any]
) -> list[str]:
    """Write metrics.json, which includes ``settings``, and metrics.csv, with a row for
    each layer of each model, and return the names of the files.

    Both files name the layers, and give ρ and τ of the mean cosine with depth for the
    sets of layers in ``PLACES``.
    """
    content = []
    rows = []
    for name, model in measured.items():
        numbers_of_model = model.condensation.to_json()
        by_layer = model.condensation.by_layer()
        content.append(
            {
                "name": name,
                "folder": str(model.target.folder),
                "step": model.target.step,
                "revision": model.target.revision,
                "parameters": model.parameters,
                **numbers_of_model,
                "mean_cosine_of_last": model.condensation.of_last_layers(),
            }
        )
        correlations = {}
        for place in PLACES:
            for rank, value in numbers_of_model[place].items():
                correlations[f"{rank}_{place}"] = value
        for layer, layer_name in enumerate(numbers_of_model["layers"]):
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
    measured: Mapping[str, Measured],
    families: Mapping[str, Sequence[str]],
    pairs: Sequence[tuple[str, str]],
    formats: Sequence[str],
) -> list[str]:
    """Draw all pictures, and return the names of their files.

    Each model has a picture of its two heatmaps (pooled and averaged). Further pictures
    show the heatmaps of all models side by side, their mean cosines, and their ρ and τ.
    Steps of a run or revisions of a model are drawn over training. Families are drawn
    by size. The two models of a pair are drawn next to each other.
    """
    measurements = {name: model.condensation for name, model in measured.items()}
    averaged = {name: plots.averaged(m) for name, m in measurements.items()}
    figures = {
        f"heatmap-{name}": plots.side_by_side(
            {plots.POOLED: measurement, plots.AVERAGED: averaged[name]}, name
        )
        for name, measurement in measurements.items()
    }
    figures["side_by_side_pooled"] = plots.side_by_side(measurements, plots.POOLED)
    figures["side_by_side_averaged"] = plots.side_by_side(averaged, plots.AVERAGED)
    figures["mean_cosine"] = plots.mean_cosine_by_layer(measurements)
    figures["depth"] = plots.depth_bars(measurements)
    over_training = _over_training(measured)
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
            name: (model.parameters, model.condensation)
            for name, model in measured.items()
        }
        by_family = {
            family: {name: sizes[name] for name in members}
            for family, members in families.items()
        }
        figures["by_size"] = plots.by_size(by_family)
    if pairs:
        figures["pairs"] = plots.pairs(
            [((a, measurements[a]), (b, measurements[b])) for a, b in pairs]
        )
    files = []
    for name, figure in figures.items():
        for suffix in formats:
            files.append(f"{name}.{suffix}")
            figure.savefig(out / files[-1], dpi=150)
    return files


def _over_training(
    measured: Mapping[str, Measured],
) -> dict[str, dict[Any, Measurement]]:
    """Return the measurements of runs or models with several steps or revisions.

    The first key is the name of the run or model, and the second key is the step,
    ascending. If revisions do not name unique steps, the second key is the name of the
    revision, in order.
    """
    members: dict[str, list[Measured]] = defaultdict(list)
    for name, model in measured.items():
        if end := targets.end_of_name(model.target):
            members[name.removesuffix(end)].append(model)
    groups: dict[str, dict[Any, Measurement]] = {}
    for name, models in members.items():
        by_step = {step_of(model.target): model.condensation for model in models}
        if None not in by_step and len(by_step) == len(models):
            groups[name] = dict(sorted(by_step.items()))
        else:
            groups[name] = {
                str(model.target.revision): model.condensation for model in models
            }
    return {name: group for name, group in groups.items() if len(group) > 1}


def step_of(target: targets.Target) -> int | None:
    """Return the step of a checkpoint, or the step that a revision names, such as
    step1000 (Pythia) or stage1-step140000-tokens294B (OLMo); None if there is none.
    """
    if matched := re.search(r"step[-_]?(\d+)", target.revision or ""):
        return int(matched[1])
    return target.step


def table(measurements: Mapping[str, Measurement], last_n: int) -> str:
    """Return two Markdown tables. The first has mean cosines. The second has their ρ
    and τ with depth, and statistics of the last block's covariance.
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
    for name, measurement in measurements.items():
        mean = measurement.mean_cosine
        last = measurement.last_block
        untrained = None
        if measurement.untrained_mean_cosine is not None:
            untrained = measurement.untrained_mean_cosine[last]
        logits = None
        if measurement.logits:
            logits = mean[-1]
        cells = [
            *mean[[0, (last + 1) // 2, last]],
            untrained,
            mean[last + 1],
            measurement.of_last_layers()[:last_n][-1],
            logits,
            1 / measurement.tokens,
        ]
        cosines.append([name, *(number(cosine, 3) for cosine in cells)])
        ranks = [
            " ".join(number(cell, 3) for cell in (at.spearman, at.kendall, at.range))
            for at in measurement.over_depth.values()
        ]
        by_layer = measurement.by_layer()
        of_covariance = [number(by_layer[key][last], 3) for key in OF_COVARIANCE]
        numbers.append([name, *ranks, *of_covariance])
    return f"{markdown_table(cosines, 1)}\n\n{markdown_table(numbers, 1)}"


@torch.no_grad()
def measure(
    name: str,
    layers: targets.LoadedModel,
    tokens: Tensor,
    options: CondensationOptions,
    padded: PaddedCosines | None = None,
) -> Measurement:
    """Return the measurement of all layers of a model on [count, length] token ids.

    ``name`` is used in messages and the progress bar. All layers except the logits are
    added to ``padded``. Raises ConfigError if an activation is not finite.
    """
    logits = options.logits
    pooled = Accumulator(layers.layer_count + logits, layers.device)
    averaged = AveragedCosines()
    covariance = Covariance()
    root = None
    if logits:
        root = targets.logits_root(layers.head)

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
    measurement = pooled.result(tokens.shape[1])
    features = [measurement.features] * layers.layer_count
    if logits:
        features.append(layers.head.out_features)
    numbers = np.array(
        [covariance.result(layer, f, options.zeta) for layer, f in enumerate(features)]
    ).T
    return replace(
        measurement,
        averaged_histogram=averaged.histogram(),
        covariance=numbers,
        logits=logits,
    )


def condensation(options: CondensationOptions) -> dict[str, Measurement]:
    """Measure models on a random sample of a text, write numbers and pictures to
    ``options.out``, and return the measurements by the names of the models.

    All models read sequences of the same length, which fits the model with the fewest
    positions. The length matters, because the mean over all N² pairs of
    tokens includes the N pairs of a token with itself. Existing files of the same names
    are overwritten.

    Raises ConfigError, or CheckpointError if the weights of a run cannot be read. After
    the first measurement, only weights and activations can cause errors.
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
    measurements = {name: model.condensation for name, model in measured.items()}
    print(table(measurements, options.last_n))
    print(f"{options.out}: {', '.join(files)}")
    return measurements


def _device(name: str) -> targets.Device:
    if name != "auto":
        return targets.find_device(name, torch.float64)  # the dtype of the cosines
    if find_spec("accelerate") is None:
        raise ConfigError(
            "--device auto needs accelerate, which spreads a model over the GPUs: pip "
            "install accelerate"
        )
    return "auto"


def _samples(
    models: Mapping[str, targets.Target], options: CondensationOptions
) -> dict[str, Tensor]:
    """Return each model's token ids, [count, length] with the same length for all
    models.
    """

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
    """Return all models with their measurements, and save each measurement."""
    measured: dict[str, Measured] = {}
    # mean cosines before training, which all steps or revisions of a model share
    untrained: dict[Path, np.ndarray] = {}
    for name, target in models.items():
        layers = target.load(device, options.dtype)
        padded = None
        if options.pad is not None:
            padded = PaddedCosines(options.pad, options.seed)
        measurement = measure(
            name=name,
            layers=layers,
            tokens=samples[name],
            options=options,
            padded=padded,
        )
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
        measured[name] = Measured(target, layers.parameters, measurement)
        if padded is not None:
            measured[name] = replace(measured[name], padded=padded.result())
        del layers  # frees the memory before the next model is loaded
    return measured


def _write(
    measured: Mapping[str, Measured],
    families: Mapping[str, Sequence[str]],
    pairs: Sequence[tuple[str, str]],
    options: CondensationOptions,
) -> list[str]:
    """Write numbers and pictures, and return the names of all files."""
    recorded = ("seed", "dtype", "contiguous", "special_tokens", "zeta")
    settings = {
        "text": str(options.text or options.dataset),
        **{name: getattr(options, name) for name in recorded},
    }
    files = [f"{name}.npz" for name in measured]
    files += write_metrics(options.out, measured, settings)
    if options.pad is not None:
        files.append(write_padded(options.out, measured, options.pad))
    formats = plots.picture_formats(options.format)
    return files + write_figures(
        out=options.out,
        measured=measured,
        families=families,
        pairs=pairs,
        formats=formats,
    )


def write_padded(out: Path, measured: Mapping[str, Measured], features: int) -> str:
    """Write padded.csv, with a row for each layer of each model, and return its name."""
    rows: list[list[Any]] = [["target", "layer", "layer_name", "padded_to", *COLUMNS]]
    for name, model in measured.items():
        assert model.padded is not None
        names = model.condensation.layer_names
        for layer, numbers in enumerate(model.padded.tolist()):
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
    """Return a model's token ids, [count, length], with ``options.max_length`` as the
    length.

    A short text gives fewer or shorter sequences, which is reported on stderr. Raises
    ConfigError if there is no room for text, or the tokenizer does not fit the model.
    """
    special = targets.SpecialTokens()
    if options.special_tokens:
        special = target.special_tokens
    count = options.sequences
    length = options.max_length - len(special.before) - len(special.after)
    if length < 2:
        raise ConfigError(
            f"--max-length {options.max_length} leaves no room for text next to "
            f"{name}'s special tokens"
        )
    if options.contiguous:
        tokens = contiguous_sequences(
            texts=texts,
            encode=target.encode,
            count=count,
            length=length,
            seed=options.seed,
        )
        total = count * length
        if sum(map(len, texts)) < total * MARGIN:
            available = len(target.encode("".join(texts)))
            if available < total:
                print(
                    f"{name}: the text has {available:,} tokens, and {count} sequences of "
                    f"{length} take {total:,}: the sequences overlap, so they are not "
                    f"{count} independent samples",
                    file=sys.stderr,
                )
    else:
        tokens = cut_sequences(texts, target.encode, count, length)
    if tokens.max() >= target.vocab_size:
        raise ConfigError(
            f"the tokenizer gives the id {tokens.max()}, but {name} has a vocabulary of "
            f"{target.vocab_size}: it is not this model's tokenizer"
        )
    tokens = surround(tokens, special.before, special.after)
    if tokens.shape != (options.sequences, options.max_length):
        count, length = tokens.shape
        print(
            f"{name}: the text gives {counted(count, 'sequence')} of {length} tokens "
            f"instead of {options.sequences} of {options.max_length}",
            file=sys.stderr,
        )
    return tokens
