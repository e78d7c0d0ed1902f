"""What every variant promises: layers, options and their refusal, documentation; λ's
schedule; and a config's loss.
"""

import copy
import dataclasses
import importlib
import inspect
import itertools
import json
import math
import pickle
import pkgutil
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch

from tests.command_line import DEMO, ROOT
from tests.distributed import spawn
from tests.mesh import build
from tests.oracle import EVERY_LOSS, drawn, loss_and_gradient, tokens
from tests.pages import changed, loaded
from titan_disp.checks import (
    build_dispersion_losses,
    check_config,
)
from titan_disp.cluster.plan import make_plan
from titan_disp.config.command_options import Machine
from titan_disp.config.load import load_config
from titan_disp.dispersion import (
    DispersionLoss,
    dispersion_loss,
    dispersion_losses,
    variants,
)
from titan_disp.dispersion.loss import ESTIMATORS
from titan_disp.dispersion.variants import VARIANTS, Variant, options_of
from titan_disp.errors import ConfigError
from titan_disp.job_config import Dispersion
from titan_disp.models.registry import MODELS
from titan_disp.schedules import CoeffSchedule, build_coeff_schedule, schedule_warnings
from titan_disp.spec import train_spec


@pytest.mark.parametrize(("variant", "estimator", "options"), EVERY_LOSS, ids=str)
def test_a_second_derivative_is_an_error(variant, estimator, options):
    """The saved gradient is no function of z: its derivative must not be a wrong
    number, or a part of the right one.
    """
    loss = DispersionLoss(variant, estimator, **options, **drawn(estimator, 5))
    z = tokens(2, 12, 8).double().requires_grad_(True)
    weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    value = loss([z]).sum()
    expected = torch.autograd.grad(
        value, z, 0.7 * torch.ones_like(value), retain_graph=True
    )[0]
    torch.testing.assert_close(0.7 * torch.autograd.grad(value, z)[0], expected)
    for of_gradient, by in (
        (torch.sum, z),
        (lambda grad: (grad * z).sum(), z),
        (lambda grad: grad.square().sum(), weight),
    ):
        (grad,) = torch.autograd.grad(weight * loss([z]).sum(), z, create_graph=True)
        torch.testing.assert_close(grad, expected)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(of_gradient(grad), by)


