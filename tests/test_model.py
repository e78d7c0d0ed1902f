import copy

import pytest
import torch
from torchtitan.models.qwen3 import qwen3_args
from torchtitan.models.qwen3.model.model import Qwen3Model
from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter

from titan_disp.config import load_config
from titan_disp.errors import ConfigError
from titan_disp.qwen3.flavors import block_indices, flavors
from titan_disp.qwen3.init import draw
from titan_disp.qwen3.model import Qwen3DispModel


def build(flavor="nano", activations=()):
    args = flavors[flavor]
    args.activations = activations
    args.max_seq_len = 64
    model = Qwen3DispModel(args)
    torch.manual_seed(1)
    model.init_weights()
    return model


@pytest.fixture(scope="module")
def nano():
    return build(activations=(2, 6))


TOKENS = torch.arange(40).view(2, 20)


def test_forward_returns_what_was_asked_for(nano):
    nano.train()
    logits, activations = nano(TOKENS)
    assert logits.shape == (2, 20, 2048)
    assert len(activations) == 2
    nano.eval()
    assert torch.equal(nano(TOKENS), logits)
    _, everything = nano(TOKENS, return_activations=range(7))
    assert len(everything) == 7
    assert torch.equal(everything[0], nano.tok_embeddings(TOKENS))
    for got, index in zip(activations, (2, 6), strict=True):
        assert torch.equal(got, everything[index])
    assert torch.equal(nano.output(nano.norm(everything[-1])), logits)
    nano.train()
    assert torch.equal(nano(TOKENS, return_activations=()), logits)
    with pytest.raises(ValueError, match="expected indices from 0 to 6"):
        nano(TOKENS, return_activations=[7])


def test_agrees_with_hugging_face(nano):
    transformers = pytest.importorskip("transformers")
    args = nano.model_args
    config = transformers.Qwen3Config(
        vocab_size=args.vocab_size,
        hidden_size=args.dim,
        intermediate_size=args.hidden_dim,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        head_dim=args.head_dim,
        rms_norm_eps=args.norm_eps,
        rope_theta=args.rope_theta,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    theirs = transformers.Qwen3ForCausalLM(config).eval()
    state = Qwen3StateDictAdapter(args, None).to_hf(nano.state_dict())
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    nano.eval()
    with torch.no_grad():
        ours, activations = nano(TOKENS, return_activations=range(7))
        out = theirs(TOKENS, output_hidden_states=True)
    torch.testing.assert_close(ours, out.logits, rtol=0, atol=1e-5)
    # Hugging Face's last hidden state is after the final norm; ours is the block's output.
    for i in range(6):
        torch.testing.assert_close(activations[i], out.hidden_states[i], rtol=0, atol=1e-5)
    torch.testing.assert_close(nano.norm(activations[6]), out.hidden_states[6], rtol=0, atol=1e-5)


@pytest.mark.parametrize("flavor", ["debugmodel", "0.6B"])
def test_flavors_are_torchtitans(flavor):
    ours = vars(flavors[flavor])
    assert ours.pop("activations") == ()
    assert ours == vars(qwen3_args[flavor])


def test_0_6b_is_qwen3_0_6b():
    args = flavors["0.6B"]
    assert (args.n_layers, args.dim, args.vocab_size, args.hidden_dim) == (28, 1024, 151936, 3072)
    assert (args.n_heads, args.n_kv_heads, args.head_dim, args.rope_theta) == (16, 8, 128, 1e6)
    with torch.device("meta"):
        model = Qwen3DispModel(args)
    parameters, flops = args.get_nparams_and_flops(model, 2048)
    assert parameters == 596_049_920  # as transformers counts Qwen/Qwen3-0.6B
    # 6 FLOPs per parameter, the tied matrix included (it multiplies as the output layer), and attention.
    assert flops == 6 * parameters + 6 * 28 * 16 * 256 * 2048


def test_registered_flavors_stay_as_they_are():
    flavors["nano"].max_seq_len = 7
    assert flavors["nano"].max_seq_len == 4096


def test_initial_distribution_is_torchtitans():
    args = flavors["debugmodel"]
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
    args, shape = flavors["nano"], torch.Size([8, 8])
    one = draw("layers.0.attention.wq.weight", shape, args, 1)
    assert torch.equal(one, draw("layers.0.attention.wq.weight", shape, args, 1))
    assert not torch.equal(one, draw("layers.1.attention.wq.weight", shape, args, 1))
    assert not torch.equal(one, draw("layers.0.attention.wq.weight", shape, args, 2))


@pytest.mark.parametrize(
    ("layers", "expected"),
    [("all", (0, 1, 2, 3, 4)), ("last", (4,)), ("early_half", (0, 1)), ("late_half", (2, 3, 4)), ([3, 0], (0, 3))],
)
def test_block_indices(layers, expected):
    assert block_indices(layers, 5) == expected


def test_activations_of_a_config():
    """Those of a block are its output, 1 more than its index: 0 is the embedding's."""
    config = load_config(["--dispersion.layers", "0", "3"])
    args = flavors["nano"]
    args.update_from_config(config)
    assert args.activations == ()  # dispersion is off
    config.dispersion.enabled = True
    args.update_from_config(config)
    assert args.activations == (1, 4)


@pytest.mark.parametrize("layers", ["first", [5], [-1], [], [1, 1], [True]])
def test_bad_block_indices(layers):
    with pytest.raises(ConfigError, match=r"dispersion\.layers is"):
        block_indices(layers, 5)
