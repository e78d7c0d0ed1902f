"""A loss from a package of its own: the file in docs/losses.md, found, checked,
sharded, padded and trained.
"""

import json
import re
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests import test_padding as padding
from tests.command_line import ROOT
from tests.distributed import spawn
from tests.mesh import trained
from tests.oracle import (
    ORACLES,
    cosines,
    drawing_order,
    drawn,
    loss_and_gradient,
    tokens,
)
from tests.pages import blocks, both_ways, loaded
from titan_disp.checks import build_dispersion_losses
from titan_disp.dispersion import (
    AutogradVariant,
    CosineVariant,
    DispersionLoss,
    MomentsVariant,
    dispersion_loss,
)
from titan_disp.dispersion.vectors import Standardized
from titan_disp.errors import ConfigError
from titan_disp.lab.export.model_card import model_card
from titan_disp.lab.export.saved import find_saved
from titan_disp.lab.report.gather import gather
from titan_disp.lab.report.tables import dispersion
from titan_disp.run.reader import read_events, read_metrics

(RECIPE,) = blocks((ROOT / "docs" / "losses.md").read_text(), "python")
CASES = [
    (
        f"my_losses:{name}",
        estimator,
        ({"options": {"margin": 0.2}} if name == "Band" else {}) | drawn(estimator, 24),
    )
    for name in ("Band", "Participation", "Entropy")
    for estimator in ("exact", "sampled")
]


def eigenvalues(z):
    """Of Σ z_i z_iᵀ, or of the matrix of inner products, whichever is smaller; each as
    a part of their sum.
    """
    gram = z @ z.transpose(1, 2) if z.shape[1] < z.shape[2] else z.transpose(1, 2) @ z
    found = torch.linalg.eigvalsh(gram)
    return found / found.sum(-1, keepdim=True)