@pytest.mark.parametrize(("variant", "estimator", "options"), EVERY_LOSS, ids=str)
def test_copies_after_a_call(variant, estimator, options):
    loss = DispersionLoss(variant, estimator, **options, **drawn(estimator, 5))
    z = tokens(2, 12, 8)
    expected = loss([z], fit_errors=[])
    for copied in (pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)):
        assert copied == loss
        assert torch.equal(copied([z], fit_errors=[]), expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_layers_of_several_dtypes(estimator):
    """transformers gives the embeddings in float32 and the blocks' outputs in bf16
    under autocast.
    """
    z = tokens(2, 40, 8).bfloat16()
    options = {"estimator": estimator, **drawn(estimator, 10)}
    results = []
    for zs in ([z.float(), z.clone()], [z.float(), z.float()]):
        losses = dispersion_losses([one.requires_grad_(True) for one in zs], **options)
        losses.sum().backward()
        assert [one.grad.dtype for one in zs] == [one.dtype for one in zs]
        results.append([losses.detach(), *(one.grad.float() for one in zs)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=5e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"estimator": "fast"},
            "estimator is 'fast', expected one of exact, moments, sampled",
        ),
        (
            {"variant": "decorrelation", "estimator": "moments"},
            "grows only linearly with the tokens",
        ),
        ({"max_tokens": 1}, "max_tokens is 1, expected at least 2"),
        (
            {"max_tokens": 10},
            "max_tokens is 10, but estimator 'exact' does not use it: leave it at 256 .*sampled",
        ),
        (
            {"max_tokens": 10, "estimator": "moments"},
            "estimator 'moments' does not use it",
        ),
        (
            {"variant": "l2_repel", "norm_coeff": -1.0},
            "norm_coeff is -1.0, expected a number",
        ),
        ({"tau": 1e-3}, "tau is 0.001"),
        ({"tau": math.nan}, "tau is nan"),
        # which would get no gradient
        ({"tau": torch.tensor(1.0)}, "tau is a tensor, expected a number"),
        ({"clamp": 1.0}, "clamp is 1.0"),
        ({"clamp": -0.1}, "clamp is -0.1"),
        ({"norm_eps": 1e-300}, "norm_eps is 1e-300, expected a number"),  # 0 in float32
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DispersionLoss(**options)


Z = torch.zeros(2, 4, 3)


@pytest.mark.parametrize(
    ("zs", "message"),
    [
        (
            Z,
            "expected one tensor per layer in a list: for a single layer, call dispersion_loss",
        ),
        ([], "no layers"),
        ((None, Z), "layer 0 is None, expected a float tensor"),
        ([Z[0]], r"shape \(4, 3\)"),
        ([Z.long()], "dtype torch.int64, expected a float tensor"),
        ([Z[:, :1]], r"1 token\(s\), expected at least 2"),
        (
            [Z, Z[:1]],
            r"layers differ in sequences or tokens per sequence: \(2, 4, 3\), \(1, 4, 3\)",
        ),
        ([Z, torch.zeros(2, 6, 3)], r"tokens per sequence: \(2, 4, 3\), \(2, 6, 3\)"),
        ([Z[..., :0]], "has no features"),
        (
            [Z, torch.zeros(2, 4, 5)],
            r"layers differ in features: \[3, 5\], which the sampled estimator",
        ),
    ],
)
def test_wrong_layers_are_refused(zs, message):
    with pytest.raises(ValueError, match=message):
        dispersion_losses(zs, estimator="sampled", max_tokens=2)


@pytest.mark.parametrize(
    "option",
    sorted({option for kind in VARIANTS.values() for option in options_of(kind)}),
)
def test_an_option_reaches_its_variants_and_is_refused_by_others(option):
    """Those that have no key of their own are in a table."""
    users = [kind for kind in VARIANTS.values() if option in options_of(kind)]
    key = option in {field.name for field in dataclasses.fields(DispersionLoss)}
    default = getattr(DispersionLoss() if key else users[0](), option)
    value = not default if isinstance(default, bool) else default / 2
    for name, kind in VARIANTS.items():
        given = {option: value} if key else {"options": {option: value}}
        if kind in users:
            assert getattr(DispersionLoss(name, **given)._variant, option) == value
            continue
        known = f"leave it at {default} (it is an option of {', '.join(user.name for user in users)})"
        message = (
            rf"{option} is {value}, .* {re.escape(known)}"
            if key
            else rf"options.{option} is not known.*; expected \w"
        )
        with pytest.raises(ValueError, match=message):
            DispersionLoss(name, **given)


def subclasses(base):
    """Also those of subclasses."""
    direct = base.__subclasses__()
    return {*direct, *itertools.chain.from_iterable(map(subclasses, direct))}


def test_every_variant_is_in_the_table():
    """A class in the folder that ``VARIANTS`` does not list would be an unknown name,
    and nothing more.
    """
    package = f"{variants.__name__}."
    for module in pkgutil.iter_modules(variants.__path__, package):
        importlib.import_module(module.name)
    complete = {
        kind
        for kind in subclasses(Variant)
        if kind.__module__.startswith(package) and not inspect.isabstract(kind)
    }
    assert complete == set(VARIANTS.values()), "complete VARIANTS"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_documented(variant):
    """In docs/losses.md: its estimators, its options, which a user would otherwise have
    to guess, and their defaults.
    """
    kind = VARIANTS[variant]
    page = (ROOT / "docs" / "losses.md").read_text()
    found = re.findall(rf"(?m)^\| `{variant}` \| (?:.+ \| ){{2}}(.+) \| (.+) \|$", page)
    assert len(found) == 1, f"add a row for {variant!r} to the table in docs/losses.md"
    ((estimators, options),) = found
    assert estimators == ", ".join(kind.estimators)
    defaults = {
        f.name: f.default
        for one in (kind, DispersionLoss)
        for f in dataclasses.fields(one)
    }
    found = {
        name: json.loads(value)
        for name, value in re.findall(r"`(\w+) = (\S+)`", options)
    }
    assert repr(found) == repr({name: defaults[name] for name in found})
    assert found.keys() == set(options_of(kind))


def test_loss_of_a_config():
    """No option of [dispersion] gets lost on the way, nor the seed of the positions."""
    config = load_config(["--debug.seed", "11"])
    assert get_args(get_type_hints(Dispersion)["estimator"]) == ESTIMATORS
    sampled = {
        "estimator": "sampled",
        "max_tokens": 7,
        "tau": 0.3,
        "norm_coeff": 0.4,
        "include_diagonal": False,
    }
    for options in (
        {},
        {"variant": "l2_repel", **sampled},
        {"variant": "orthogonalization", "clamp": 0.1, "norm_eps": 0.02},
    ):
        own = changed(
            config, {f"dispersion.{name}": value for name, value in options.items()}
        )
        assert list(build_dispersion_losses(own).values()) == [
            (1.0, DispersionLoss(**options, seed=11))
        ]


def test_schedule_of_a_config():
    """λ of every step, against the formulas written out: 2 steps of warm-up and 9 in
    all, so that step 8 is the last.
    """
    config = load_config(["--training.steps", "9"])
    config.dispersion.coeff = 0.4
    config.dispersion.warmup_steps = 2
    config.dispersion.final_coeff = 0.1
    after_warmup = {
        "constant": lambda step: 0.4,
        "linear": lambda step: 0.4 - 0.3 * (step - 2) / 6,
        "cosine": lambda step: 0.1 + 0.3 * (1 + math.cos(math.pi * (step - 2) / 6)) / 2,
    }
    for decay, expected in after_warmup.items():
        config.dispersion.decay = decay
        schedule = build_coeff_schedule(config)
        assert [schedule(step) for step in range(9)] == pytest.approx(
            [0.2, 0.4, *map(expected, range(2, 9))]
        )
    config.dispersion.decay_steps = 3  # from 0.4 to 0.1, a cosine
    found = [build_coeff_schedule(config)(step) for step in range(9)]
    assert found == pytest.approx([0.2, 0.4, 0.4, 0.325, 0.175, 0.1, 0.1, 0.1, 0.1])


def test_edges_of_a_schedule():
    assert CoeffSchedule(1.0, 0, "linear", 0.5, 2)(1) == 0.5
    assert CoeffSchedule(1.0, 3, "linear", 0.5, 3)(2) == 1.0  # nothing but warm-up
    assert CoeffSchedule(1.0, 2, "linear", 0.5, 3)(2) == 1.0  # one step is left
    late = {"decay": "linear", "warmup_steps": 1, "decay_steps": 3}  # 2 steps are left
    for bad in (
        {"warmup_steps": 5},
        {"decay": "step"},
        {"decay_steps": 2},
        late,
    ):
        with pytest.raises(ValueError, match="expected"):
            CoeffSchedule(**{"coeff": 1.0, "total_steps": 3} | bad)


def test_a_negative_lambda(caplog):
    """It is allowed: the plan and the start of a run warn once, as the schedule does.

    Zero is no negative number.
    """
    message = "λ is -0.1, which is negative: it condenses the embeddings"
    for given in (
        {"coeff": -0.1},
        {"coeff": 0.3, "decay": "linear", "final_coeff": -0.1},
    ):
        with pytest.warns(UserWarning, match=message):
            schedule = CoeffSchedule(**given, total_steps=3)
        assert schedule(2) == -0.1
        words = [f"--dispersion.{name}={value}" for name, value in given.items()]
        job = loaded(DEMO, *words)
        dims = SimpleNamespace(tp_enabled=False, get_optional_mesh=lambda name: None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plan = make_plan(job, Machine(1, 1))
            caplog.clear()
            train_spec(MODELS["qwen3_disp"]).build_loss_fn(job, dims)
        for lines in (plan.warnings, caplog.messages):
            assert [message in line for line in lines].count(True) == 1
    for words in (
        ["--dispersion.coeff=0"],
        ["--dispersion.coeff=-1", "--dispersion.no-enabled"],
        ["--dispersion.final_coeff=-1"],  # which a constant λ never has
    ):
        short = ("--training.steps=3", "--lr_scheduler.warmup_steps=1")
        assert not list(schedule_warnings(loaded(DEMO, *short, *words)))


@pytest.mark.parametrize("name", ["coeff", "final_coeff"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_lambda_is_a_finite_number(name, value):
    message = rf"^dispersion.{name} is {value}, expected a (finite )?number"
    with pytest.raises(ConfigError, match=message):
        check_config(
            loaded(DEMO, f"--dispersion.{name}={value}", "--dispersion.decay=linear"), 1
        )


def moments_during_training(sample, folder):
    """Gradients of moments against exact, on all layers' activations, at several
    moments of a run without dispersion.
    """
    words = (
        "--dispersion.no-enabled",
        "--training.seq_len",
        "256",
        "--training.steps",
        "40",
        "--optimizer.lr",
        "4e-3",
    )
    words += (
        "--training.max_norm",
        "1.0",
        "--lr_scheduler.warmup_steps",
        "5",
        "--stream.prefetch",
        "0",
    )
    trainer = build(sample, Path(folder) / "run", *words)
    batches = trainer.batch_generator(trainer.dataloader)
    inputs = next(batches)[0]["input"]
    model = trainer.model_parts[0]
    condensed = []
    for step in range(41):
        if step <= 15 or step == 40:
            with torch.no_grad():
                layers = model(inputs, return_activations=range(7)).activations
            for z in layers:
                exact, found = (
                    loss_and_gradient(dispersion_loss, z, estimator=e)[1]
                    for e in ("exact", "moments")
                )
                assert (
                    torch.nn.functional.cosine_similarity(
                        exact.flatten(), found.flatten(), dim=0
                    )
                    >= 0.999
                ), step
                assert 0.97 <= found.norm() / exact.norm() <= 1.03, step
                fit_errors = []
                DispersionLoss(estimator="moments")([z], fit_errors=fit_errors)
                assert (found - exact).norm() / exact.norm() <= fit_errors[
                    0
                ].max() + 0.01, step
            u = torch.nn.functional.normalize(layers[-1], dim=-1)
            condensed.append((u @ u.transpose(1, 2)).mean().item())
        trainer.step += 1
        trainer.train_step(batches)
    # The run's embeddings pass through what the fit must bear: nearly isotropic at
    # first, then a narrow cone.
    assert min(condensed) < 0.2
    assert max(condensed) > 0.8
    trainer.close()


@pytest.mark.slow
def test_moments_on_a_model_in_training(sample, tmp_path):
    spawn(1, moments_during_training, str(sample), str(tmp_path))
