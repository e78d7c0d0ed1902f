"""The formula of the default loss is one text, which pages show and which is what
dispersion_loss computes; its ceiling.
"""

import math
import re
from dataclasses import fields

import pytest
import torch

from tests.test_docs import PAGES, README, ROOT, name
from titan_disp.dispersion import DispersionLoss, dispersion_loss, dispersion_losses
from titan_disp.dispersion.formula import AngularFormula
from titan_disp.job_config import Dispersion

LOSSES = (ROOT / "docs" / "losses.md").read_text()
# Equal values of all options would hide one that the text leaves out.
OTHER = AngularFormula(coeff=0.3, tau=0.5, clamp=0.1, norm_eps=0.02)
CROSS_ENTROPY = 4.5
# From the text to Python: tokens are rows, and pairs are entries of a matrix.
NOTATION = {
    r"‖z_i‖": "norm(z, dim=-1, keepdim=True)",
    r"u_i · u_j": "u @ u.mT",
    r"mean_{i≠j} (.+)": r"mean_of_pairs(\1)",
    r"log (.+)": r"log(\1)",
    r"mean of (\w+) over layers and sequences": r"\1.mean()",
    r"c̃": "c_clamped",
    r"_ij?\b": "",
    r"−": "-",
    r"·": "*",
    r"λ": "lambda_",
}


def mean_of_pairs(x):
    """The mean over i ≠ j: [L, B, N, N] → [L, B]."""
    tokens = x.shape[-1]
    different = ~torch.eye(tokens, dtype=torch.bool)
    return x[..., different].mean(-1)


def evaluated(text, z):
    """L_disp [L, B] and L of z [L, B, N, F], by the lines of the text."""
    names = {
        "z": z,
        "L_CE": CROSS_ENTROPY,
        "π": math.pi,
        "norm": torch.linalg.vector_norm,
        "clamp": torch.clamp,
        "arccos": torch.arccos,
        "exp": torch.exp,
        "log": torch.log,
        "mean_of_pairs": mean_of_pairs,
    }
    parts = [re.split(r"\s{2,}", line) for line in text.splitlines()]
    options = [part for _, *rest in parts for part in rest]
    for line in [*options, *(line for line, *_ in parts)]:
        for notation, python in NOTATION.items():
            line = re.sub(notation, python, line)
        exec(line, names)
    return names["L_disp"], names["L"]


