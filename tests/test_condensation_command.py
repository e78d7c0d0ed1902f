"""titan-disp condensation on runs and Hugging Face models with random weights, in
folders and in the hub's cache.
"""

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from huggingface_hub import constants
from matplotlib.figure import Figure
from matplotlib.image import imread
from scipy.stats import kendalltau, spearmanr
from tokenizers import Tokenizer, processors

from tests.command_line import typed
from tests.saved_run import change_config, random_model, save_run
from tests.test_condensation import measured
from titan_disp.condensation.record import Measurement
from titan_disp.errors import ConfigError
from titan_disp.lab.export.saved import find_saved, load_model
from titan_disp.lab.inspection import command as command_module
from titan_disp.lab.inspection.targets import find_targets
from titan_disp.lab.inspection.texts import (
    contiguous_sequences,
    cut_sequences,
    read_texts,
    surround,
)

N = 48  # tokens per sequence


def save_hugging_face(model, tokenizer, folder):
    model.save_pretrained(folder)
    shutil.copy(tokenizer / "tokenizer.json", folder)
    config = {
        "eos_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def save_gpt2(folder, tokenizer, seed=0, width=32):
    """With weights so large that layers differ, and a final norm that is not of ones,
    which would leave cosines alone.
    """
    torch.manual_seed(seed)
    sizes = {"n_positions": N, "n_embd": width, "n_layer": 3, "n_head": 2}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=2048, **sizes, initializer_range=0.2)
    )
    torch.nn.init.uniform_(model.transformer.ln_f.weight, 0.1, 3)
    return save_hugging_face(model, tokenizer, folder)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory, hf_tokenizer):
    return save_gpt2(tmp_path_factory.mktemp("models") / "gpt2", hf_tokenizer)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory, hf_tokenizer):
    torch.manual_seed(1)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    }
    sizes |= {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(vocab_size=2048, **sizes)
    ).bfloat16()
    torch.nn.init.uniform_(model.model.norm.weight, 0.1, 3)
    return save_hugging_face(
        model, hf_tokenizer, tmp_path_factory.mktemp("models") / "qwen3"
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory, hf_tokenizer):
    folder = save_run(
        tmp_path_factory.mktemp("runs") / "run", random_model(), hf_tokenizer, step=10
    )
    dcp.save(
        random_model(0.1).state_dict(),
        checkpoint_id=folder / "checkpoint" / "step-20",
        no_dist=True,
    )
    return folder


@pytest.fixture
def hub(tmp_path, gpt2, hf_tokenizer, monkeypatch):
    """The cache of the hub's client has lab/tiny at two revisions."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--lab--tiny"
    (repository / "refs").mkdir(parents=True)
    shutil.copytree(gpt2, repository / "snapshots" / ("a" * 40))
    save_gpt2(repository / "snapshots" / ("b" * 40), hf_tokenizer, seed=1)
    for revision, commit in (("main", "a"), ("step1000", "a"), ("step20", "b")):
        (repository / "refs" / revision).write_text(commit * 40)
    return repository


@pytest.fixture(autouse=True)
def _no_internet(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def drawn(monkeypatch):
    figures = {}
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, path, **_: figures.update({Path(path).name: figure}),
    )
    return figures


@pytest.fixture
def command(monkeypatch, drawn):
    """Types titan-disp condensation without internet. Its pictures are not written."""
    return lambda *arguments: typed(monkeypatch, "condensation", *arguments)


def refused(command, capsys, *arguments):
    assert command(*arguments) == 2
    return capsys.readouterr().err


def hidden_states(folder, tokens, norm):
    """Return transformers' hidden states.

    The input of the final norm is inserted before the last one, its output.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    given = []
    model.get_submodule(norm).register_forward_pre_hook(
        lambda module, arguments: given.append(arguments[0])
    )
    with torch.no_grad():
        *states, last = model(tokens, output_hidden_states=True).hidden_states
    return [*states, *given, last]


