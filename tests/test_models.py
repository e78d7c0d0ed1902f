"""What every model promises: published sizes, transformers' logits, gradients and
files, and its documentation.

The ways to write a model's files: ``test_hf_import``. On meshes: ``test_meshes``.
"""

import copy
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer
from torchtitan.models.qwen3.model.model import Qwen3Model

import titan_disp.plugin  # noqa: F401
from tests.command_line import ROOT
from tests.mesh import assert_tied, errors, job_config
from tests.oracle import angular
from tests.published import check_published
from tests.saved_run import SEQ_LEN, random_model, save_run
from titan_disp.checks import check_config
from titan_disp.config.command_options import ExportOptions, GenerateOptions
from titan_disp.config.load import load_config
from titan_disp.dispersion import DispersionLoss
from titan_disp.errors import ConfigError
from titan_disp.lab.export.export import export
from titan_disp.lab.export.generate import generate
from titan_disp.lab.export.saved import longest_sequence
from titan_disp.models import gpt2, llama, qwen3
from titan_disp.models.arguments import block_indices
from titan_disp.models.decoder import canonical_name, draw
from titan_disp.models.registry import MODELS, model_args
from titan_disp.objective import DispersionObjective

TOKENS = torch.arange(96).view(2, 48) * 19 % 2048
# After the final norm of nano's six blocks: transformers' last hidden state
LAST = 6 + 1


@pytest.fixture(params=MODELS.values(), ids=lambda entry: entry.name)
def entry(request):
    return request.param


def pair(entry, tied=True):
    """Theirs and ours of nano's shape, with the same weights, so large that logits
    depend on every one of them.
    """
    args = entry.flavors["nano"]
    args.enable_weight_tying = tied
    args.max_seq_len = 48
    adapter = entry.adapter(args, None)
    config = transformers.AutoConfig.for_model(
        **adapter.architecture(), **adapter.extras()
    )
    torch.manual_seed(5)
    theirs = getattr(transformers, entry.adapter.transformers_class)(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    with torch.device("meta"):  # as the trainer does
        ours = entry.model_cls(args)
    ours.to_empty(device="cpu")
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
    logits, activations, _ = ours.eval()(
        TOKENS, return_activations=(*range(LAST - 1), LAST)
    )
    out = theirs(TOKENS, output_hidden_states=True)
    torch.testing.assert_close(logits, out.logits, rtol=0, atol=1e-5)
    # Whose last is after the final norm
    for mine, hidden in zip(activations, out.hidden_states, strict=True):
        torch.testing.assert_close(mine, hidden, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="expected indices from 0 to 7"):
        ours(TOKENS, return_activations=[8])
    again = entry.adapter(ours.model_args, None).to_hf(ours.state_dict())
    weights = {
        name: w
        for name, w in theirs.state_dict().items()
        if name != "lm_head.weight" or not tied
    }
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], w) for name, w in weights.items())


def test_final_norm_is_the_authors_mid_training(entry):
    """Cross-entropy + λ · dispersion of transformers' hidden_states[1:]: loss, and the
    gradient of every weight.
    """
    (theirs, ours) = pair(entry)
    labels = TOKENS.roll(-1, 1)
    options = [
        "--dispersion.enabled",
        "--dispersion.final_norm",
        "--training.seq_len",
        "48",
    ]
    ours.model_args.update_from_config(load_config(options))
    assert ours.model_args.activations == (*range(1, LAST - 1), LAST)
    loss = DispersionObjective(
        cross_entropy_loss, DispersionLoss(clamp=0.1), lambda step: 1.0
    )(ours(TOKENS), labels)
    out = theirs(TOKENS, output_hidden_states=True)
    per_layer = [
        angular(z.double(), tau=1.0, clamp=0.1, norm_eps=1e-2)
        for z in out.hidden_states[1:]
    ]
    ce = torch.nn.functional.cross_entropy(
        out.logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    expected = ce + 48 * torch.stack(per_layer).mean(0).sum()  # 48 tokens a sequence
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-6, atol=0)
    loss.backward()
    expected.backward()
    gradients = {name: p.grad for name, p in ours.named_parameters()} | {
        "output.weight": ours.output.weight.grad
    }
    gradients = entry.adapter(ours.model_args, None).to_hf(gradients)
    worst = errors(gradients, {name: p.grad for name, p in theirs.named_parameters()})
    assert max(worst.values()) < 1e-4, worst


