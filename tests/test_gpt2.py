"""gpt2_disp against transformers' GPT2LMHeadModel: sizes, initial weights, files; and on a mesh."""

import json
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Shard
from torchtitan.components.loss import cross_entropy_loss

from tests.command_line import ROOT
from tests.distributed import spawn
from tests.mesh import GLOBAL_BATCH, SEQ_LEN, assert_tied, build, canonical, full, global_batch, job_config, step
from tests.published import check_published
from tests.saved_run import SEQ_LEN as SAVED_SEQ_LEN
from tests.saved_run import random_model, save_run
from titan_disp.cluster import plan
from titan_disp.cluster.plan import make_plan
from titan_disp.cluster.preflight import small_flavor
from titan_disp.config.checks import check_config
from titan_disp.config.load import load_config
from titan_disp.config.options import ExportOptions, GenerateOptions, Machine
from titan_disp.data.tokenizer import encoder, load_tokenizer
from titan_disp.dispersion import DispersionLoss, DispersionObjective
from titan_disp.errors import ConfigError
from titan_disp.lab.export.export import export
from titan_disp.lab.export.generate import generate
from titan_disp.lab.export.saved import find_saved, load_model, longest_sequence
from titan_disp.lab.inspection.targets import find_targets
from titan_disp.models.decoder import draw
from titan_disp.models.gpt2 import GPT2DispModel, GPT2HfAdapter, flavors
from titan_disp.models.hf import check_hf_folder

TOKENS = torch.arange(96).view(2, 48) * 19 % 2049
NANO = {"n_embd": 64, "n_layer": 6, "n_head": 4, "vocab_size": 2049}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIG = ROOT / "train_configs" / "gpt2_124m_c4.toml"

# Blocks, heads and width: config.json of openai-community/gpt2, -medium, -large and -xl. Parameters: with the embedding once.
PUBLISHED = {
    "124M": (12, 12, 768, 124_439_808),
    "355M": (24, 16, 1024, 354_823_168),
    "774M": (36, 20, 1280, 774_030_080),
    "1.5B": (48, 25, 1600, 1_557_611_200),
}


def random_weights(**changes):
    """transformers' model of nano's shape, with weights so large that logits depend on every one of them."""
    torch.manual_seed(5)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**NANO | NO_DROPOUT | changes)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return theirs


def of_ours(theirs, activations=()):
    """Ours with the same weights."""
    args = flavors["nano" if theirs.config.tie_word_embeddings else "nano_untied"]
    args.activations = activations
    model = GPT2DispModel(args)
    model.load_state_dict(GPT2HfAdapter(args, None).from_hf(theirs.state_dict()))
    return model


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_flavors_are_gpt2s(flavor, tmp_path):
    """Sizes; parameters counted by hand; config.json as an export writes it."""
    layers, heads, width, parameters = PUBLISHED[flavor]
    args = flavors[flavor]
    assert (args.n_layers, args.n_heads, args.n_kv_heads, args.dim) == (layers, heads, heads, width)
    assert (args.vocab_size, args.max_positions, args.norm_eps, args.enable_weight_tying) == (50257, 1024, 1e-5, True)
    block = 4 * (width * width + width) + 2 * 4 * width * width + 4 * width + width + 4 * width
    assert parameters == layers * block + 2 * width + (50257 + 1024) * width
    config = transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=heads)
    adapter = GPT2HfAdapter(args, None)
    stated = transformers.GPT2Config(**adapter.architecture(), **adapter.extras())
    differ = {key for key, value in config.to_dict().items() if stated.to_dict()[key] != value}
    assert differ == {"n_inner", "resid_pdrop", "embd_pdrop", "attn_pdrop"}  # None: 4 × n_embd; and no dropout here
    assert stated.n_inner == 4 * width
    # The tied matrix multiplies, and positions do not.
    check_published("gpt2_disp", flavor, config, parameters, parameters - 1024 * width, PUBLISHED, tmp_path)