def cone(mean_cosine, tokens=24, features=16):
    """Tokens around one axis, of different lengths: [2, 3, N, F] float64."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, tokens, features)
    directions = torch.randn(shape, generator=generator, dtype=torch.float64)
    directions[..., 0] = 0
    directions *= math.sqrt(1 - mean_cosine) / torch.linalg.vector_norm(
        directions, dim=-1, keepdim=True
    )
    directions[..., 0] = math.sqrt(mean_cosine)
    lengths = torch.rand(shape[:-1], generator=generator, dtype=torch.float64)
    return directions * (0.5 + lengths[..., None])


CONES = [cone(mean_cosine) for mean_cosine in (0.52, 0.93, 0.99, 0.999)]
# with half of the tokens turned round, so that the lower bound matters, too
TURNED = CONES[-1] * torch.tensor([1.0, -1.0]).repeat(12)[:, None]


def differences(text, formula):
    """|L_disp by the text − dispersion_loss| and the same of L, the largest of all
    tokens.
    """
    of_losses = []
    of_totals = []
    options = {"tau": formula.tau, "clamp": formula.clamp, "norm_eps": formula.norm_eps}
    for z in (*CONES, TURNED):
        losses, total = evaluated(text, z)
        expected = dispersion_losses(list(z), **options)
        expected_total = CROSS_ENTROPY + formula.coeff * expected.mean()
        of_losses.append((losses - expected).abs().max())
        of_totals.append((total - expected_total).abs())
    return max(of_losses), max(of_totals)


@pytest.mark.parametrize("formula", [AngularFormula(), OTHER], ids=["default", "other"])
def test_the_text_is_what_is_computed(formula):
    assert max(differences(formula.text, formula)) < 1e-12


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (" + ε", ""),
        ("−1 + κ", "−1"),
        ("1 − κ", "1"),
        (" / π", ""),
        ("−D_ij", "D_ij"),
        (" / τ", ""),
        ("log mean", "mean"),
        ("λ · ", ""),
        ("L_CE + ", "L_CE − "),
    ],
)
def test_a_wrong_text_is_noticed(right, wrong):
    assert right in OTHER.text
    assert max(differences(OTHER.text.replace(right, wrong), OTHER)) > 1e-3


def test_its_values_are_the_defaults():
    for option in fields(AngularFormula):
        assert option.default == getattr(Dispersion(), option.name)
        if option.name != "coeff":
            assert option.default == getattr(DispersionLoss(), option.name)


def test_it_fits_a_page():
    lines = AngularFormula().text.splitlines()
    assert max(map(len, lines)) <= 76  # in a block that is indented by 4


def shows(page, text):
    """Whether a page has the lines of a text, indented or not."""
    stripped = "\n".join(line.strip() for line in page.read_text().splitlines())
    return f"\n{text}\n" in stripped


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page == README or "L_CE" in page.read_text()],
    ids=name,
)
def test_pages_show_this_text(page):
    assert shows(page, AngularFormula().text)


def test_the_table_of_losses_has_its_line():
    line = re.search(r"L_disp = (.*?)  ", AngularFormula().text)[1]
    assert f"| `angular` | {line} |" in LOSSES


@pytest.mark.parametrize(
    ("tau", "clamp"), [(1.0, 0.25), (0.5, 0.1), (2.0, 0.01), (1.0, 0.0)]
)
def test_no_loss_is_above_the_ceiling(tau, clamp):
    """Identical tokens reach it; so do all whose cosines are at least 1 − κ."""
    formula = AngularFormula(tau=tau, clamp=clamp)
    options = {"tau": tau, "clamp": clamp, "norm_eps": 1e-12}
    same = torch.ones(1, 5, 8, dtype=torch.float64)
    highest = dispersion_loss(same, **options).item()
    assert formula.ceiling == pytest.approx(highest, abs=1e-12)
    angle = 0.9 * math.acos(1 - clamp)
    near = torch.tensor([[[1.0, 0.0], [math.cos(angle), math.sin(angle)]]]).double()
    if clamp:
        reached = dispersion_loss(near, **options).item()
        assert reached == pytest.approx(highest, abs=1e-12)
    orthogonal = torch.eye(8, dtype=torch.float64)[None]
    least = dispersion_loss(orthogonal, **options).item()
    assert formula.value_if_orthogonal == pytest.approx(least, abs=1e-12)


def test_the_note():
    note = AngularFormula().note
    assert "−0.500" in note
    assert "−0.230" in note
    assert "at least 0.75" in note
    assert "−0.287" in OTHER.note  # arccos(0.9) / (π · 0.5)
    assert "the gradient still pushes the tokens apart" in note
    assert "still pulls the tokens together" in AngularFormula(coeff=-0.1).note


def test_whose_loss_it_is():
    """Of a run's [dispersion]: None if another loss is computed, or more than one."""
    section = {
        "enabled": True,
        "variant": "angular",
        "coeff": 0.3,
        "tau": 0.5,
        "clamp": 0.1,
        "norm_eps": 0.02,
        "losses": [],
        "layers": "all",
    }
    assert AngularFormula.of_run(section) == OTHER
    for change in (
        {"enabled": False},
        {"variant": "cosine"},
        {"losses": [{"variant": "vicreg"}]},
    ):
        assert AngularFormula.of_run(section | change) is None


def test_losses_of_identical_tokens():
    """As docs/losses.md says."""
    _, _, text = LOSSES.partition("highest where all tokens are the same:")
    sentence, _, _ = text.partition(" There,")
    highest = dict(re.findall(r"`(\w+)` (−?[\d.]+\d|\d)", sentence))
    assert len(highest) == 7
    z = torch.tensor([1.0, -2.0, 3.0, 5.0]).double().expand(1, 6, 4).contiguous()
    for variant, number in (highest | {"feature_decorrelation": "0"}).items():
        value = dispersion_loss(z, variant=variant).item()
        digits = len(number.partition(".")[2])
        assert value == pytest.approx(
            float(number.replace("−", "-")), abs=0.5 * 10**-digits
        )
