"""qwen3_disp against transformers and TorchTitan: sizes and initial weights; which layers a config selects."""

import copy
from contextlib import nullcontext

import pytest
import torch
import transformers
from torchtitan.models.qwen3 import qwen3_args
from torchtitan.models.qwen3.model.model import Qwen3Model

import titan_disp.plugin  # noqa: F401
from tests.published import check_published
from titan_disp.config.load import load_config
from titan_disp.errors import ConfigError
from titan_disp.models.arguments import block_indices
from titan_disp.models.decoder import canonical_name, draw
from titan_disp.models.qwen3 import Qwen3DispModel, Qwen3HfAdapter, flavors

TOKENS = torch.arange(40).view(2, 20)


def test_forward_returns_what_was_asked_for():
    """tests/test_models.py has the values."""
    args = flavors["nano"]
    args.activations, args.max_seq_len = (2, 6), 64
    nano = Qwen3DispModel(args)
    nano.init_weights()
    logits, activations = nano.train()(TOKENS)
    assert torch.equal(nano(TOKENS, return_activations=()), logits)
    assert torch.equal(nano.eval()(TOKENS), logits)
    _, everything = nano(TOKENS, return_activations=range(8))
    assert all(torch.equal(x, everything[index]) for x, index in zip(activations, (2, 6), strict=True))
    with pytest.raises(ValueError, match="expected indices from 0 to 7"):
        nano(TOKENS, return_activations=[8])


# Blocks, heads of queries and of keys, and whether the embedding is tied: Table 1 of the Qwen3 technical report (arXiv
# 2505.09388). Width and feed-forward: config.json of Qwen/Qwen3-*. Parameters: of its safetensors, less the second copy of
# the embedding that some of them have as lm_head.
PUBLISHED = {
    # flavor: (blocks, heads, key/value heads, width, feed-forward, tied, parameters)
    "0.6B": (28, 16, 8, 1024, 3072, True, 596_049_920),
    "0.6B_untied": (28, 16, 8, 1024, 3072, False, 751_632_384),
    "1.7B": (28, 16, 8, 2048, 6144, True, 1_720_574_976),
    "4B": (36, 32, 8, 2560, 9728, True, 4_022_468_096),
    "8B": (36, 32, 8, 4096, 12288, False, 8_190_735_360),
    "14B": (40, 40, 8, 5120, 17408, False, 14_768_307_200),
    "32B": (64, 64, 8, 5120, 25600, False, 32_762_123_264),
}


def test_flavors_are_torchtitans():
    for flavor in ["debugmodel", *(name for name in PUBLISHED if name != "0.6B_untied")]:
        assert vars(flavors[flavor]) == vars(qwen3_args[flavor]) | {"activations": ()}


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_flavors_are_qwens(tmp_path, flavor):
    """The parameters counted by hand; config.json as an export writes it."""
    layers, heads, kv_heads, width, feed_forward, tied, parameters = PUBLISHED[flavor]
    attention = (2 * heads + 2 * kv_heads) * 128 * width + 2 * 128
    block = attention + 3 * width * feed_forward + 2 * width
    assert parameters == layers * block + width + (1 if tied else 2) * 151936 * width
    sizes = {"vocab_size": 151936, "hidden_size": width, "intermediate_size": feed_forward, "head_dim": 128}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config = transformers.Qwen3Config(**sizes, rope_theta=1000000, tie_word_embeddings=tied)
    stated = transformers.Qwen3Config(**Qwen3HfAdapter(flavors[flavor], None).architecture())
    assert stated.to_dict() == config.to_dict()
    # A tied matrix multiplies, as the output layer.
    multiplying = parameters - (0 if tied else 151936 * width)
    check_published("qwen3_disp", flavor, config, parameters, multiplying, PUBLISHED, tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_initial_distribution_is_torchtitans(tied):
    args = flavors["debugmodel"]
    args.enable_weight_tying = tied
    stock = Qwen3Model(copy.deepcopy(args))
    torch.manual_seed(0)
    with torch.no_grad():
        stock.init_weights()
    for name, parameter in stock.named_parameters():
        ours = draw(name, parameter.shape, args, seed=0)
        if parameter.ndim == 1:
            assert torch.equal(ours, parameter)
        else:
            # The standard error of a standard deviation over n draws is 1/√(2n): below 1 % for these sizes.
            assert ours.std().item() == pytest.approx(parameter.std().item(), rel=0.03), name
            assert ours.abs().max() <= parameter.abs().max() * 1.3, name


def test_seed_and_name_decide_the_weights():
    """Activation checkpointing and torch.compile do not."""
    args, shape = flavors["nano"], torch.Size([8, 8])
    drawn = [(0, 1), (0, 1), (1, 1), (0, 2)]
    one, *others = (draw(f"layers.{layer}.attention.wq.weight", shape, args, seed) for layer, seed in drawn)
    assert [torch.equal(one, other) for other in others] == [True, False, False]
    assert canonical_name("layers.0._orig_mod._checkpoint_wrapped_module.w") == "layers.0.w"


@pytest.mark.parametrize(
    ("layers", "blocks", "with_final_norm"),
    [
        ("all", (0, 1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 7)),
        ("last", (5,), (7,)),
        ("early_half", (0, 1, 2), None),
        ("late_half", (3, 4, 5), (4, 5, 7)),
        ([3, 0], (0, 3), None),
        ([5, 2], (2, 5), (3, 7)),
    ],
)
def test_activations_of_a_config(layers, blocks, with_final_norm):
    """Those of a block are its output, 1 more than its index: 0 is the embedding's. The final norm's replaces the last's."""
    config, args = load_config([]), flavors["nano"]
    assert block_indices(layers, 6) == blocks
    config.dispersion.layers = layers
    for config.dispersion.enabled, expected in ((False, ()), (True, tuple(block + 1 for block in blocks))):
        args.update_from_config(config)
        assert args.activations == expected
    config.dispersion.final_norm = True
    with nullcontext() if with_final_norm else pytest.raises(ConfigError, match="leaves the last block .* out"):
        args.update_from_config(config)
        assert args.activations == with_final_norm


def test_halves_of_an_odd_number():
    assert (block_indices("early_half", 5), block_indices("late_half", 5)) == ((0, 1), (2, 3, 4))


@pytest.mark.parametrize("layers", ["first", [5], [-1], [], [1, 1], [True]])
def test_bad_block_indices(layers):
    with pytest.raises(ConfigError, match=r"dispersion\.layers is"):
        block_indices(layers, 5)