@torch.no_grad()
def test_positions_of_permuted_tokens():
    """Context parallelism shares out and permutes tokens, and says which positions they have."""
    model = of_ours(random_weights())
    order = torch.arange(48).flip(0)
    assert torch.equal(model.embed(TOKENS[:, order], order.expand(2, 48)), model.embed(TOKENS, None)[:, order])


def test_initial_weights_are_transformers():
    """Standard deviations; biases are 0, and norms 1."""
    config = transformers.GPT2Config(**NANO)
    torch.manual_seed(0)
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
    assert ours["transformer.h.3.attn.c_proj.weight"].std().item() == pytest.approx(0.02 / 12**0.5, rel=0.05)


def nano(sample, *options):
    names = ("--model.name", "gpt2_disp", "--model.flavor", "nano", "--training.global_batch_size", "16")
    return job_config(sample, "unused", *names, *options)


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (1, ("--training.seq_len", "1025"), "training.seq_len is 1025, but gpt2_disp 'nano' has learned positions for 1024"),
        (1, ("--model.flavor", "0.6B"), "model.flavor is '0.6B', expected one of nano, nano_untied, 124M"),
        (1, ("--model.name", "gpt2"), "model.name is 'gpt2', expected \"qwen3_disp\" or \"gpt2_disp\""),
        (2, ("--parallelism.tensor_parallel_degree", "2", "--model.flavor", "1.5B"), "2 does not divide the 25 attention"),
        (12, ("--parallelism.tensor_parallel_degree", "2", "--training.global_batch_size", "12"),
         "does not divide the 2049 rows of an embedding of 'nano', so that FSDP shards its 64 columns, which 6 shards"),
    ],
)  # fmt: skip
def test_refused(sample, ranks, options, message):
    with pytest.raises(ConfigError, match=message):
        check_config(nano(sample, *options), ranks)


def test_accepted(sample):
    check_config(nano(sample, "--training.seq_len", "1024", "--training.local_batch_size", "1"), 1)
    check_config(nano(sample, "--parallelism.tensor_parallel_degree", "2"), 16)  # 8 shards of 64 columns
    tp = nano(sample, "--model.flavor", "124M", "--parallelism.tensor_parallel_degree", "4")
    assert small_flavor(tp, 4) == "nano"


def test_the_plan(monkeypatch):
    monkeypatch.setattr(plan, "MAX_NODES", 1)  # of the node counts that are tried
    found = make_plan(load_config(["--job.config_file", str(CONFIG)]), Machine(1, 8))
    assert found.model.parameters == 124_439_808
    assert found.model.parameters_non_embedding == 124_439_808 - (50257 + 1024) * 768
    assert (found.mesh.replicate, found.mesh.shard) == (1, 8)
    assert (found.batch.accumulation_steps, found.batch.steps) == (4, 19_074)
    assert found.model.flops == 512 * 1024 * (6 * (124_439_808 - 1024 * 768) + 6 * 12 * 2 * 768 * 1024)
    # bf16 gathers, twice for blocks, and fp32 reduces: the embeddings, the final norm and the output are one group.
    blocks = 12 * 7_087_872
    root = 124_439_808 - blocks
    assert found.time.within_bytes == pytest.approx(4 * 7 / 8 * (root * (2 + 4) + blocks * (2 * 2 + 4)))