OWN = {
    "my_losses:Band": lambda z, margin=0.5: (
        (cosines(z) - margin).clamp_min(0).square().mean(1)
    ),
    "my_losses:Participation": lambda z: eigenvalues(z).square().sum(-1),
    "my_losses:Entropy": lambda z: (
        eigenvalues(z) * (eigenvalues(z) + 1e-12).log()
    ).sum(-1),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where Python finds my_losses.py, and other modules."""
    for name, text in (("my_losses", RECIPE), ("various", MODULE), ("broken", "1 / 0")):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_recipe(folder, monkeypatch, case):
    for name, formula in OWN.items():
        monkeypatch.setitem(ORACLES, name, formula)
    for features in (6, 70):
        padding.check(features, case)


@dataclass(frozen=True)
class Upper(MomentsVariant):
    """Reads one of two equal entries of M, and s; of standardized tokens, whose
    gradient is no sum of such tokens.
    """

    def units(self, z):
        return Standardized(z)

    def loss(self, s, m, tokens):
        return (m.triu().square().sum((1, 2)) + s.pow(3).sum(1)) / tokens


def upper(z):
    u = (z - z.mean(-1, keepdim=True)) / (
        z.std(-1, keepdim=True) * (z.shape[-1] - 1) ** 0.5
    )
    return (
        (u.transpose(1, 2) @ u).triu().square().sum((1, 2)) + u.sum(1).pow(3).sum(1)
    ) / z.shape[1]


def of_pairs(pair):
    return type("OfPairs", (CosineVariant,), {"pair": property(lambda self: pair)})()


def of_tokens(loss):
    return type(
        "OfTokens",
        (AutogradVariant,),
        {"loss": lambda self, z, valid, context: loss(z)},
    )()


KEPT = torch.ones(12, 12, dtype=torch.float64)


@pytest.mark.parametrize(
    ("variant", "formula"),
    [
        (Upper(), upper),
        (of_pairs(lambda c: (e := c.exp(), e)), lambda z: cosines(z).exp().mean(1)),
        (of_pairs(lambda c: (c, KEPT)), lambda z: cosines(z).mean(1)),
        (
            of_pairs(lambda c: (c, torch.ones((), dtype=c.dtype).expand_as(c))),
            lambda z: cosines(z).mean(1),
        ),
        (of_tokens(lambda z: z.sum((1, 2))), lambda z: z.sum((1, 2))),
    ],
    ids=[
        "half of M",
        "w and r are one tensor",
        "r is kept",
        "r is expanded",
        "the gradient is expanded",
    ],
)
def test_what_a_loss_returns_is_differentiated_and_not_overwritten(variant, formula):
    z = 3 * tokens(2, 12, 8).double()
    for valid in (None, torch.arange(12) < torch.tensor([[12], [7]])) * 2:
        found = loss_and_gradient(dispersion_loss, z, variant=variant, valid=valid)
        lengths = (12, 12) if valid is None else (12, 7)
        expected = loss_and_gradient(
            lambda z, n=lengths: torch.cat(
                [formula(z[b : b + 1, : n[b]]) for b in (0, 1)]
            ),
            z,
        )
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


class Recorded(AutogradVariant):
    seen: list = []  # noqa: RUF012

    def loss(self, z, valid, context):
        self.seen.append((z.detach(), valid, context))
        return z.square().sum((1, 2)) * (1 + context.layer)


def test_what_an_autograd_loss_is_given(monkeypatch):
    zs = [tokens(2, 10, 4, seed).bfloat16().requires_grad_(True) for seed in range(2)]
    valid = torch.arange(10) < torch.tensor([[10], [4]])
    for options in ({}, {"estimator": "sampled", "max_tokens": 6}):
        monkeypatch.setattr(Recorded, "seen", [])
        DispersionLoss(Recorded(), **options)(zs, step=7, valid=valid).sum().backward()
        assert [(c.step, c.layer, c.group) for _, _, c in Recorded.seen] == [
            (7, 0, None),
            (7, 1, None),
        ]
        for layer, (z, found, _) in enumerate(Recorded.seen):
            order = drawing_order(10, 0, 7, layer).tolist()
            expected = torch.zeros(2, 10, 4)
            assert z.dtype == torch.float32
            for b in (0, 1):
                chosen = sorted(
                    [i for i in order if valid[b, i]][: options.get("max_tokens", 10)]
                )
                assert torch.equal(z[b, found[b]], zs[layer][b, chosen].float())
                assert not z[b, ~found[b]].any()
                expected[b, chosen] = (
                    2 * (1 + layer) * zs[layer][b, chosen].detach().float()
                )
            torch.testing.assert_close(
                zs[layer].grad.float(), expected, rtol=2**-7, atol=0
            )
            zs[layer].grad = None


def test_a_loss_that_is_none_and_an_object_without_the_option():
    for loss, found in (
        (lambda z: z.mean(-1), r"shape \(2, 6\), expected shape \(2,\)"),
        (
            lambda z: z.detach().sum((1, 2)),
            r"OfTokens.loss returned shape \(2,\) without a gradient, .* autograd",
        ),
        (lambda z: 3.0, "OfTokens.loss returned 3.0, expected"),
    ):
        with pytest.raises(ValueError, match=found):
            dispersion_loss(tokens(2, 6, 4), variant=of_tokens(loss))
    # Two sequences: the tensor [2, 6, 6] alone would unpack as w and dw/dc.
    with pytest.raises(ValueError, match=r"\[2, 6, 6\], expected two of this shape: w"):
        dispersion_loss(tokens(2, 6, 4), variant=of_pairs(torch.square))
    with pytest.raises(
        ValueError, match=r"tau is 0.3, but variant Upper\(\) does not use it"
    ):
        DispersionLoss(Upper(), tau=0.3)


MODULE = """
from __future__ import annotations
from dataclasses import dataclass
from titan_disp.dispersion import AutogradVariant, CosineVariant
number = 3
class NotDecorated(AutogradVariant):
    def loss(self, z, valid, context): return z.sum((1, 2))
@dataclass(frozen=True)
class Abstract(AutogradVariant): pass
@dataclass(frozen=True)
class Options(NotDecorated):
    margin: float
    count: int = 3
    signed: bool = False
    label: str = "a"
    shape: tuple[int, ...] = (1, 2)
    tau: float = 1.0
    def __post_init__(self):
        if self.count > 5:
            raise ValueError("too many")
@dataclass(frozen=True)
class OtherDefault(NotDecorated):
    tau: float = 0.05
"""


@pytest.mark.parametrize(
    ("variant", "options", "message"),
    [
        (Upper, {}, "expected a name, or an object such as MyLoss"),
        (Upper(), {"margin": 0.3}, "is an object, which has its own: leave them"),
        ("simctgg", {}, r"or package.module:Class \(did you mean simctg\?\)"),
        ("various.Options", {}, "write a colon before the class, various:Options"),
        (
            "broken:Loss",
            {},
            r"broken cannot be imported \(ZeroDivisionError: division .*PYTHONPATH=FOLDER titan",
        ),
        ("various:Option", {}, r"various has no Option \(did you mean Options\?\)"),
        (
            "various:number",
            {},
            "which is 3, expected a class that extends CosineVariant, MomentsVariant or AutogradV",
        ),
        (
            "various:NotDecorated",
            {},
            r"and is decorated with @dataclass\(frozen=True\)",
        ),
        (
            "various:Abstract",
            {},
            "'various:Abstract' cannot be built: Can't instantiate abstract class Abstract",
        ),
        ("various:Options", {}, "options.margin is not set"),
        (
            "various:Options",
            {"margin": 1, "count": 2.5},
            "options.count is 2.5, expected a whole number",
        ),
        (
            "various:Options",
            {"margin": 1, "count": True},
            "options.count is True, expected a whole number",
        ),
        (
            "various:Options",
            {"margin": 1, "signed": 1},
            "options.signed is 1, expected true or false",
        ),
        (
            "various:Options",
            {"margin": 1, "label": 1},
            "options.label is 1, expected a string",
        ),
        (
            "various:Options",
            {"margin": 1, "count": 6},
            "variant 'various:Options': too many",
        ),
        (
            "various:Options",
            {"magin": 1},
            r"magin is not known \(did you mean margin\?\); expected margin, count",
        ),
        (
            "various:OtherDefault",
            {},
            "has the default tau = 0.05, but the key has the default 1.0: leave",
        ),
        (
            "my_losses:Band",
            {"margin": 2},
            "^options.margin is 2.0, expected a number in",
        ),
    ],
)
def test_refused(folder, variant, options, message):
    with pytest.raises(ValueError, match=message):
        DispersionLoss(variant, options=options)


def test_options_of_every_type(folder):
    """A whole number is a number; a key's value arrives; what is not checked is handed
    on.
    """
    options = {"margin": 2, "signed": True, "label": "b", "shape": [3]}
    found = DispersionLoss("various:Options", tau=0.3, options=options)._variant
    assert vars(found) == options | {"count": 3, "tau": 0.3}
    assert isinstance(found.margin, float)


def test_a_pair_function_that_is_new_every_time_is_compiled_once():
    """Another object would be another compiled kernel, for every layer and step."""

    class Anew(CosineVariant):
        pair = property(lambda self: lambda c: (c, KEPT))

    variant = Anew()
    assert variant.pair is not variant.pair
    assert variant._pair is variant._pair


CONFIG = """
dispersion.variant = "my_losses:Band"
dispersion.options = {margin = 0.2}
dispersion.losses = [
    {variant = "cosine", weight = 0.25, estimator = "sampled", max_tokens = 16},
    {variant = "my_losses:Band", options = {margin = 0.9}},
]
"""


def check_on_ranks_and_train(folder, sample):
    """Then on FSDP2 × TP.

    The second start has another margin, which is logged as another variant is.
    """
    sys.path.insert(0, str(folder))
    ORACLES.update(OWN)
    across = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "data"))
    for case in CASES:
        padding.check(6, case, dist.group.WORLD, dist.get_rank(), 4)
        padding.check(
            70,
            case,
            across["sequence"].get_group(),
            across.get_local_rank("sequence"),
            2,
        )
    words = (
        *(
            "--job.config_file",
            str(folder / "own.toml"),
            "--parallelism.tensor_parallel_degree",
            "2",
        ),
        *(
            "--training.steps",
            "4",
            "--metrics.log_freq",
            "1",
            "--condensation.interval",
            "0",
            "--stream.prefetch",
            "0",
        ),
        *(
            "--checkpoint.enable",
            "--checkpoint.interval",
            "2",
            "--dispersion.coeff",
            "0.5",
        ),
        *("--checkpoint.allow_other_loss", "--model.overrides", "n_layers=2"),
    )
    for more in (
        ("--budget.stop_at_tokens", "512"),
        ("--dispersion.options", "margin=-0.5"),
    ):
        trained(sample, folder / "run", *words, *more)


@pytest.mark.slow
def test_ranks_and_a_run(folder, sample):
    (folder / "own.toml").write_text(CONFIG)
    spawn(4, check_on_ranks_and_train, folder, sample)
    run = folder / "run"
    rows = read_metrics(run)
    assert list(rows) == [1, 2, 3, 4]
    for row in rows.values():
        parts = (
            row["dispersion_Band"]
            + 0.25 * row["dispersion_cosine"]
            + row["dispersion_Band_2"]
        )
        assert row["dispersion"] == pytest.approx(parts, abs=1e-6)
    # A mean of squares of what is above the margin: at most 0.8² and then 1.5², and
    # larger for the lower margin.
    assert all(0 < rows[step]["dispersion_Band"] < 0.64 for step in (1, 2))
    assert all(0.1 < rows[step]["dispersion_Band"] < 2.25 for step in (3, 4))
    assert all(rows[step]["dispersion_Band_2"] < 0.01 for step in rows)
    (resume,) = [event for event in read_events(run) if event["event"] == "resume"]
    assert resume["config_changes"]["dispersion.options.margin"] == [0.2, -0.5]
    told = dispersion(gather([run])[0])
    assert (
        "my_losses:Band, estimator exact, margin=-0.5, and variant=cosine,weight=0.25,estimator=sampled"
        in told
    )
    card = model_card(find_saved(run), "small", 1, "float32", {})
    assert "variant = my_losses:Band, " in card
    assert (
        "margin = -0.5, and variant=cosine,weight=0.25,estimator=sampled,max_tokens=16"
        in card
    )


LOSSES = [
    {"variant": "vicreg", "weight": 0.1, "options": {"gamma": 2}},
    {"variant": "angular", "tau": 0.5},
]


@pytest.mark.parametrize("words", [(), ("--dispersion.losses", json.dumps(LOSSES))])
def test_several_losses(tmp_path, words):
    (tmp_path / "c.toml").write_text(
        ""
        if words
        else "dispersion.losses = " + re.sub(r'": ', '"=', json.dumps(LOSSES))
    )
    for config in both_ways(tmp_path / "c.toml", *words, "--debug.seed", "7"):
        found = build_dispersion_losses(config)
        assert [(n, weight) for n, (weight, _) in found.items()] == [
            ("angular", 1),
            ("vicreg", 0.1),
            ("angular_2", 1),
        ]
        assert found["vicreg"][1]._variant.gamma == 2.0
        assert (found["angular_2"][1].tau, found["angular_2"][1].seed) == (0.5, 7)


def of_words(losses):
    return build_dispersion_losses(
        loaded("train_configs/debug.toml", "--dispersion.losses", losses)
    )


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (
            '[{"weight": 1}]',
            r"losses\[0\] has no variant$",
        ),
        ('["cosine"]', r"losses\[0\] is 'cosine', expected a table$"),
        (
            '{"variant": "cosine", "weight": 0}',
            r"losses\[0\]\.weight is 0, expected a number > 0",
        ),
        (
            '{"variant": "cosine", "wieght": 1}',
            r"losses\[0\]\.wieght is not known \(did you mean weight\?\)",
        ),
        (
            '{"variant": "angular", "tau": "1"}',
            r"losses\[0\]\.tau is '1', expected a number",
        ),
        (
            '[{"variant": "cosine"}, {"variant": "simctg", "tau": 2}]',
            r"losses\[1\]\.tau is 2, but variant 'simctg'",
        ),
        (
            '{"variant": "simctg", "options": "margin=0.7"}',
            r"losses\[0\]\.options is 'margin=0.7', expected a table",
        ),
    ],
)
def test_several_losses_that_are_wrong(losses, message):
    with pytest.raises(ConfigError, match=f"^dispersion.{message}"):
        of_words(losses)


def test_names_that_collide(folder):
    """A class that is named as another one's second loss, and the name of another
    number.
    """
    variants = ("odd_losses:cosine_2", "cosine", "cosine", "odd_losses:fit_error")
    (folder / "odd_losses.py").write_text(
        "from titan_disp.dispersion.variants.others import Cosine\nfrom dataclasses "
        "import dataclass\n@dataclass(frozen=True)\nclass cosine_2(Cosine): "
        "pass\n@dataclass(frozen=True)\nclass fit_error(Cosine): pass\n"
    )
    found = of_words(json.dumps([{"variant": variant} for variant in variants]))
    assert list(found) == ["angular", "cosine_2", "cosine", "cosine_3", "fit_error_2"]
