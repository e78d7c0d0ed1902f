"""Layers one at a time, models of the hub, devices and dtypes, and the paper's sampling."""

import dataclasses
import json
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import constants
from matplotlib.figure import Figure
from tokenizers import Tokenizer, processors

from tests.command_line import typed
from tests.saved_run import random_model, save_run
from tests.test_condensation_command import refused, save_gpt2
from titan_disp.condensation.record import Condensation
from titan_disp.errors import ConfigError
from titan_disp.lab.export.saved import find_saved, load_model
from titan_disp.lab.inspection import command as command_module
from titan_disp.lab.inspection.command import step_of
from titan_disp.lab.inspection.targets import HubModel, find_targets, hugging_face_layers, parse_group, parse_id
from titan_disp.lab.inspection.texts import contiguous_sequences, read_texts, surround
from titan_disp.models.decoder import draw

BLOCKS = 6
SIZES = {"vocab_size": 120, "hidden_size": 16, "num_hidden_layers": BLOCKS, "num_attention_heads": 2}
CONFIGS = {
    "GPT2": {"max_position_embeddings": 64},
    "Qwen3": {"intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 8},
    "Llama": {"intermediate_size": 32},
    "Bloom": {},
    "GPTNeoX": {"intermediate_size": 32, "max_position_embeddings": 64},
    "OPT": {"ffn_dim": 32, "max_position_embeddings": 64, "word_embed_proj_dim": 16},
    # There are as many experts as layers, in other lists.
    "Mixtral": {"intermediate_size": 32, "num_local_experts": BLOCKS, "num_key_value_heads": 1},
}


def random_causal_lm(name):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **CONFIGS[name])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tokens(count=2, length=12):
    return torch.arange(count * length).view(count, length) * 7 % 120


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_are_transformers_hidden_states(name):
    """One at a time: at most a layer, the embedding and a block's output are alive."""
    model = random_causal_lm(name)
    layers = hugging_face_layers(model)
    got = {}
    layers(tokens(), lambda layer, z: got.update({layer: z.clone()}))
    assert list(got) == list(range(layers.count)) == list(range(BLOCKS + 2))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    *expected, last = model.base_model(tokens(), output_hidden_states=True).hidden_states
    for layer, z in (*enumerate(expected), (BLOCKS + 1, last)):
        torch.testing.assert_close(got[layer], z, rtol=0, atol=0)
    assert not torch.equal(got[BLOCKS], got[BLOCKS + 1])  # before the final norm, and after it
    if name == "Qwen3":
        torch.testing.assert_close(model.model.norm(got[BLOCKS]), got[BLOCKS + 1])
    assert layers.parameters == sum(p.numel() for p in set(model.parameters()))
    assert largest_number_alive(layers) <= 3
    layers.untrain(seed=0)  # the weights had a standard deviation of 0.3
    expected = getattr(model.config, "initializer_range", None) or model.config.init_std  # OPT's name for it
    assert model.get_input_embeddings().weight.std() == pytest.approx(expected, rel=0.1)
    assert layers.head is model.get_output_embeddings()


@pytest.fixture(scope="module")
def run(tmp_path_factory, hf_tokenizer):
    return save_run(tmp_path_factory.mktemp("runs") / "run", random_model(), hf_tokenizer)


def largest_number_alive(layers):
    alive, most = [], 0

    def take_in(_, z):
        nonlocal most
        alive[:] = [reference for reference in alive if reference() is not None] + [weakref.ref(z)]
        most = max(most, len(alive))

    layers(tokens(), take_in)
    return most


@torch.no_grad()
def test_a_model_of_another_layout():
    """XLNet's layers are [N, B, F]. They would be measured as other sequences, without a word."""
    from transformers import XLNetConfig, XLNetLMHeadModel

    model = XLNetLMHeadModel(XLNetConfig(vocab_size=20, d_model=8, n_layer=2, n_head=2, d_inner=8)).eval()
    with pytest.raises(ConfigError, match=r"layer 0 has the shape \[5, 3, 8\] for \[3, 5\] tokens"):
        hugging_face_layers(model)(torch.arange(15).view(3, 5), lambda layer, h: None)