@pytest.mark.parametrize(
    ("name", "norm"), [("gpt2", "transformer.ln_f"), ("qwen3", "model.norm")]
)
def test_numbers_are_the_papers(name, norm, request, command, text, tmp_path, capsys):
    folder = request.getfixturevalue(name)
    options = ("--sequences", 5, "--max-length", N, "--batch-size", 2, "--last-n", 2)
    command(folder, "--text", text, "--out", tmp_path, *options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = cut_sequences(
        read_texts(text, None, 0),
        lambda t: tokenizer.encode(t, add_special_tokens=False),
        5,
        N,
    )
    # By the paper's formulas: test_condensation
    expected = measured(*hidden_states(folder, tokens, norm))

    found = Measurement.load(tmp_path / f"{name}.npz")
    mean = expected.mean_cosine
    for key in ("mean_cosine", "std_cosine", "mean_angle"):
        # float32 forward passes with other batch sizes
        np.testing.assert_allclose(
            getattr(found, key), getattr(expected, key), atol=1e-5
        )
    # on an edge, rounding decides the bin
    np.testing.assert_allclose(found.histogram, expected.histogram, atol=5e-4)
    assert abs(mean[-1] - mean[-2]) > 1e-3  # the final norm matters
    content = json.loads((tmp_path / "metrics.json").read_text())["targets"][0]
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    told = [
        (name, str(layer), layer_name)
        for layer, layer_name in enumerate(content["layers"])
    ]
    assert [(row["target"], row["layer"], row["layer_name"]) for row in rows] == told
    assert (
        content["mean_cosine"]
        == [float(row["mean_cosine"]) for row in rows]
        == found.mean_cosine.tolist()
    )
    table = capsys.readouterr().out
    for place, last in {
        "before_norm": -2,
        "after_norm": -1,
        "blocks_before_norm": -2,
        "blocks_after_norm": -1,
    }.items():
        cosines = [*mean[:-2], mean[last]][place.startswith("blocks") :]
        by_depth = [
            correlation(range(len(cosines)), cosines)[0]
            for correlation in (spearmanr, kendalltau)
        ]
        assert (content[place]["spearman"], content[place]["kendall"]) == pytest.approx(
            by_depth
        )
        assert (
            float(rows[0][f"spearman_{place}"]),
            float(rows[-1][f"kendall_{place}"]),
        ) == pytest.approx(by_depth)
        assert "{:.3g} {:.3g}".format(*by_depth) in table
        assert f"{mean[last]:.3g}" in table
    states = [*mean[:-2], mean[-1]]
    of_last = [np.mean(states[-n:]) for n in range(1, 1 + len(states))]
    assert content["mean_cosine_of_last"] == pytest.approx(of_last, abs=1e-5)
    assert re.search(rf"last 2 .*\n.*\n.*\b{of_last[1]:.3g}\b", table)


@pytest.mark.parametrize("name", ["gpt2", "run"])
def test_the_logits(name, request, command, text, tmp_path):
    folder = request.getfixturevalue(name)
    options = ("--sequences", 4, "--max-length", N, "--batch-size", 2)
    command(folder, "--text", text, "--out", tmp_path, "--logits", *options)
    found = Measurement.load(next(tmp_path.glob("*.npz")))
    (target,) = find_targets([str(folder)], False, None).values()
    tokens = cut_sequences(read_texts(text, None, 0), target.encode, 4, N)
    if name == "run":
        logits = load_model(find_saved(folder))(tokens)
    else:
        logits = (
            transformers.AutoModelForCausalLM.from_pretrained(folder)
            .eval()(tokens)
            .logits
        )
    logits = logits.detach()
    expected = measured(logits)
    assert found.mean_cosine[-1:] == pytest.approx(expected.mean_cosine, abs=1e-5)
    assert found.std_cosine[-1:] == pytest.approx(expected.std_cosine, abs=1e-5)
    v = np.linalg.eigvalsh(np.cov(logits.double().flatten(0, 1).numpy().T))
    expected = [(v.sum() ** 2 / (v**2).sum() - 1) / (len(v) - 1), v[-1] / v.sum()]
    np.testing.assert_allclose(found.covariance[[0, 2], -1], expected, rtol=1e-4)
    assert (found.to_json()["layers"][-2:], found.tokens) == (
        ["final norm", "logits"],
        N,
    )
    assert len(found.untrained_mean_cosine) == len(found.mean_cosine)


@pytest.mark.slow
def test_pictures_of_a_run_and_a_model(run, gpt2, text, tmp_path, capsys, monkeypatch):
    few = ("--text", text, "--out", tmp_path, "--sequences", 2)
    typed(monkeypatch, "condensation", run, gpt2, "--all-steps", *few)
    names = ["run-step-10", "run-step-20", "gpt2"]
    pictures = {f"heatmap-{n}.png" for n in names} | {
        f"side_by_side_{kind}.png" for kind in ("pooled", "averaged")
    }
    pictures |= {"depth.png", "mean_cosine.png", "over_training.png", "over_steps.png"}
    tables = {*(f"{n}.npz" for n in names), "metrics.json", "metrics.csv"}
    assert {path.name for path in tmp_path.iterdir()} == pictures | tables
    for picture in pictures:
        ink = (imread(tmp_path / picture)[..., :3] < 0.9).any(-1)
        assert (ink.shape[1] >= 800, 0.01 < ink.mean() < 0.9) == (True, True), picture
    told = capsys.readouterr()
    assert all(name in told.out for name in names)
    assert (
        f"sequences have {N} tokens, not 512, because gpt2 has no more positions"
        in told.err
    )


def test_families_and_pairs(gpt2, hf_tokenizer, text, command, drawn, tmp_path):
    wide = save_gpt2(tmp_path / "wide", hf_tokenizer, seed=2, width=64)
    out = tmp_path / "out"
    options = (
        "--family",
        f"gpt2={gpt2},{wide}",
        "--pair",
        f"{wide},{gpt2}",
        "--sequences",
        2,
        "--pad",
        128,
    )
    command("--text", text, "--out", out, *options)
    assert [
        one["name"] for one in json.loads((out / "metrics.json").read_text())["targets"]
    ] == ["gpt2", "wide"]
    with open(out / "padded.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 5  # the embedding, three blocks, the final norm
    for row in rows:
        assert row["padded_to"] == "128"
        assert float(row["lower_bound"]) <= float(row["upper_bound"])
    sizes = [(2048 + 48 + 2) * f + 3 * (12 * f**2 + 13 * f) for f in (32, 64)]
    assert drawn["by_size.png"].axes[0].lines[1].get_xdata().tolist() == sizes
    assert [
        label.get_text() for label in drawn["pairs.png"].axes[0].get_yticklabels()
    ] == ["wide\n→ gpt2"]


def test_the_same_sample_from_a_seed_and_from_each_source(
    command, gpt2, sample, tmp_path
):
    split = sample / "en" / "c4-validation.00000-of-00001.json.gz"
    found = []
    data_sets = [("--dataset", sample), ("--dataset", f"{sample}/en/*valid*")]
    for source in (*data_sets, ("--text", split), ("--text", split, "--seed", 4)):
        command(gpt2, *source, "--out", tmp_path, "--sequences", 2)
        found.append(
            json.loads((tmp_path / "metrics.json").read_text())["targets"][0][
                "mean_cosine"
            ]
        )
    assert found[0] == found[1] == found[2] != found[3]


def test_names_tell_targets_apart(gpt2, run, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(gpt2, tmp_path / name / "model")
    one = tmp_path / "a" / "model"
    two = tmp_path / "b" / "model"
    assert list(find_targets([str(one), str(run)], False, None)) == [
        "model",
        "run-step-20",
    ]
    assert list(find_targets([str(one), str(two), f"{one}/"], False, None)) == [
        "a-model",
        "b-model",
    ]
    assert list(
        find_targets([str(run), f"{run}/step-20", f"{run}/10"], False, None)
    ) == ["run-step-20", "run-step-10"]


def test_a_model_of_the_hub(hub, gpt2, text, command, tmp_path):
    few = ("--text", text, "--sequences", 2)
    command("lab/tiny", "lab/tiny@step20", "--out", tmp_path / "a", *few)
    command(gpt2, "--out", tmp_path / "b", *few)
    main, step20 = (
        Measurement.load(tmp_path / "a" / f"{name}.npz")
        for name in ("tiny", "tiny@step20")
    )
    assert main.to_json() == Measurement.load(tmp_path / "b" / "gpt2.npz").to_json()
    assert main.to_json() != step20.to_json()
    found = json.loads((tmp_path / "a" / "metrics.json").read_text())["targets"]
    assert [one["revision"] for one in found] == [None, "step20"]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (("step1000", "step20"), ["20", "1,000", "step"]),
        (("old", "new"), ["old", "new", "revision"]),
    ],
)
def test_revisions_over_training(hub, text, command, drawn, tmp_path, names, shown):
    (hub / "refs" / "new").write_text("a" * 40)
    (hub / "refs" / "old").write_text("b" * 40)
    command(
        *(f"lab/tiny@{name}" for name in names),
        "--text",
        text,
        "--sequences",
        2,
        "--out",
        tmp_path,
    )
    legend = drawn["over_training.png"].legends[0]
    assert [t.get_text() for t in (*legend.texts, legend.get_title())] == shown
    picture = drawn.get("over_steps.png")
    assert (picture and picture.axes[0].lines[0].get_xdata().tolist()) == (
        [20, 1000] if "step" in shown else None
    )


def test_what_the_cache_lacks_is_told_with_the_command(
    hub, text, command, tmp_path, capsys
):
    rest = ("--text", text, "--sequences", 2, "--out", tmp_path / "out")
    for name, call in (
        (
            "Qwen/Qwen3-0.6B",
            "snapshot_download('Qwen/Qwen3-0.6B', allow_patterns=['*.json', ",
        ),
        (
            "lab/tiny@v2",
            "snapshot_download('lab/tiny', revision='v2', allow_patterns=[",
        ),
    ):
        assert f'"from huggingface_hub import snapshot_download; {call}' in refused(
            command, capsys, name, *rest
        )
    # An index of pickles that were not downloaded does not matter, but one of two files
    # of weights does.
    folder = hub / "snapshots" / ("b" * 40)
    of_step20 = "snapshot_download('lab/tiny', revision='step20', "
    pickles = {"weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(pickles))
    assert command("lab/tiny@step20", *rest) == 0
    weights = {
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        }
    }
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights))
    told = refused(command, capsys, "lab/tiny@step20", *rest)
    assert (
        "lacks 1 of its 2 files of weights, such as 'model-00002-of-00002.safetensors'"
        in told
    )
    assert (of_step20 in told, ".bin'" in told) == (True, False)
    for content in ("{", "{}", "[]"):
        (folder / "model.safetensors.index.json").write_text(content)
        told = refused(command, capsys, "lab/tiny@step20", *rest)
        assert "is no index of weights" in told
    for file in folder.glob("*model*"):
        file.unlink()
    told = refused(command, capsys, "lab/tiny@step20", *rest)
    # it may have pickles only
    assert ("no weights" in told, "'pytorch_model*.bin'])" in told) == (True, True)