@pytest.fixture(scope="module")
def published(tmp_path_factory, hf_tokenizer):
    """A folder as transformers saves it, beside a tokenizer as the hub has GPT-2's: its EOS is named in config.json alone."""
    folder = tmp_path_factory.mktemp("published")
    theirs = random_weights()
    theirs.config.eos_token_id = theirs.config.bos_token_id = load_tokenizer(hf_tokenizer).eos_id
    theirs.save_pretrained(folder)
    shutil.copy(hf_tokenizer / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    return folder


def as_on_the_hub(folder, dest):
    """openai-community/gpt2's own way: no prefix, the causal mask beside the weights, no n_inner in config.json."""
    shutil.copytree(folder, dest)
    weights = {name.removeprefix("transformer."): w for name, w in load_file(folder / "model.safetensors").items()}
    weights |= {f"h.{i}.attn.bias": torch.ones(1024, 1024).tril().bool()[None, None] for i in range(6)}
    save_file(weights, dest / "model.safetensors")
    config = json.loads((dest / "config.json").read_text())
    kept = (
        "model_type",
        "vocab_size",
        "n_positions",
        "n_embd",
        "n_layer",
        "n_head",
        "activation_function",
        "eos_token_id",
    )
    (dest / "config.json").write_text(json.dumps({key: config[key] for key in kept} | {"layer_norm_epsilon": 1e-05}))
    return dest


@pytest.mark.parametrize("form", ["transformers", "hub"])
def test_folders_are_read_as_dcp_reads_them(published, tmp_path, form):
    """Into a model's state dict, under whatever names; and nothing else fits."""
    folder = published if form == "transformers" else as_on_the_hub(published, tmp_path / "hub")
    args = flavors["nano"]
    adapter = GPT2HfAdapter(args, None)
    check_hf_folder(folder, adapter)
    model = GPT2DispModel(args)
    hf = adapter.to_hf(model.state_dict())
    dcp.load(hf, storage_reader=adapter.get_hf_storage_reader(str(folder)), no_dist=True)
    model.load_state_dict(adapter.from_hf(hf))
    expected = of_ours(random_weights()).state_dict()
    assert all(torch.equal(model.state_dict()[name], w) for name, w in expected.items())
    for key, value in (("n_layer", 7), ("n_inner", 200), ("activation_function", "relu"), ("n_positions", 512)):
        other = shutil.copytree(folder, tmp_path / key)
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(ConfigError, match=f"another network than .* describe: {key} is {value!r} in config.json"):
            check_hf_folder(other, adapter)


FORMS = {
    "transformers 4 and 5": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "hub": {"model_max_length": 1024},
}


@pytest.mark.parametrize("form", FORMS)
def test_tokenizer(hf_tokenizer, published, tmp_path, form):
    """One <|endoftext|> ends a document, and none begins it; whatever tokenizer_config.json says of the token, or does not."""
    shutil.copy(hf_tokenizer / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(FORMS[form]))
    if form == "hub":
        with pytest.raises(ConfigError, match="no EOS token"):
            encoder(load_tokenizer(tmp_path))
        shutil.copy(published / "config.json", tmp_path)
    trained = load_tokenizer(hf_tokenizer)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.bos_id, loaded.eos_id) == (None, trained.eos_id)
    plain = trained.tokenizer.encode("A text. Of words", add_special_tokens=False).ids
    assert encoder(loaded)("A text. Of words") == [*plain, trained.eos_id]


@torch.no_grad()
def test_export_generate_and_condensation_of_a_run(published, tmp_path):
    """Logits as transformers', the file's form as theirs; the run and its export give the same text and the same layers."""
    model = random_model(name="gpt2_disp")
    options = ("--model.name", "gpt2_disp", "--model.flavor", "nano")
    run = save_run(tmp_path / "run", model, published, *options)
    dest = tmp_path / "exported"
    export(ExportOptions(run, dest))
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(dest, output_loading_info=True)
    assert not any(info.values()), info
    assert isinstance(theirs, transformers.GPT2LMHeadModel)
    torch.testing.assert_close(theirs.eval()(TOKENS).logits, model(TOKENS), atol=1e-4, rtol=0)
    torch.testing.assert_close(load_model(find_saved(run))(TOKENS), model(TOKENS), atol=0, rtol=0)
    assert load_file(dest / "model.safetensors").keys() == load_file(published / "model.safetensors").keys()
    assert (theirs.config.n_positions, theirs.config.attn_pdrop) == (1024, 0.0)
    assert "GPT-2, 496,704 parameters" in (dest / "README.md").read_text()
    tokenizer = transformers.AutoTokenizer.from_pretrained(dest)
    assert tokenizer.eos_token_id == load_tokenizer(published).eos_id
    # Up to the 64 tokens of training's sequences: the other rows of the table of positions were never trained.
    assert generate(GenerateOptions(run, "A text", 100, temperature=0)) == generate(
        GenerateOptions(dest, "A text", 100, temperature=0)
    )
    assert longest_sequence(theirs.config) == SAVED_SEQ_LEN < theirs.config.n_positions
    assert [one.max_tokens for one in find_targets([str(run), str(dest)], False, None).values()] == [SAVED_SEQ_LEN] * 2

    layers = {}
    for name, target in find_targets([str(run), str(dest)], False, None).items():
        layers[name] = found = {}
        target.load(torch.device("cpu"), "float32")(TOKENS, found.__setitem__)
    ours, exported = layers.values()
    assert ours.keys() == exported.keys() == set(range(8))
    for layer, z in ours.items():
        torch.testing.assert_close(z, exported[layer], atol=1e-4, rtol=0)


