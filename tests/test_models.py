"""What every model of ``MODELS`` promises: flavors in order, transformers' logits, gradients and files, and its documentation.

Numbers that are published of a model, and the ways to write its files, are tested in ``test_<model>``.
"""

import pytest
import torch
import transformers
from torchtitan.components.loss import cross_entropy_loss

import titan_disp.plugin  # noqa: F401
from tests.command_line import ROOT
from tests.mesh import assert_tied, errors
from tests.oracle import angular
from titan_disp.config.load import load_config
from titan_disp.dispersion import DispersionLoss, DispersionObjective
from titan_disp.models.registry import MODELS

pytestmark = pytest.mark.parametrize("entry", MODELS.values(), ids=lambda entry: entry.name)
TOKENS = torch.arange(96).view(2, 48) * 19 % 2048
LAST = 6 + 1  # after the final norm of nano's six blocks: transformers' last hidden state


def pair(entry, tied=True):
    """Theirs and ours of nano's shape, with the same weights, so large that logits depend on every one of them."""
    args = entry.flavors["nano"]
    args.enable_weight_tying, args.max_seq_len = tied, 48
    adapter = entry.adapter(args, None)
    config = transformers.AutoConfig.for_model(**adapter.architecture(), **adapter.extras())
    torch.manual_seed(5)
    theirs = getattr(transformers, entry.adapter.transformers_class)(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours = entry.model_cls(args)
    ours.init_weights()
    ours.load_state_dict(adapter.from_hf(theirs.state_dict()))
    return theirs, ours


def test_flavors_come_in_ascending_order(entry):
    """A preflight takes the first that fits."""
    with torch.device("meta"):
        models = [entry.model_cls(entry.flavors[name]) for name in entry.flavors]
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
    assert sizes == sorted(sizes)
    assert next(iter(entry.flavors)) == "nano"


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_logits_activations_and_weights_are_transformers(entry, tied):
    theirs, ours = pair(entry, tied)
    assert_tied(ours, tied)
    logits, activations = ours.eval()(TOKENS, return_activations=(*range(LAST - 1), LAST))
    out = theirs(TOKENS, output_hidden_states=True)
    torch.testing.assert_close(logits, out.logits, rtol=0, atol=1e-5)
    for mine, hidden in zip(activations, out.hidden_states, strict=True):  # whose last is after the final norm
        torch.testing.assert_close(mine, hidden, rtol=0, atol=1e-5)
    again = entry.adapter(ours.model_args, None).to_hf(ours.state_dict())
    weights = {name: w for name, w in theirs.state_dict().items() if name != "lm_head.weight" or not tied}
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], w) for name, w in weights.items())


def test_final_norm_is_the_authors_mid_training(entry):
    """Cross-entropy + λ · dispersion of transformers' hidden_states[1:]: loss, and the gradient of every weight."""
    (theirs, ours), labels = pair(entry), TOKENS.roll(-1, 1)
    options = ["--dispersion.enabled", "--dispersion.final_norm", "--training.seq_len", "48"]
    ours.model_args.update_from_config(load_config(options))
    assert ours.model_args.activations == (*range(1, LAST - 1), LAST)
    loss = DispersionObjective(cross_entropy_loss, DispersionLoss(clamp=0.1), lambda step: 1.0)(ours(TOKENS), labels)
    out = theirs(TOKENS, output_hidden_states=True)
    per_layer = [angular(z.double(), tau=1.0, clamp=0.1, norm_eps=1e-2) for z in out.hidden_states[1:]]
    ce = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected = ce + 48 * torch.stack(per_layer).mean(0).sum()  # 48 tokens a sequence
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-6, atol=0)
    loss.backward()
    expected.backward()
    gradients = {name: p.grad for name, p in ours.named_parameters()} | {"output.weight": ours.output.weight.grad}
    gradients = entry.adapter(ours.model_args, None).to_hf(gradients)
    worst = errors(gradients, {name: p.grad for name, p in theirs.named_parameters()})
    assert max(worst.values()) < 1e-4, worst


def test_every_model_is_documented(entry):
    row = f"| `{entry.name}` |"
    rows = [line for line in (ROOT / "docs" / "training.md").read_text().splitlines() if line.startswith(row)]
    assert len(rows) == 1, f"add a row for {entry.name!r} to the table of models in docs/training.md: name, flavors"
    assert all(f"`{flavor}`" in rows[0] or flavor.endswith("_untied") for flavor in entry.flavors)
