"""The runs of the experiment, part by part: docs/evidence_design.md as options of train_configs/evidence.toml."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli

CONFIG = "train_configs/evidence.toml"
STEPS, LONG, MIDTRAINING = 600, 2400, 200
QUARTER = STEPS // 4  # the steps in which on-first-quarter has dispersion
NARROW, DEEP = 16, 12  # the MLP's width, and the layers
NOISE_ALPHA = 5  # NEFTune's α
MIDTRAINING_LR, MIDTRAINING_WARMUP = 0.1, 0.2  # as fractions of off's learning rate and of the steps
SEEDS = tuple(range(1, 9))
FEW_SEEDS = SEEDS[:4]  # for the parts that take longer
TUNING_SEEDS = (101, 102)  # used in no other part
SECOND_SEEDS, AGAIN_SEEDS = tuple(range(11, 19)), tuple(range(21, 29))  # the first experiment's suggested the second
LRS, WARMUPS = (1e-3, 2e-3, 4e-3, 8e-3), (0.05, 0.2)
ALL_LRS = (LRS[0] / 2, *LRS, LRS[-1] * 2)  # and those beyond
STATES = ("off", "on")
WIDTHS, WIDTH_LRS, WIDTH_WARMUP = (16, 192, 768), (0.016, 0.032, 0.064), 0.2  # the second experiment
TIE = 0.01  # nats; of learning rates that differ by less, the lowest is taken
OTHER_LOSSES = ("orthogonalization", "decorrelation", "l2_repel", "uniformity", "cosine", "simctg", "koleo")
STRONG_LOSSES = ("decorrelation", "uniformity")  # with λ 1 as well
RESTORED = "restored"  # rows of models that were trained again because a later part needs their files
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
TRAINED = ("main", "width", "depth", "long")  # the parts that compare on with off from scratch

Row = Mapping[str, Any]  # a row of docs/evidence.jsonl


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters that are tuned. ``warmup`` is a fraction of the steps."""

    lr: float
    warmup: float

    def options(self, steps: int) -> tuple[str, ...]:
        warmup = round(self.warmup * steps)
        return (f"--training.steps={steps}", f"--optimizer.lr={self.lr:g}", f"--lr_scheduler.warmup_steps={warmup}")

    def __str__(self) -> str:
        return f"lr-{self.lr:g}_warmup-{self.warmup:g}"


@dataclass(frozen=True)
class Job:
    """A run, and the texts that it is measured on."""

    part: str
    condition: str  # the runs of a condition differ in their seeds only
    seed: int
    options: tuple[str, ...]  # in addition to the config file, without paths
    texts: tuple[str, ...] = ("test",)  # development, test, or new_test (from the held-back package)
    ranks: int = 1
    paths: tuple[str, ...] = ()  # options that name files; they are not part of the recipe
    parent: tuple[str, str, int] | None = None  # the run that it starts from, which must have finished
    begins: str = ""  # the parent's recipe, in words
    trained: bool = True  # false if the parent itself is measured, on other texts than in its own part

    @property
    def name(self) -> str:
        return f"{self.condition}_seed-{self.seed}"

    @property
    def key(self) -> tuple[str, str, int]:
        return self.part, self.condition, self.seed

    def recipe(self, config: str | Path = CONFIG) -> str:
        """Return a hash of all that decides the run except code and corpus: config, options, ranks, texts and parent."""
        content = tomli.loads(Path(config).read_text())
        own = {name: getattr(self, name) for name in ("options", "ranks", "texts", "parent", "begins")}
        return hashlib.sha256(json.dumps({"config": content, **own}, sort_keys=True).encode()).hexdigest()[:12]


def key_of(row: Row) -> tuple[str, str, int]:
    """Return the key of a row's run. Restored rows name the run whose model was trained again."""
    part, condition, seed = row["of"] if row["part"] == RESTORED else (row["part"], row["condition"], row["seed"])
    return part, condition, seed


def newest(rows: Iterable[Row]) -> dict[tuple[str, str, int], Row]:
    """Return the last row of each run; a failed run that was tried again has two rows."""
    return {key_of(row): row for row in rows if "condition" in row}


def _options(state: str, recipe: Recipe, seed: int, *changed: str, steps: int = 0) -> tuple[str, ...]:
    dispersion = "--dispersion.enabled" if state == "on" else "--dispersion.no-enabled"
    seeds = (f"--debug.seed={seed}", f"--stream.seed={seed}")
    return (dispersion, *changed, *recipe.options(steps or STEPS), *seeds)


def tuning(rows: Iterable[Row]) -> list[Job]:
    """Return the grid. If a state's best learning rate is at its edge, it is extended by one, once."""
    rows = list(rows)
    grid = [(state, lr) for state in STATES for lr in LRS]
    grid += [(state, lr) for state in STATES for lr in _lrs(rows, state) if lr not in LRS]
    return [
        Job("tuning", f"{state}_{recipe}", seed, _options(state, recipe, seed), ("development",))
        for state, lr in grid
        for recipe in (Recipe(lr, warmup) for warmup in WARMUPS)
        for seed in TUNING_SEEDS
    ]