def test_every_model_is_documented(entry):
    row = f"| `{entry.name}` |"
    rows = [
        line
        for line in (ROOT / "docs" / "training.md").read_text().splitlines()
        if line.startswith(row)
    ]
    assert len(rows) == 1, (
        f"add a row for {entry.name!r} to the table of models in docs/training.md: "
        "name, flavors"
    )
    assert all(
        f"`{flavor}`" in rows[0] or flavor.endswith("_untied")
        for flavor in entry.flavors
    )


# Blocks, heads of queries and of keys, and whether the embedding is tied: Table 1 of
# the Qwen3 technical report (arXiv 2505.09388). Width and feed-forward: config.json of
# Qwen/Qwen3-*. Parameters: of its safetensors, less the second copy of the embedding
# that some of them have as lm_head.
QWEN3 = {
    # flavor: (blocks, heads, key/value heads, width, feed-forward, tied, parameters)
    "0.6B": (28, 16, 8, 1024, 3072, True, 596_049_920),
    "0.6B_untied": (28, 16, 8, 1024, 3072, False, 751_632_384),
    "1.7B": (28, 16, 8, 2048, 6144, True, 1_720_574_976),
    "4B": (36, 32, 8, 2560, 9728, True, 4_022_468_096),
    "8B": (36, 32, 8, 4096, 12288, False, 8_190_735_360),
    "14B": (40, 40, 8, 5120, 17408, False, 14_768_307_200),
    "32B": (64, 64, 8, 5120, 25600, False, 32_762_123_264),
}


