"""gpt2_disp against transformers' GPT2LMHeadModel: sizes and initial weights; what a config may ask for; and its exports.

With weights: ``test_models``. Its files: ``test_hf_import``. On meshes: ``test_meshes``.
"""

from contextlib import nullcontext

import pytest
import torch
import transformers
from safetensors.torch import load_file

import titan_disp.plugin  # noqa: F401
from tests.mesh import job_config
from tests.published import check_published
from tests.saved_run import SEQ_LEN, random_model, save_run
from titan_disp.config.checks import check_config
from titan_disp.config.options import ExportOptions, GenerateOptions
from titan_disp.errors import ConfigError
from titan_disp.lab.export.export import export
from titan_disp.lab.export.generate import generate
from titan_disp.lab.export.saved import longest_sequence
from titan_disp.lab.inspection.targets import find_targets
from titan_disp.models.decoder import draw
from titan_disp.models.gpt2 import GPT2DispModel, GPT2HfAdapter, flavors

TOKENS = torch.arange(96).view(2, 48) * 19 % 2049

# Blocks, heads and width: config.json of openai-community/gpt2, -medium, -large and -xl. Parameters: with the embedding once.
PUBLISHED = {
    "124M": (12, 12, 768, 124_439_808),
    "355M": (24, 16, 1024, 354_823_168),
    "774M": (36, 20, 1280, 774_030_080),
    "1.5B": (48, 25, 1600, 1_557_611_200),
}


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_flavors_are_gpt2s(flavor, tmp_path):
    """Parameters counted by hand; config.json as an export writes it."""
    layers, heads, width, parameters = PUBLISHED[flavor]
    block = 4 * (width * width + width) + 2 * 4 * width * width + 4 * width + width + 4 * width
    assert parameters == layers * block + 2 * width + (50257 + 1024) * width
    config = transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=heads)
    adapter = GPT2HfAdapter(flavors[flavor], None)
    stated = transformers.GPT2Config(**adapter.architecture(), **adapter.extras())
    differ = {key for key, value in config.to_dict().items() if stated.to_dict()[key] != value}
    assert differ == {"n_inner", "resid_pdrop", "embd_pdrop", "attn_pdrop"}  # None: 4 × n_embd; and no dropout here
    assert stated.n_inner == 4 * width
    # The tied matrix multiplies, and positions do not.
    check_published("gpt2_disp", flavor, config, parameters, parameters - 1024 * width, PUBLISHED, tmp_path)


@torch.no_grad()
def test_positions_of_permuted_tokens():
    """Context parallelism shares out and permutes tokens, and says which positions they have."""
    model = random_model(name="gpt2_disp")
    order = torch.arange(48).flip(0)
    assert torch.equal(model.embed(TOKENS[:, order], order.expand(2, 48)), model.embed(TOKENS, None)[:, order])


def test_initial_weights_are_transformers():
    """Standard deviations; biases are 0, and norms 1."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=64, n_layer=6, n_head=4, vocab_size=2049)
    theirs = transformers.GPT2LMHeadModel(config).state_dict()
    args = flavors["nano"]
    shapes = {name: p.shape for name, p in GPT2DispModel(args).named_parameters()}
    ours = GPT2HfAdapter(args, None).to_hf({name: draw(name, shape, args, seed=0) for name, shape in shapes.items()})
    assert ours.keys() == theirs.keys() - {"lm_head.weight"}
    for name, w in ours.items():
        if w.ndim == 1:
            assert torch.equal(w, theirs[name]), name
        else:  # the standard error of a standard deviation over n draws is 1/√(2n), below 1.2 % for these sizes
            assert w.std().item() == pytest.approx(theirs[name].std().item(), rel=0.05), name


TP = "--parallelism.tensor_parallel_degree 2"


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (1, "--training.seq_len 1025", "training.seq_len is 1025, but gpt2_disp 'nano' has learned positions for 1024"),
        (1, "--training.seq_len 1024 --training.local_batch_size 1", None),
        (1, "--model.flavor 0.6B", "model.flavor is '0.6B', expected one of nano, nano_untied, 124M"),
        (1, "--model.name gpt2", 'model.name is \'gpt2\', expected "qwen3_disp" or "gpt2_disp"'),
        (2, f"{TP} --model.flavor 1.5B", "2 does not divide the 25 attention"),
        (
            12,
            f"{TP} --training.global_batch_size 12",
            "2049 rows of .* 'nano', so that FSDP shards its 64 columns, which 6",
        ),
        (16, f"{TP} --training.global_batch_size 16", None),  # 8 shards of 64 columns
    ],
)
def test_configs(sample, ranks, options, message):
    config = job_config(sample, "unused", "--model.name", "gpt2_disp", *options.split())
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_config(config, ranks)


@torch.no_grad()
def test_export_generate_and_condensation_of_a_run(hf_tokenizer, tmp_path):
    """Logits as transformers', the file's form as theirs; the run and its export give the same text and the same layers."""
    model = random_model(name="gpt2_disp")
    run = save_run(tmp_path / "run", model, hf_tokenizer, "--model.name", "gpt2_disp", "--model.flavor", "nano")
    dest = tmp_path / "exported"
    export(ExportOptions(run, dest))
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(dest, output_loading_info=True)
    assert not any(info.values()), info
    assert isinstance(theirs, transformers.GPT2LMHeadModel)
    torch.testing.assert_close(theirs.eval()(TOKENS).logits, model(TOKENS), atol=1e-4, rtol=0)
    assert load_file(dest / "model.safetensors").keys() == theirs.state_dict().keys() - {"lm_head.weight"}
    assert (theirs.config.n_positions, theirs.config.attn_pdrop) == (1024, 0.0)
    assert "GPT-2, 496,704 parameters" in (dest / "README.md").read_text()
    # Up to the 64 tokens of training's sequences: the other rows of the table of positions were never trained.
    texts = [generate(GenerateOptions(folder, "A text", 100, temperature=0)) for folder in (run, dest)]
    assert texts[0] == texts[1]
    assert longest_sequence(theirs.config) == SEQ_LEN < theirs.config.n_positions
    layers = [{}, {}]
    targets = find_targets([str(run), str(dest)], False, None).values()
    for target, found in zip(targets, layers, strict=True):
        assert target.max_tokens == SEQ_LEN
        target.load(torch.device("cpu"), "float32")(TOKENS, found.__setitem__)
    assert layers[0].keys() == set(range(8))
    torch.testing.assert_close(*layers, atol=1e-4, rtol=0)