def tuning_losses(rows: Iterable[Row], state: str, lrs: Sequence[float]) -> dict[Recipe, list[float]]:
    """Return the development cross-entropy of the seeds; it is infinite for a failed run, which then ranks last."""
    known, found = newest(rows), {}
    for recipe in (Recipe(lr, warmup) for lr in lrs for warmup in WARMUPS):
        own = [known.get(("tuning", f"{state}_{recipe}", seed)) for seed in TUNING_SEEDS]
        found[recipe] = [
            row["numbers"]["development"]["cross_entropy"] if row["status"] == "finished" else float("inf")
            for row in own
            if row is not None
        ]
    return found


def best_recipe(rows: Iterable[Row], state: str, lrs: Sequence[float]) -> Recipe | None:
    """Return the (first) recipe with the lowest mean over the seeds; None if runs are missing or all failed."""
    losses = tuning_losses(rows, state, lrs)
    if any(len(values) < len(TUNING_SEEDS) for values in losses.values()):
        return None
    best = min(losses, key=lambda recipe: sum(losses[recipe]))
    return best if sum(losses[best]) < float("inf") else None


def _lrs(rows: Iterable[Row], state: str) -> tuple[float, ...]:
    """Return the learning rates of a state: one more if the best one is at the edge."""
    best = best_recipe(rows, state, LRS)
    if best is None or best.lr not in (LRS[0], LRS[-1]):
        return LRS
    return (*LRS, ALL_LRS[0] if best.lr == LRS[0] else ALL_LRS[-1])


def tuned(rows: Iterable[Row]) -> dict[str, Recipe] | None:
    """Return the recipes of the other parts by state, or None if tuning is not complete."""
    rows = list(rows)
    found = {state: best_recipe(rows, state, _lrs(rows, state)) for state in STATES}
    return {state: best for state, best in found.items() if best} if all(found.values()) else None


def _grid_part(long: bool) -> tuple[str, int, tuple[int, ...]]:
    """Return the part that tunes learning rates, its steps, and the widths for which it does."""
    return ("long-tuning", LONG, WIDTHS[1:2]) if long else ("widths-tuning", STEPS, WIDTHS)


def _with_width(part: str, name: str, lr: float, seed: int, steps: int, development: bool = False) -> Job:
    """Return a run of the second experiment. ``name`` is "off-16", "cosine-192" or "cosine@1-192" (λ 1)."""
    state, _, width = name.rpartition("-")
    loss, _, coeff = state.partition("@")
    other = (f"--dispersion.variant={loss}",) if state not in STATES else ()
    other += (f"--dispersion.coeff={coeff}",) if coeff else ()
    shape = (f"--model.overrides=hidden_dim={width}", "--condensation.interval=100")
    options = _options("off" if state == "off" else "on", Recipe(lr, WIDTH_WARMUP), seed, *other, *shape, steps=steps)
    condition, text = (f"{name}_lr-{lr:g}", "development") if development else (name, "test")
    return Job(part, condition, seed, options, (text,))


def width_losses(rows: Iterable[Row], name: str, long: bool = False) -> dict[float, list[float]]:
    """Return the development cross-entropies by learning rate of "off-16" and the like; infinite for a failed run."""
    part, _, _ = _grid_part(long)
    found: dict[float, list[float]] = {}
    for (own, condition, _), row in newest(rows).items():
        of, _, lr = condition.partition("_lr-")
        if (own, of) == (part, name):
            ce = row["numbers"]["development"]["cross_entropy"] if row["status"] == "finished" else float("inf")
            found.setdefault(float(lr), []).append(ce)
    return dict(sorted(found.items()))


def best_of_width(rows: Iterable[Row], name: str, lrs: Sequence[float], long: bool = False) -> float | None:
    """Return the lowest learning rate within ``TIE`` of the best one; None while runs are missing, or if all failed."""
    losses = width_losses(rows, name, long)
    if any(len(losses.get(lr, ())) < len(TUNING_SEEDS) for lr in lrs):
        return None
    least = min(sum(losses[lr]) for lr in lrs)
    tied = [lr for lr in lrs if sum(losses[lr]) <= least + TIE * len(TUNING_SEEDS)]
    return min(tied) if least < float("inf") else None


def width_lrs(rows: Iterable[Row], name: str, long: bool = False) -> tuple[float, ...]:
    """Return the learning rates to try: one beyond, half or twice, if the best of the first three is at their edge."""
    low, _, high = WIDTH_LRS
    beyond = {low: (low / 2,), high: (high * 2,)}
    return WIDTH_LRS + beyond.get(best_of_width(rows, name, WIDTH_LRS, long) or 0.0, ())


