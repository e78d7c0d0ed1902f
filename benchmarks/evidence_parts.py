"""The runs of the experiment, part by part: docs/evidence_design.md as options of
train_configs/evidence.toml.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli

CONFIG = "train_configs/evidence.toml"
STEPS = 600
LONG = 2400
MIDTRAINING = 200
QUARTER = STEPS // 4  # the steps in which on-first-quarter has dispersion
# the MLP's width, and the layers
NARROW = 16
DEEP = 12
NOISE_ALPHA = 5  # NEFTune's α
# as fractions of off's learning rate and of the steps
MIDTRAINING_LR = 0.1
MIDTRAINING_WARMUP = 0.2
SEEDS = tuple(range(1, 9))
FEW_SEEDS = SEEDS[:4]  # for the parts that take longer
TUNING_SEEDS = (101, 102)  # used in no other part
# the first experiment's suggested the second
SECOND_SEEDS = tuple(range(11, 19))
AGAIN_SEEDS = tuple(range(21, 29))
LRS = (1e-3, 2e-3, 4e-3, 8e-3)
WARMUPS = (0.05, 0.2)
ALL_LRS = (LRS[0] / 2, *LRS, LRS[-1] * 2)  # and those beyond
STATES = ("off", "on")
# the second experiment
WIDTHS = (16, 192, 768)
WIDTH_LRS = (0.016, 0.032, 0.064)
WIDTH_WARMUP = 0.2
# nats; of learning rates that differ by less, the second experiment takes the lowest
TIE = 0.01
OTHER_LOSSES = (
    "orthogonalization",
    "decorrelation",
    "l2_repel",
    "uniformity",
    "cosine",
    "simctg",
    "koleo",
)
STRONG_LOSSES = ("decorrelation", "uniformity")  # with λ 1 as well
# rows of models that were trained again because a later part needs their files
RESTORED = "restored"
FIRST = {
    "tuning": "tuning",
    "main": "main comparison",
    "noise": "noise floor",
    "width": f"MLP width {NARROW}",
    "depth": f"{DEEP} layers",
    "long": f"{LONG:,} steps",
    "midtraining": "mid-training",
}
SECOND = {
    "widths-tuning": "tuning of off and on at each MLP width",
    "widths": "MLP widths, off and on each tuned",
    "widths-again": "the same at the middle width, other seeds",
    "losses": "other losses",
    "long-tuning": f"tuning of off and on for {LONG:,} steps",
    "long-tuned": f"{LONG:,} steps, off and on each tuned",
}
PARTS = FIRST | SECOND
COEFFS = {"on-0.1": "λ 0.1", "on-0.5": "λ 0.5"}  # of mid-training
NAMES = {
    "off": "off",
    "on": "on, λ 0.1",
    "on-0.03": "on, λ 0.03",
    "on-first-quarter": "on in the first quarter",
    "on-moments": "on, moments",
    "noisy-embedding": "noisy embedding",
    **{name: f"on, {coeff}" for name, coeff in COEFFS.items()},
}
TEXTS = {"test": "old text", "new_test": "new text"}
# the parts that compare on with off from scratch
TRAINED = ("main", "width", "depth", "long")

Row = Mapping[str, Any]  # a row of docs/evidence.jsonl


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters that are tuned. ``warmup`` is a fraction of the steps."""

    lr: float
    warmup: float

    def options(self, steps: int) -> tuple[str, ...]:
        warmup = round(self.warmup * steps)
        return (
            f"--training.steps={steps}",
            f"--optimizer.lr={self.lr:g}",
            f"--lr_scheduler.warmup_steps={warmup}",
        )

    def __str__(self) -> str:
        return f"lr-{self.lr:g}_warmup-{self.warmup:g}"


@dataclass(frozen=True)
class Job:
    """A run, and the texts that it is measured on."""

    part: str
    condition: str  # the runs of a condition differ in their seeds only
    seed: int
    options: tuple[str, ...]  # in addition to the config file, without paths
    # development, test, or new_test (from the held-back package)
    texts: tuple[str, ...] = ("test",)
    ranks: int = 1
    # options that name files; they are not part of the recipe
    paths: tuple[str, ...] = ()
    # the run that it starts from, which must have finished
    parent: tuple[str, str, int] | None = None
    begins: str = ""  # the parent's recipe, in words

    @property
    def trained(self) -> bool:
        """Whether it has options.

        Otherwise the parent itself is measured, on other texts than in its own part.
        """
        return bool(self.options)

    @property
    def name(self) -> str:
        return f"{self.condition}_seed-{self.seed}"

    @property
    def key(self) -> tuple[str, str, int]:
        return self.part, self.condition, self.seed

    def recipe(self, config: str | Path = CONFIG) -> str:
        """Return a hash of all that decides the run except code and corpus: config,
        options, ranks, texts and parent.
        """
        content = tomli.loads(Path(config).read_text())
        own = {
            name: getattr(self, name)
            for name in ("options", "ranks", "texts", "parent", "begins")
        }
        return hashlib.sha256(
            json.dumps({"config": content, **own}, sort_keys=True).encode()
        ).hexdigest()[:12]