def test_a_run_goes_before_the_hub(hub, run, monkeypatch):
    """run/10 could be a model's id, and so could the missing run/7."""
    monkeypatch.chdir(run.parent)
    assert list(find_targets(["run/10"], False, None)) == ["run-step-10"]
    with pytest.raises(ConfigError, match="has no checkpoint of step 7; it has 10, 20"):
        find_targets(["run/7"], False, None)


OWN_MODEL = """
from transformers import GPT2Config, GPT2LMHeadModel

class OwnConfig(GPT2Config):
    model_type = "own"

class OwnModel(GPT2LMHeadModel):
    config_class = OwnConfig
"""


def test_code_of_strangers(gpt2, text, command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    folder = shutil.copytree(gpt2, tmp_path / "own")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnModel"]}
    config["auto_map"] = {
        "AutoConfig": "own.OwnConfig",
        "AutoModelForCausalLM": "own.OwnModel",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(OWN_MODEL)
    # transformers draws initial weights of own code a little differently
    rest = (
        "--text",
        text,
        "--sequences",
        2,
        "--skip-untrained",
        "--out",
        tmp_path / "out",
    )
    assert "--trust-remote-code" in refused(command, capsys, folder, *rest)
    assert not (tmp_path / "modules").exists()
    command(folder, gpt2, "--trust-remote-code", *rest)
    own, plain = (
        Measurement.load(tmp_path / "out" / f"{name}.npz") for name in ("own", "gpt2")
    )
    assert own.to_json() == plain.to_json()


def test_dtypes_and_devices(gpt2, run, text, command, tmp_path, capsys, monkeypatch):
    pytest.importorskip("accelerate")
    few = ("--text", text, "--sequences", 2, "--out")
    for name, options in {
        "f32": "",
        "bf16": "--dtype bfloat16",
        "auto": "--device auto --dtype auto",
    }.items():
        command(gpt2, run, *few, tmp_path / name, *options.split())
    for target in ("gpt2", "run-step-20"):
        f32, bf16, auto = (
            Measurement.load(tmp_path / out / f"{target}.npz")
            for out in ("f32", "bf16", "auto")
        )
        assert auto.to_json() == f32.to_json()
        assert 0 < np.abs(bf16.mean_cosine - f32.mean_cosine).max() < 0.02
    assert (
        json.loads((tmp_path / "bf16" / "metrics.json").read_text())["dtype"]
        == "bfloat16"
    )
    monkeypatch.setattr(command_module, "find_spec", lambda _: None)
    assert "pip install accelerate" in refused(
        command, capsys, gpt2, *few, tmp_path / "out", "--device", "auto"
    )


def surrounded(gpt2, folder, template):
    shutil.copytree(gpt2, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("!", 5), ("#", 6)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_special_tokens_are_those_of_transformers(gpt2, tmp_path, text):
    folder = surrounded(gpt2, tmp_path / "model", "! $A # #")
    (target,) = find_targets([str(folder)], False, None).values()
    special = target.special_tokens
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    cut = contiguous_sequences(
        read_texts(text, None, 0, in_order=True), target.encode, 4, 20 - 3, seed=1
    )
    for sequence in surround(cut, special.before, special.after).tolist():
        longer = theirs.decode(sequence[1:-2]) + " and more of it"
        assert theirs(longer, truncation=True, max_length=20)["input_ids"] == sequence


def test_the_papers_protocol(gpt2, text, command, tmp_path):
    folder = surrounded(gpt2, tmp_path / "with_bos", "! $A")
    out = tmp_path / "out"
    command(
        folder,
        "--text",
        text,
        "--out",
        out,
        "--sequences",
        10,
        "--contiguous",
        "--special-tokens",
    )
    content = json.loads((out / "metrics.json").read_text())
    assert (content["targets"][0]["sequences"], content["targets"][0]["tokens"]) == (
        10,
        48,
    )
    assert Measurement.load(out / "with_bos.npz").averaged_histogram.sum(
        1
    ) == pytest.approx(np.ones(5))


def small_vocabulary(gpt2, folder):
    config = transformers.GPT2Config(
        vocab_size=2047, n_positions=N, n_embd=8, n_layer=1, n_head=1
    )
    return save_hugging_face(transformers.GPT2LMHeadModel(config), gpt2, folder)


def diverged(gpt2, folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(gpt2)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.bias[0] = float("nan")
    save_hugging_face(model, gpt2, folder)


def without_tokenizer(gpt2, folder):
    return shutil.copytree(gpt2, folder, ignore=shutil.ignore_patterns("token*"))


def test_unusable_models(gpt2, sample, text, tmp_path, command, capsys):
    rest = ("--text", text, "--out", tmp_path / "out", "--sequences", 1)
    for make, message in (
        (small_vocabulary, "has 2048 tokens, but .* vocabulary of 2047"),
        (diverged, "layer 2 has values that are not finite"),
        (
            without_tokenizer,
            "holds no tokenizer. Name another folder with --tokenizer DIR",
        ),
    ):
        make(gpt2, tmp_path / make.__name__)
        capsys.readouterr()
        told = refused(command, capsys, tmp_path / make.__name__, *rest)
        assert re.search(f"titan-disp: error: .*{message}", told), told
        assert not list(tmp_path.glob("out/*"))  # nothing that looks like a result
    assert (
        command(
            tmp_path / "without_tokenizer", "--tokenizer", sample / "tokenizer", *rest
        )
        == 0
    )
    with pytest.raises(
        ConfigError, match="2048 tokens, but the model .* vocabulary of 2047"
    ):
        find_targets([str(tmp_path / "small_vocabulary")], False, sample / "tokenizer")


def test_refused(gpt2, run, text, tmp_path, command, capsys):
    contents = {
        "empty": b"",
        "short": b"a",
        "latin": b"caf\xe9",
        "data/c4-train.json": b'{"text": "a b"}',
    }
    (tmp_path / "data").mkdir()
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    change_config(
        shutil.copytree(run, tmp_path / "broken"), "model", flavor="debugmodel"
    )
    for options, message in (
        ("nothing-here", "'nothing-here' is not a folder here"),
        ("", "no target is given"),
        ("GPT2 --all-steps", "--all-steps needs a run's folder"),
        ("GPT2 --dataset x", "expected one of --text FILE and --dataset PATH"),
        ("GPT2 --sequences 0", "--sequences is 0"),
        ("GPT2 --max-length 1", "--max-length is 1, expected at least 2"),
        ("GPT2 --batch-size 0", "--batch-size is 0"),
        ("GPT2 --last-n 0", "--last-n is 0, expected at least 1"),
        ("GPT2 --zeta 1", "--zeta is 1.0, expected at least 0, and less than 1"),
        ("GPT2 --device tpu", "--device 'tpu' cannot be used here"),
        ("GPT2 --out GPT2/config.json", "is not a writable folder"),
        ("GPT2 --tokenizer TMP", "holds no tokenizer file"),
        ("RUN --tokenizer TMP", "holds no tokenizer file"),
        ("GPT2 --text TMP/no", "is not a file; expected plain text or .json"),
        ("GPT2 --text TMP/empty", "holds no text"),
        ("GPT2 --text TMP/short", "the text has 1 token, expected at least 2"),
        ("GPT2 --text TMP/latin", "is not UTF-8 text"),
        ("NONE GPT2 --dataset no", "--dataset is 'no', which does not exist"),
        ("NONE GPT2 --dataset TMP/data", "holds no validation data"),
        ("GPT2 --family gpt2", "--family is 'gpt2', expected NAME=MODEL,MODEL"),
        ("GPT2 --family gpt2=a", "with at least two models"),
        ("GPT2 --pair a", "--pair is 'a', expected two models"),
        ("TMP/broken", "holds no model of flavor 'debugmodel'"),
    ):
        defaults = {"--text": text, "--out": tmp_path / "out"}
        if "NONE " in options:
            del defaults["--text"]
        words = [
            word
            for option, value in defaults.items()
            if option not in options
            for word in (option, value)
        ]
        for word, path in {
            "NONE ": "",
            "GPT2": gpt2,
            "RUN": run,
            "TMP": tmp_path,
        }.items():
            options = options.replace(word, str(path))
        assert message in refused(command, capsys, *words, *options.split())