def _second(part: str, rows: Sequence[Row]) -> list[Job]:
    """Return the runs of a part of the second experiment. What needs learning rates has none before they are tuned."""
    long = part.startswith("long")
    tuning_part, steps, widths = _grid_part(long)
    names = [f"{state}-{width}" for width in widths for state in STATES]
    if part == tuning_part:
        return [
            _with_width(part, name, lr, seed, steps=steps, development=True)
            for name in names
            for lr in width_lrs(rows, name, long)
            for seed in TUNING_SEEDS
        ]
    tuned_lrs = {name: best_of_width(rows, name, width_lrs(rows, name, long), long) for name in names}
    if part == "losses":
        losses = (*OTHER_LOSSES, *(f"{loss}@1" for loss in STRONG_LOSSES))
        tuned_lrs = {f"{loss}-{WIDTHS[1]}": tuned_lrs[f"on-{WIDTHS[1]}"] for loss in losses}
    elif part == "widths-again":
        tuned_lrs = {name: lr for name, lr in tuned_lrs.items() if name.endswith(f"-{WIDTHS[1]}")}
    number = {"losses": 3, "long-tuned": 4}.get(part, 8)
    seeds = AGAIN_SEEDS if part == "widths-again" else SECOND_SEEDS[:number]
    return [
        _with_width(part, name, lr, seed, steps=steps)
        for seed in seeds
        for name, lr in tuned_lrs.items()
        if lr is not None
    ]


def jobs(part: str, rows: Iterable[Row]) -> list[Job]:
    """Return the runs of a part. Before tuning is complete, all other parts have none."""
    rows = list(rows)
    if part in SECOND:
        return _second(part, rows)
    if part == "tuning":
        return tuning(rows)
    recipes = tuned(rows)
    if recipes is None:
        return []
    off, on = recipes["off"], recipes["on"]
    if part == "noise":
        return _noise(off)
    if part == "midtraining":
        return _midtraining(off)
    conditions: dict[str, tuple[Recipe, tuple[str, ...]]] = {"off": (off, ()), "on": (on, ())}
    seeds, steps = SEEDS if part in ("main", "width") else FEW_SEEDS, LONG if part == "long" else STEPS
    if part == "main":
        quarter = ("--dispersion.decay=linear", f"--dispersion.decay_steps={QUARTER}")
        noisy = ("--baseline.method=noisy_embedding", f"--baseline.noise_alpha={NOISE_ALPHA}")
        conditions |= {"on-0.03": (on, ("--dispersion.coeff=0.03",)), "on-first-quarter": (on, quarter)}
        conditions |= {"on-moments": (on, ("--dispersion.estimator=moments",)), "noisy-embedding": (off, noisy)}
    shape = {"width": (f"--model.overrides=hidden_dim={NARROW}",), "depth": (f"--model.overrides=n_layers={DEEP}",)}
    return [
        Job(
            part,
            name,
            seed,
            _options(name.partition("-")[0], recipe, seed, *changed, *shape.get(part, ()), steps=steps),
        )
        for name, (recipe, changed) in conditions.items()
        for seed in seeds
    ]


def _noise(off: Recipe) -> list[Job]:
    """Return repetitions of main's off: with the sums of a step in another order, and once without a change."""
    arrangements = {"accumulation-4": (4, 1), "2-ranks": (8, 2)}  # local batch size, ranks
    return [
        *(
            Job("noise", name, seed, (*_options("off", off, seed), f"--training.local_batch_size={size}"), ranks=ranks)
            for name, (size, ranks) in arrangements.items()
            for seed in FEW_SEEDS
        ),
        Job("noise", "again", FEW_SEEDS[0], _options("off", off, FEW_SEEDS[0])),
    ]


def _midtraining(off: Recipe) -> list[Job]:
    """Return main's off models, before and after training on the held-back package."""
    recipe = Recipe(off.lr * MIDTRAINING_LR, MIDTRAINING_WARMUP)
    last = "--lr_scheduler.min_lr_factor=0"
    found = [Job("midtraining", "before", seed, (), ("new_test",), trained=False) for seed in SEEDS]
    for name in ("off", *COEFFS):
        state, _, value = name.partition("-")
        coeff = (f"--dispersion.coeff={value}",) if value else ()
        for seed in SEEDS:
            *options, debug, stream = _options(state, recipe, seed, *coeff, steps=MIDTRAINING)
            paths = (
                "--training.dataset_path={data}/held_back",
                f"--checkpoint.initial_load_path={{runs}}/main/off_seed-{seed}/checkpoint/step-{STEPS}",
            )
            options = (*options, last, debug, stream)
            found.append(Job("midtraining", name, seed, options, ("test", "new_test"), paths=paths))
    begins = f"{off}_steps-{STEPS}"
    return [replace(job, parent=("main", "off", job.seed), begins=begins) for job in found]