def key_of(row: Row) -> tuple[str, str, int]:
    """Return the key of a row's run.

    Restored rows name the run whose model was trained again.
    """
    return (
        tuple(row["of"])
        if row["part"] == RESTORED
        else (row["part"], row["condition"], row["seed"])
    )


def newest(rows: Iterable[Row]) -> dict[tuple[str, str, int], Row]:
    """Return the last row of each run; a failed run that was tried again has two
    rows.
    """
    return {key_of(row): row for row in rows if "condition" in row}


def _options(
    state: str, recipe: Recipe, seed: int, *changed: str, steps: int = 0
) -> tuple[str, ...]:
    dispersion = "--dispersion.enabled" if state == "on" else "--dispersion.no-enabled"
    seeds = (f"--debug.seed={seed}", f"--stream.seed={seed}")
    return (dispersion, *changed, *recipe.options(steps or STEPS), *seeds)


def _grid(part: str) -> tuple[tuple[str, ...], tuple[float, ...], tuple[float, ...]]:
    """Return what a part tunes, which are states, or states with an MLP width
    ("off-16"), by which rates and warm-ups.
    """
    if part == "tuning":
        return STATES, LRS, WARMUPS
    widths = WIDTHS[1:2] if part == "long-tuning" else WIDTHS
    return (
        tuple(f"{state}-{width}" for width in widths for state in STATES),
        WIDTH_LRS,
        (WIDTH_WARMUP,),
    )


def _tried(part: str, name: str, recipe: Recipe) -> str:
    return f"{name}_{recipe}" if part == "tuning" else f"{name}_lr-{recipe.lr:g}"


def tuning_losses(
    rows: Iterable[Row], name: str, lrs: Sequence[float], part: str = "tuning"
) -> dict[Recipe, list[float]]:
    """Return the development cross-entropy of the seeds; it is infinite for a failed
    run, which then ranks last.
    """
    known = newest(rows)
    found = {}
    for recipe in (Recipe(lr, warmup) for lr in lrs for warmup in _grid(part)[2]):
        own = [
            known.get((part, _tried(part, name, recipe), seed)) for seed in TUNING_SEEDS
        ]
        found[recipe] = [
            row["numbers"]["development"]["cross_entropy"]
            if row["status"] == "finished"
            else float("inf")
            for row in own
            if row is not None
        ]
    return found


def best_recipe(
    rows: Iterable[Row],
    name: str,
    part: str = "tuning",
    lrs: Sequence[float] | None = None,
) -> Recipe | None:
    """Return the recipe with the lowest mean over the seeds; None if runs are missing
    or all failed.

    Of equal ones, it has the lowest learning rate. In the second experiment, those
    within ``TIE`` count as equal.
    """
    losses = tuning_losses(rows, name, lrs or learning_rates(rows, name, part), part)
    if any(len(values) < len(TUNING_SEEDS) for values in losses.values()):
        return None
    sums = {recipe: sum(values) for recipe, values in losses.items()}
    least = min(sums.values())
    margin = 0.0 if part == "tuning" else TIE * len(TUNING_SEEDS)
    tied = [recipe for recipe, total in sums.items() if total <= least + margin]
    return min(tied, key=lambda recipe: recipe.lr) if least < float("inf") else None


def learning_rates(
    rows: Iterable[Row], name: str, part: str = "tuning"
) -> tuple[float, ...]:
    """Return the learning rates to try: one beyond, half or twice, if the best of the
    grid is at its edge.
    """
    _, lrs, _ = _grid(part)
    best = best_recipe(rows, name, part, lrs)
    beyond = {lrs[-1]: (lrs[-1] * 2,), lrs[0]: (lrs[0] / 2,)}
    return lrs if best is None else lrs + beyond.get(best.lr, ())


def tuned(rows: Sequence[Row], part: str = "tuning") -> dict[str, Recipe]:
    """Return the best recipes of all that a part tunes, or nothing if it is not
    complete.
    """
    found = {name: best_recipe(rows, name, part) for name in _grid(part)[0]}
    return (
        {name: best for name, best in found.items() if best}
        if all(found.values())
        else {}
    )


def rates_tried(rows: Sequence[Row], part: str) -> list[float]:
    return sorted(
        {lr for name in _grid(part)[0] for lr in learning_rates(rows, name, part)}
    )


def _tuned_run(part: str, name: str, recipe: Recipe, seed: int) -> Job:
    """Return a run of tuning or of the second experiment.

    ``name`` is "off", "off-16", "cosine-192" or "cosine@1-192".
    """
    state, _, width = name.partition("-")
    loss, _, coeff = state.partition("@")
    own = (f"--dispersion.variant={loss}",) if state not in STATES else ()
    own += (f"--dispersion.coeff={coeff}",) if coeff else ()
    own += (
        (f"--model.overrides=hidden_dim={width}", "--condensation.interval=100")
        if width
        else ()
    )
    steps = LONG if part.startswith("long") else STEPS
    options = _options(
        "off" if state == "off" else "on", recipe, seed, *own, steps=steps
    )
    tunes = part.endswith("tuning")
    condition, text = (
        (_tried(part, name, recipe), "development") if tunes else (name, "test")
    )
    return Job(part, condition, seed, options, (text,))