MESH = ("--parallelism.tensor_parallel_degree", "2")


def step_from_transformers_weights(sample, published, folder):
    """The real trainer on FSDP2 × TP: transformers' weights in, a step at learning rate 0, transformers' weights out."""
    trainer = build(
        *(sample, folder / "run", "--model.name", "gpt2_disp", "--model.flavor", "nano", *MESH),
        *("--model.hf_assets_path", str(published), "--optimizer.lr", "0", "--checkpoint.enable"),
        *("--checkpoint.initial_load_in_hf", "--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only"),
    )
    model = trainer.model_parts[0]
    assert_tied(model)
    # 2,049 rows cannot be shared out evenly: FSDP takes columns.
    assert model.tok_embeddings.weight.placements == (Shard(1), Shard(0))
    trainer.checkpointer.load()
    assert_tied(model)
    gradients = step(trainer)
    after = {name: full(p.detach()) for name, p in canonical(model).items()}
    trainer.checkpointer.save(trainer.step, last_step=True)
    trainer.close()
    if dist.get_rank() == 0:
        torch.save({"gradients": gradients, "after": after}, folder / "found.pt")


@pytest.fixture(scope="module")
def stepped(sample, published, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stepped")
    spawn(4, step_from_transformers_weights, sample, published, folder)
    return folder


def test_import_and_export_are_inverse_on_a_mesh(published, stepped):
    """Bit for bit, through FSDP2 × TP 2×2 and a step at learning rate 0."""
    before, saved = load_file(published / "model.safetensors"), {}
    for file in (stepped / "run/checkpoint/step-1").glob("*.safetensors"):
        saved |= load_file(file)
    assert before.keys() == saved.keys()
    assert all(torch.equal(saved[name], w) for name, w in before.items())
    after, expected = torch.load(stepped / "found.pt")["after"], of_ours(random_weights()).state_dict()
    assert after.keys() == expected.keys() - {"output.weight"}
    assert all(torch.equal(w, expected[name]) for name, w in after.items())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(stepped / "run/checkpoint/step-1")
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, random_weights()(TOKENS).logits, atol=0, rtol=0)


def test_gradients_on_a_mesh_are_one_process(stepped):
    """Of the whole batch at once, by plain PyTorch: FSDP2 × TP 2×2 with accumulation gives the same.

    More meshes: test_meshes. A bias of the keys adds the same to all scores of a query: its gradient is 0 but for rounding.
    """
    found = torch.load(stepped / "found.pt")["gradients"]
    model = of_ours(random_weights(), tuple(range(1, 7)))
    inputs, labels = global_batch()
    assert inputs.shape == (GLOBAL_BATCH, SEQ_LEN)
    objective = DispersionObjective(cross_entropy_loss, DispersionLoss(), lambda step: 1.0)
    (objective(model(inputs), labels) / (labels != -100).sum()).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert found.keys() == expected.keys()
    for name, g in expected.items():
        scale = expected[name.replace("wk.bias", "wq.bias")].norm()
        assert (found[name] - g).norm() <= 1e-5 * scale, name