@torch.no_grad()
def test_layers_of_a_run(run):
    (target,) = find_targets([str(run)], False, None).values()
    layers, got = target.load(torch.device("cpu"), "float32"), {}
    layers(tokens(length=16), lambda layer, z: got.update({layer: z}))
    model = load_model(find_saved(run))
    _, expected = model(tokens(length=16), return_activations=range(8))
    assert layers.parameters == sum(p.numel() for p in set(model.parameters()))
    assert list(got) == list(range(8))
    torch.testing.assert_close([*got.values()], [*expected], rtol=0, atol=0)
    assert largest_number_alive(layers) <= 3
    layers.untrain(0)
    expected = draw("tok_embeddings.weight", layers.head.weight.shape, model.model_args, seed=42)  # the run's own seed
    assert torch.equal(layers.head.weight, expected)
    dcp.save(model.state_dict(), checkpoint_id=run / "checkpoint" / "step-0", no_dist=True)
    layers.untrain(0)
    assert torch.equal(layers.head.weight, model.output.weight)
    shutil.rmtree(run / "checkpoint" / "step-0")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory, hf_tokenizer):
    return save_gpt2(tmp_path_factory.mktemp("models") / "gpt2", hf_tokenizer)


@pytest.fixture
def hub(tmp_path, gpt2, hf_tokenizer, monkeypatch):
    """The cache of the hub's client has lab/tiny at two revisions, and there is no internet."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--lab--tiny"
    (repository / "refs").mkdir(parents=True)
    shutil.copytree(gpt2, repository / "snapshots" / ("a" * 40))
    save_gpt2(repository / "snapshots" / ("b" * 40), hf_tokenizer, seed=1)
    for revision, commit in (("main", "a"), ("step1000", "a"), ("step20", "b")):
        (repository / "refs" / revision).write_text(commit * 40)
    return repository


@pytest.fixture
def drawn(monkeypatch):
    figures = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.update({Path(path).name: figure}))
    return figures


@pytest.fixture
def command(monkeypatch, drawn):
    return lambda *arguments: typed(monkeypatch, "condensation", *arguments)


def test_a_model_of_the_hub(hub, gpt2, text, command, tmp_path):
    few = ("--text", text, "--sequences", 2)
    command("lab/tiny", "lab/tiny@step20", "--out", tmp_path / "a", *few)
    command(gpt2, "--out", tmp_path / "b", *few)
    main, step20 = (Condensation.load(tmp_path / "a" / f"{name}.npz") for name in ("tiny", "tiny@step20"))
    assert main.to_json() == Condensation.load(tmp_path / "b" / "gpt2.npz").to_json()
    assert main.to_json() != step20.to_json()
    found = json.loads((tmp_path / "a" / "metrics.json").read_text())["targets"]
    assert [one["revision"] for one in found] == [None, "step20"]


@pytest.mark.parametrize(
    ("names", "shown"),
    [(("step1000", "step20"), ["20", "1,000", "step"]), (("old", "new"), ["old", "new", "revision"])],
)
def test_revisions_over_training(hub, text, command, drawn, tmp_path, names, shown):
    (hub / "refs" / "new").write_text("a" * 40)
    (hub / "refs" / "old").write_text("b" * 40)
    command(*(f"lab/tiny@{name}" for name in names), "--text", text, "--sequences", 2, "--out", tmp_path)
    legend = drawn["over_training.png"].legends[0]
    assert [t.get_text() for t in (*legend.texts, legend.get_title())] == shown
    picture = drawn.get("over_steps.png")
    assert (picture and picture.axes[0].lines[0].get_xdata().tolist()) == ([20, 1000] if "step" in shown else None)


def test_steps_of_revisions(gpt2):
    steps = {"step1000": 1000, "stage1-step140000-tokens294B": 140000, "step_7": 7, "main": None, None: None}
    (target,) = find_targets([str(gpt2)], False, None).values()
    assert {name: step_of(dataclasses.replace(target, revision=name)) for name in steps} == steps


def test_what_the_cache_lacks_is_told_with_the_command(hub, text, command, tmp_path, capsys):
    rest = ("--text", text, "--sequences", 2, "--out", tmp_path / "out")
    for name, call in (
        ("Qwen/Qwen3-0.6B", "snapshot_download('Qwen/Qwen3-0.6B', allow_patterns=['*.json', "),
        ("lab/tiny@v2", "snapshot_download('lab/tiny', revision='v2', allow_patterns=["),
    ):
        assert f'"from huggingface_hub import snapshot_download; {call}' in refused(command, capsys, name, *rest)
    # An index of pickles that were not downloaded does not matter, but one of two files of weights does.
    folder, of_step20 = hub / "snapshots" / ("b" * 40), "snapshot_download('lab/tiny', revision='step20', "
    pickles = {"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(pickles))
    assert command("lab/tiny@step20", *rest) == 0
    weights = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights))
    told = refused(command, capsys, "lab/tiny@step20", *rest)
    assert "lacks 1 of its 2 files of weights, 'model-00002-of-00002.safetensors' first" in told
    assert (of_step20 in told, ".bin'" in told) == (True, False)
    for file in folder.glob("*model*"):
        file.unlink()
    told = refused(command, capsys, "lab/tiny@step20", *rest)
    assert ("no weights" in told, "'pytorch_model*.bin'])" in told) == (True, True)  # it may have pickles only


def test_ids_of_the_hub():
    for name in ("gpt2", "Qwen/Qwen3-0.6B"):
        assert parse_id(name) == HubModel(name, None)
    assert parse_id("lab/m@refs/pr/1") == HubModel("lab/m", "refs/pr/1")
    for name in ("/lab/m", "./gpt2", "outputs/runs/demo", "a b", "m@"):
        assert parse_id(name) is None


def test_a_run_goes_before_the_hub(hub, run, monkeypatch):
    """run/30 could be a model's id, and so could the missing run/7."""
    monkeypatch.chdir(run.parent)
    assert list(find_targets(["run/30"], False, None)) == ["run-step-30"]
    with pytest.raises(ConfigError, match="has no checkpoint of step 7; it has 30"):
        find_targets(["run/7"], False, None)