def _tuning(part: str, rows: Sequence[Row]) -> list[Job]:
    names, _, warmups = _grid(part)
    return [
        _tuned_run(part, name, Recipe(lr, warmup), seed)
        for name in names
        for lr in learning_rates(rows, name, part)
        for warmup in warmups
        for seed in TUNING_SEEDS
    ]


def _second(part: str, rows: Sequence[Row]) -> list[Job]:
    """Return the runs of a part of the second experiment.

    What needs learning rates has none before they are tuned.
    """
    grid = "long-tuning" if part == "long-tuned" else "widths-tuning"
    recipes = {name: best_recipe(rows, name, grid) for name in _grid(grid)[0]}
    if part == "losses":
        losses = (*OTHER_LOSSES, *(f"{loss}@1" for loss in STRONG_LOSSES))
        recipes = {f"{loss}-{WIDTHS[1]}": recipes[f"on-{WIDTHS[1]}"] for loss in losses}
    elif part == "widths-again":
        recipes = {
            name: recipe
            for name, recipe in recipes.items()
            if name.endswith(f"-{WIDTHS[1]}")
        }
    number = {"losses": 3, "long-tuned": 4}.get(part, 8)
    seeds = AGAIN_SEEDS if part == "widths-again" else SECOND_SEEDS[:number]
    return [
        _tuned_run(part, name, recipe, seed)
        for seed in seeds
        for name, recipe in recipes.items()
        if recipe is not None
    ]


def jobs(part: str, rows: Sequence[Row]) -> list[Job]:
    """Return the runs of a part.

    Before tuning is complete, all other parts have none.
    """
    if part.endswith("tuning"):
        return _tuning(part, rows)
    if part in SECOND:
        return _second(part, rows)
    recipes = tuned(rows)
    if not recipes:
        return []
    off = recipes["off"]
    if part == "noise":
        return _noise(off)
    if part == "midtraining":
        return _midtraining(off)
    seeds = SEEDS if part in ("main", "width") else FEW_SEEDS
    steps = LONG if part == "long" else STEPS
    shape = {
        "width": (f"--model.overrides=hidden_dim={NARROW}",),
        "depth": (f"--model.overrides=n_layers={DEEP}",),
    }
    conditions: dict[str, tuple[str, ...]] = dict.fromkeys(STATES, shape.get(part, ()))
    if part == "main":
        conditions["on-0.03"] = ("--dispersion.coeff=0.03",)
        conditions["on-first-quarter"] = (
            "--dispersion.decay=linear",
            f"--dispersion.decay_steps={QUARTER}",
        )
        conditions["on-moments"] = ("--dispersion.estimator=moments",)
        conditions["noisy-embedding"] = (
            "--baseline.method=noisy_embedding",
            f"--baseline.noise_alpha={NOISE_ALPHA}",
        )
    return [
        Job(
            part,
            name,
            seed,
            _options(state, recipes.get(state, off), seed, *changed, steps=steps),
        )
        for name, changed in conditions.items()
        for state in [name.partition("-")[0]]
        for seed in seeds
    ]


def _noise(off: Recipe) -> list[Job]:
    """Return repetitions of main's off: with the sums of a step in another order, and
    once without a change.
    """
    small, large = (f"--training.local_batch_size={size}" for size in (4, 8))
    arrangements = (
        ("accumulation-4", 1, (small,), FEW_SEEDS),
        ("2-ranks", 2, (large,), FEW_SEEDS),
        ("again", 1, (), FEW_SEEDS[:1]),
    )
    return [
        Job("noise", name, seed, (*_options("off", off, seed), *changed), ranks=ranks)
        for name, ranks, changed, seeds in arrangements
        for seed in seeds
    ]


def _midtraining(off: Recipe) -> list[Job]:
    """Return main's off models, before and after training on the held-back package."""
    recipe = Recipe(off.lr * MIDTRAINING_LR, MIDTRAINING_WARMUP)
    last = "--lr_scheduler.min_lr_factor=0"
    found = [Job("midtraining", "before", seed, (), ("new_test",)) for seed in SEEDS]
    for name in ("off", *COEFFS):
        state, _, value = name.partition("-")
        coeff = (f"--dispersion.coeff={value}",) if value else ()
        for seed in SEEDS:
            *options, debug, stream = _options(
                state, recipe, seed, *coeff, steps=MIDTRAINING
            )
            start = f"--checkpoint.initial_load_path={{runs}}/main/off_seed-{seed}/checkpoint/step-{STEPS}"
            paths = ("--training.dataset_path={data}/held_back", start)
            options = (*options, last, debug, stream)
            found.append(
                Job(
                    "midtraining",
                    name,
                    seed,
                    options,
                    ("test", "new_test"),
                    paths=paths,
                )
            )
    begins = f"{off}_steps-{STEPS}"
    return [
        replace(job, parent=("main", "off", job.seed), begins=begins) for job in found
    ]