@pytest.mark.parametrize("flavor", QWEN3)
def test_flavors_are_qwens(tmp_path, flavor):
    """The parameters counted by hand; config.json as an export writes it."""
    layers, heads, kv_heads, width, feed_forward, tied, parameters = QWEN3[flavor]
    attention = (2 * heads + 2 * kv_heads) * 128 * width + 2 * 128
    block = attention + 3 * width * feed_forward + 2 * width
    assert parameters == layers * block + width + (1 if tied else 2) * 151936 * width
    sizes = {
        "vocab_size": 151936,
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "head_dim": 128,
    }
    sizes |= {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    config = transformers.Qwen3Config(
        **sizes, rope_theta=1000000, tie_word_embeddings=tied
    )
    stated = transformers.Qwen3Config(
        **qwen3.Qwen3HfAdapter(qwen3.flavors[flavor], None).architecture()
    )
    assert stated.to_dict() == config.to_dict()
    # A tied matrix multiplies, as the output layer.
    multiplying = parameters - (0 if tied else 151936 * width)
    check_published(
        "qwen3_disp", flavor, config, parameters, multiplying, QWEN3, tmp_path
    )


# config.json of HuggingFaceTB/SmolLM2-*, TinyLlama/TinyLlama-1.1B-intermediate-step-
# 1431k-3T and meta-llama/Llama-*. Parameters: by hand, with a tied embedding once.
LLAMA = {
    # flavor: (blocks, heads, key/value heads, width, feed-forward, vocabulary,
    #          base of the rotary embeddings, factor of their scaling, tied, parameters)
    "SmolLM2-135M": (30, 9, 3, 576, 1536, 49152, 1e5, None, True, 134_515_008),
    "SmolLM2-360M": (32, 15, 5, 960, 2560, 49152, 1e5, None, True, 361_821_120),
    "TinyLlama-1.1B": (22, 32, 4, 2048, 5632, 32000, 1e4, None, False, 1_100_048_384),
    "Llama-3.2-1B": (16, 32, 8, 2048, 8192, 128256, 5e5, 32, True, 1_235_814_400),
    "SmolLM2-1.7B": (24, 32, 32, 2048, 8192, 49152, 1.3e5, None, True, 1_711_376_384),
    "Llama-3.2-3B": (28, 24, 8, 3072, 8192, 128256, 5e5, 32, True, 3_212_749_824),
    "Llama-3.1-8B": (32, 32, 8, 4096, 14336, 128256, 5e5, 8, False, 8_030_261_248),
}


def llama3_scaling(factor):
    return {
        "rope_type": "llama3",
        "factor": float(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize("flavor", LLAMA)
def test_flavors_are_llamas(tmp_path, flavor):
    """The parameters counted by hand; config.json as an export writes it."""
    (
        layers,
        heads,
        kv_heads,
        width,
        feed_forward,
        vocabulary,
        theta,
        factor,
        tied,
        parameters,
    ) = LLAMA[flavor]
    attention = (2 * heads + 2 * kv_heads) * (width // heads) * width
    block = attention + 3 * width * feed_forward + 2 * width
    assert (
        parameters == layers * block + width + (1 if tied else 2) * vocabulary * width
    )
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5,
        rope_theta=theta,
        rope_scaling=llama3_scaling(factor) if factor else None,
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
    )
    stated = transformers.LlamaConfig(
        **llama.LlamaHfAdapter(llama.flavors[flavor], None).architecture(),
        max_position_embeddings=131072,
    )
    assert stated.to_dict() == config.to_dict()
    # A tied matrix multiplies, as the output layer.
    multiplying = parameters - (0 if tied else vocabulary * width)
    check_published(
        "llama_disp", flavor, config, parameters, multiplying, LLAMA, tmp_path
    )


@torch.no_grad()
def test_scaled_rotary_embeddings_are_transformers(tmp_path):
    """Llama 3.1's heads, base and scaling, in two narrow layers, far beyond the
    shortest scaled wavelength (2,048 positions).
    """
    sizes = "n_layers=2,vocab_size=512,dim=256,hidden_dim=512,n_heads=4,n_kv_heads=2"
    tokens = torch.arange(4000)[None] * 19 % 512
    args = model_args("llama_disp", "Llama-3.1-8B", sizes)
    args.max_seq_len = tokens.numel()
    ours = llama.LlamaDispModel(args).eval()
    ours.init_weights()
    for block in ours.layers.values():
        block.attention.wq.weight.mul_(40)  # so that attention is far from a mean
    adapter = llama.LlamaHfAdapter(args, None)
    config = transformers.LlamaConfig(**adapter.architecture(), **adapter.extras())
    assert config.rope_parameters == llama3_scaling(8) | {"rope_theta": 500000.0}
    # else transformers warns at each load
    assert config.max_position_embeddings > 8192
    assert longest_sequence(config) == tokens.numel()
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.load_state_dict(adapter.to_hf(ours.state_dict()))
    logits = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens), logits, rtol=0, atol=1e-4)
    args.rope_factor = 1.0
    ours.init_buffers()
    assert (ours(tokens) - logits).abs().max() > 0.1


def test_initial_distribution_is_torchtitans_llama():
    torch.manual_seed(0)
    sizes = {"dim": 256, "n_layers": 6, "n_heads": 4, "vocab_size": 2048}
    stock = Transformer(TransformerModelArgs(**sizes))
    with torch.no_grad():
        stock.init_weights()
    sizes |= {"head_dim": 64, "n_kv_heads": 4, "hidden_dim": 768}
    args = model_args("llama_disp", "nano_untied", sizes)
    ours = drawn(llama.LlamaDispModel(args), args)
    theirs = dict(stock.named_parameters())
    assert ours.keys() == theirs.keys()
    assert_drawn_alike(ours, theirs)


def drawn(model, args):
    return {
        name: draw(name, p.shape, args, seed=0) for name, p in model.named_parameters()
    }


def assert_drawn_alike(ours, theirs):
    """Constants are equal.

    The standard error of a standard deviation over n draws is 1/√(2n), about 1 % here.
    """
    for name, w in ours.items():
        if w.ndim == 1:
            assert torch.equal(w, theirs[name]), name
        else:
            assert w.std().item() == pytest.approx(
                theirs[name].std().item(), rel=0.05
            ), name
            assert w.abs().max() <= theirs[name].abs().max() * 1.3, name


@pytest.mark.parametrize("tied", [True, False])
def test_initial_distribution_is_torchtitans(tied):
    args = qwen3.flavors["debugmodel"]
    args.enable_weight_tying = tied
    stock = Qwen3Model(copy.deepcopy(args))
    torch.manual_seed(0)
    with torch.no_grad():
        stock.init_weights()
    assert_drawn_alike(drawn(stock, args), dict(stock.named_parameters()))


def test_seed_and_name_decide_the_weights():
    """Activation checkpointing and torch.compile do not."""
    args = qwen3.flavors["nano"]
    shape = torch.Size([8, 8])
    drawn = [(0, 1), (0, 1), (1, 1), (0, 2)]
    one, *others = (
        draw(f"layers.{layer}.attention.wq.weight", shape, args, seed)
        for layer, seed in drawn
    )
    assert [torch.equal(one, other) for other in others] == [True, False, False]
    model = random_model(overrides="n_layers=1")
    model.init_weights()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.layers["0"] = torch.compile(checkpoint_wrapper(model.layers["0"]))
    model.init_weights()
    for name, p in model.named_parameters():
        assert torch.equal(p, expected[canonical_name(name)]), name


def test_activations_of_a_config():
    """Those of a block are its output, 1 more than its index: 0 is the embedding's.

    The final norm's replaces the last's.
    """
    config = load_config([])
    args = qwen3.flavors["nano"]
    config.dispersion.enabled = False
    args.update_from_config(config)
    assert args.activations == ()
    config.dispersion.enabled = True
    for config.dispersion.layers, expected, with_final_norm in (
        ("all", (1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 7)),
        ("last", (6,), (7,)),
        ("early_half", (1, 2, 3), None),
        ("late_half", (4, 5, 6), (4, 5, 7)),
        ([3, 0], (1, 4), None),
        ([5, 2], (3, 6), (3, 7)),
    ):
        config.dispersion.final_norm = False
        args.update_from_config(config)
        assert args.activations == expected
        config.dispersion.final_norm = True
        with (
            nullcontext()
            if with_final_norm
            else pytest.raises(ConfigError, match="leaves the last block .* out")
        ):
            args.update_from_config(config)
            assert args.activations == with_final_norm


def test_block_indices_of_five():
    assert (block_indices("early_half", 5), block_indices("late_half", 5)) == (
        (0, 1),
        (2, 3, 4),
    )
    for bad in ("first", [5], [-1], [], [1, 1], [True]):
        with pytest.raises(ConfigError, match=r"dispersion\.layers is"):
            block_indices(bad, 5)


# Blocks, heads and width: config.json of openai-community/gpt2, -medium, -large and
# -xl. Parameters: with the embedding once.
GPT2 = {
    "124M": (12, 12, 768, 124_439_808),
    "355M": (24, 16, 1024, 354_823_168),
    "774M": (36, 20, 1280, 774_030_080),
    "1.5B": (48, 25, 1600, 1_557_611_200),
}


@pytest.mark.parametrize("flavor", GPT2)
def test_flavors_are_gpt2s(flavor, tmp_path):
    """Parameters counted by hand; config.json as an export writes it."""
    layers, heads, width, parameters = GPT2[flavor]
    block = (
        4 * (width * width + width)
        + 2 * 4 * width * width
        + 4 * width
        + width
        + 4 * width
    )
    assert parameters == layers * block + 2 * width + (50257 + 1024) * width
    config = transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=heads)
    adapter = gpt2.GPT2HfAdapter(gpt2.flavors[flavor], None)
    stated = transformers.GPT2Config(**adapter.architecture(), **adapter.extras())
    differ = {
        key for key, value in config.to_dict().items() if stated.to_dict()[key] != value
    }
    # None: 4 × n_embd; and no dropout here
    assert differ == {"n_inner", "resid_pdrop", "embd_pdrop", "attn_pdrop"}
    assert stated.n_inner == 4 * width
    # The tied matrix multiplies, and positions do not.
    check_published(
        "gpt2_disp",
        flavor,
        config,
        parameters,
        parameters - 1024 * width,
        GPT2,
        tmp_path,
    )