OWN_MODEL = """
from transformers import GPT2Config, GPT2LMHeadModel

class OwnConfig(GPT2Config):
    model_type = "own"

class OwnModel(GPT2LMHeadModel):
    config_class = OwnConfig
"""


def test_code_of_strangers(gpt2, text, command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = shutil.copytree(gpt2, tmp_path / "own")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(OWN_MODEL)
    # transformers draws initial weights of own code a little differently
    rest = ("--text", text, "--sequences", 2, "--skip-untrained", "--out", tmp_path / "out")
    assert "--trust-remote-code" in refused(command, capsys, folder, *rest)
    assert not (tmp_path / "modules").exists()
    command(folder, gpt2, "--trust-remote-code", *rest)
    own, plain = (Condensation.load(tmp_path / "out" / f"{name}.npz") for name in ("own", "gpt2"))
    assert own.to_json() == plain.to_json()


def test_dtypes_and_devices(gpt2, run, text, command, tmp_path, capsys, monkeypatch):
    pytest.importorskip("accelerate")
    few = ("--text", text, "--sequences", 2, "--out")
    for name, options in {"f32": "", "bf16": "--dtype bfloat16", "auto": "--device auto --dtype auto"}.items():
        command(gpt2, run, *few, tmp_path / name, *options.split())
    for target in ("gpt2", "run-step-30"):
        f32, bf16, auto = (Condensation.load(tmp_path / out / f"{target}.npz") for out in ("f32", "bf16", "auto"))
        assert auto.to_json() == f32.to_json()
        assert 0 < np.abs(bf16.mean_cosine - f32.mean_cosine).max() < 0.02
    assert json.loads((tmp_path / "bf16" / "metrics.json").read_text())["dtype"] == "bfloat16"
    monkeypatch.setattr(command_module, "find_spec", lambda _: None)
    assert "pip install accelerate" in refused(command, capsys, gpt2, *few, tmp_path / "out", "--device", "auto")


def test_contiguous_sequences():
    def letters(text):
        return [ord(c) for c in text]

    lines = [f"line {i}\n" for i in range(300)]
    whole = "".join(lines)
    found = contiguous_sequences(lines, letters, 50, 40, seed=3)
    places = [whole.index("".join(map(chr, sequence))) for sequence in found.tolist()]
    assert all(place == 0 or whole[place - 1] == "\n" for place in places)
    assert (found.shape, len(set(places)) > 30) == ((50, 40), True)
    same, other = (contiguous_sequences(lines, letters, 50, 40, seed) for seed in (3, 4))
    assert (torch.equal(found, same), torch.equal(found, other)) == (True, False)
    assert "".join(map(chr, contiguous_sequences(lines, letters, 3, len(whole), seed=0)[2])) == whole
    with pytest.raises(ConfigError, match=f"has {len(whole):,} tokens, expected at least {len(whole) + 1:,}"):
        contiguous_sequences(lines, letters, 1, len(whole) + 1, seed=0)


def surrounded(gpt2, folder, template):
    shutil.copytree(gpt2, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("!", 5), ("#", 6)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_special_tokens_are_those_of_transformers(gpt2, tmp_path, text):
    from transformers import AutoTokenizer

    folder = surrounded(gpt2, tmp_path / "model", "! $A # #")
    (target,) = find_targets([str(folder)], False, None).values()
    special, theirs = target.special_tokens, AutoTokenizer.from_pretrained(folder)
    cut = contiguous_sequences(read_texts(text, None, 0, in_order=True), target.encode, 4, 20 - 3, seed=1)
    for sequence in surround(cut, special.before, special.after).tolist():
        longer = theirs.decode(sequence[1:-2]) + " and more of it"
        assert theirs(longer, truncation=True, max_length=20)["input_ids"] == sequence


def test_the_papers_protocol(gpt2, text, command, tmp_path):
    folder, out = surrounded(gpt2, tmp_path / "with_bos", "! $A"), tmp_path / "out"
    command(folder, "--text", text, "--out", out, "--sequences", 10, "--contiguous", "--special-tokens")
    content = json.loads((out / "metrics.json").read_text())
    assert (content["targets"][0]["sequences"], content["targets"][0]["tokens"]) == (10, 48)
    assert Condensation.load(out / "with_bos.npz").averaged_histogram.sum(1) == pytest.approx(np.ones(5))


def test_groups(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    groups = {"off=a,b,c": ("off", ["a", "b", "c"]), "on=one": ("on", ["one"]), "x=lr=3,y": ("x", ["lr=3", "y"])}
    assert {text: parse_group(text) for text in groups} == groups
    (tmp_path / "lr=3").mkdir()
    assert parse_group("plain") is parse_group("lr=3") is None
    for text in ("=a,b", "off=", "off=a,,b", "off=a,a"):
        with pytest.raises(ConfigError, match="expected NAME=A,B,C"):
            parse_group(text)


def test_families_and_pairs(gpt2, hf_tokenizer, text, command, drawn, tmp_path):
    wide = save_gpt2(tmp_path / "wide", hf_tokenizer, seed=2, width=64)
    out = tmp_path / "out"
    options = ("--family", f"gpt2={gpt2},{wide}", "--pair", f"{wide},{gpt2}", "--sequences", 2)
    command("--text", text, "--out", out, *options)
    assert [one["name"] for one in json.loads((out / "metrics.json").read_text())["targets"]] == ["gpt2", "wide"]
    sizes = [(2048 + 48 + 2) * f + 3 * (12 * f**2 + 13 * f) for f in (32, 64)]
    assert drawn["by_size.png"].axes[0].lines[1].get_xdata().tolist() == sizes
    assert [label.get_text() for label in drawn["pairs.png"].axes[0].get_yticklabels()] == ["wide\n→ gpt2"]