@torch.no_grad()
def test_positions_of_permuted_tokens():
    """Context parallelism shares out and permutes tokens, and says which positions they
    have.
    """
    model = random_model(name="gpt2_disp")
    order = torch.arange(48).flip(0)
    assert torch.equal(
        model.embed(TOKENS[:, order], order.expand(2, 48)),
        model.embed(TOKENS, None)[:, order],
    )


def test_initial_weights_are_transformers():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=64, n_layer=6, n_head=4, vocab_size=2049)
    theirs = transformers.GPT2LMHeadModel(config).state_dict()
    args = gpt2.flavors["nano"]
    ours = gpt2.GPT2HfAdapter(args, None).to_hf(drawn(gpt2.GPT2DispModel(args), args))
    assert ours.keys() == theirs.keys() - {"lm_head.weight"}
    assert_drawn_alike(ours, theirs)


def test_odd_rows_of_gpt2_under_tensor_parallelism():
    """It has 2,049 rows and 64 columns, and positions for 1,024 tokens."""
    for ranks, told in (
        (16, None),
        (12, "2049 rows of .* 'nano', and the 64 columns, .* are not a multiple of 6 "),
    ):
        words = (
            "--training.seq_len",
            "1024",
            "--parallelism.tensor_parallel_degree",
            "2",
        )
        config = job_config(
            "",
            "unused",
            "--model.name",
            "gpt2_disp",
            *words,
            "--training.global_batch_size",
            str(ranks),
        )
        with pytest.raises(ConfigError, match=told) if told else nullcontext():
            check_config(config, ranks)


def test_text_and_card_of_an_exported_gpt2(hf_tokenizer, tmp_path):
    words = ("--model.name", "gpt2_disp", "--model.flavor", "nano")
    dest = tmp_path / "exported"
    run = save_run(
        tmp_path / "run", random_model(name="gpt2_disp"), hf_tokenizer, *words
    )
    export(ExportOptions(run, dest))
    assert "GPT-2, 496,704 parameters" in (dest / "README.md").read_text()
    # Up to the 64 tokens of training's sequences: the other rows of the table of
    # positions were never trained.
    texts = [
        generate(GenerateOptions(folder, "A text", 100, temperature=0))
        for folder in (run, dest)
    ]
    assert texts[0] == texts[1]
    config = transformers.AutoConfig.from_pretrained(dest)
    assert longest_sequence(config) == SEQ_LEN < config.n_positions


@pytest.mark.parametrize(
    ("recipe", "expected"), [("tensorwise", True), ("rowwise", False), (None, False)]
)
def test_tensor_parallelism_in_float8(monkeypatch, recipe, expected):
    """By the name of TorchTitan's own converter."""
    asked = {}
    monkeypatch.setattr(
        qwen3, "apply_non_moe_tp", lambda *_, **options: asked.update(options)
    )
    words = ["--model.name", "qwen3_disp"]
    if recipe is not None:
        words += ["--model.converters", "quantize.linear.float8"]
        words += ["--quantize.linear.float8.recipe_name", recipe]
    model = mock.Mock(model_args=mock.Mock(restart_positions=False))
    qwen3.apply_tp(model, mock.Mock(cp_enabled=False), load_config(words))
    assert asked["enable_float8_tensorwise_tp"] == expected
