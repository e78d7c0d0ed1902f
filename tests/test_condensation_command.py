"""titan-disp condensation on runs and Hugging Face models with random weights."""

import csv
import json
import re
import shutil

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from huggingface_hub import constants
from matplotlib.image import imread
from scipy.stats import kendalltau, spearmanr

from tests.command_line import typed
from tests.saved_run import change_config, random_model, save_run
from tests.streams import parquet
from titan_disp.condensation.record import EDGES, Condensation
from titan_disp.data.documents import Documents
from titan_disp.errors import ConfigError
from titan_disp.lab.export.saved import find_saved, load_model
from titan_disp.lab.inspection.targets import find_blocks, find_targets, logits_root
from titan_disp.lab.inspection.texts import cut_sequences, read_texts

N = 48  # tokens per sequence


def save_hugging_face(model, tokenizer, folder):
    model.save_pretrained(folder)
    shutil.copy(tokenizer / "tokenizer.json", folder)
    config = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def save_gpt2(folder, tokenizer, seed=0, width=32):
    """With weights so large that layers differ, and a final norm that is not of ones, which would leave cosines alone."""
    torch.manual_seed(seed)
    sizes = {"n_positions": N, "n_embd": width, "n_layer": 3, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=2048, **sizes, initializer_range=0.2))
    torch.nn.init.uniform_(model.transformer.ln_f.weight, 0.1, 3)
    return save_hugging_face(model, tokenizer, folder)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory, hf_tokenizer):
    return save_gpt2(tmp_path_factory.mktemp("models") / "gpt2", hf_tokenizer)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory, hf_tokenizer):
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": True}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(vocab_size=2048, **sizes)).bfloat16()
    torch.nn.init.uniform_(model.model.norm.weight, 0.1, 3)
    return save_hugging_face(model, hf_tokenizer, tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def run(tmp_path_factory, hf_tokenizer):
    folder = save_run(tmp_path_factory.mktemp("runs") / "run", random_model(), hf_tokenizer, step=10)
    dcp.save(random_model(0.1).state_dict(), checkpoint_id=folder / "checkpoint" / "step-20", no_dist=True)
    return folder


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return lambda *arguments: typed(monkeypatch, "condensation", *arguments)


def refused(command, capsys, *arguments):
    assert command(*arguments) == 2
    return capsys.readouterr().err


def by_the_papers_formulas(hidden_states):
    u = np.stack([z.double().numpy() for z in hidden_states])
    u /= np.linalg.norm(u, axis=-1, keepdims=True)
    cosines = np.einsum("lbnf,lbmf->lbnm", u, u).clip(-1, 1)
    angles = (np.arccos(cosines) / np.pi)[..., ~np.eye(u.shape[2], dtype=bool)].mean((1, 2))
    histograms = np.stack([np.histogram(c, EDGES)[0] / c.size for c in cosines])
    return cosines.mean((1, 2, 3)), cosines.std((1, 2, 3)), angles, histograms


def hidden_states(folder, tokens, norm):
    """Return transformers' hidden states. The input of the final norm is inserted before the last one, its output."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    given = []
    model.get_submodule(norm).register_forward_pre_hook(lambda module, arguments: given.append(arguments[0]))
    with torch.no_grad():
        *states, last = model(tokens, output_hidden_states=True).hidden_states
    return [*states, *given, last]


@pytest.mark.parametrize(("name", "norm"), [("gpt2", "transformer.ln_f"), ("qwen3", "model.norm")])
def test_numbers_are_the_papers(name, norm, request, command, text, tmp_path, capsys):
    folder = request.getfixturevalue(name)
    command(folder, "--text", text, "--out", tmp_path, "--sequences", 5, "--max-length", N, "--batch-size", 2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = cut_sequences(read_texts(text, None, 0), lambda t: tokenizer.encode(t, add_special_tokens=False), 5, N)
    mean, std, angles, histograms = by_the_papers_formulas(hidden_states(folder, tokens, norm))

    found = Condensation.load(tmp_path / f"{name}.npz")
    for got, expected in ((found.mean_cosine, mean), (found.std_cosine, std), (found.mean_angle, angles)):
        np.testing.assert_allclose(got, expected, atol=1e-5)  # float32 forward passes with other batch sizes
    np.testing.assert_allclose(found.histogram, histograms, atol=5e-4)  # of cosines on edges, rounding decides the bin
    assert abs(mean[-1] - mean[-2]) > 1e-3  # the final norm matters
    content = json.loads((tmp_path / "metrics.json").read_text())["targets"][0]
    rows = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    told = [(name, str(layer), layer_name) for layer, layer_name in enumerate(content["layers"])]
    assert [(row["target"], row["layer"], row["layer_name"]) for row in rows] == told
    assert content["mean_cosine"] == [float(row["mean_cosine"]) for row in rows] == found.mean_cosine.tolist()
    table = capsys.readouterr().out
    for place, last in {"before_norm": -2, "after_norm": -1, "blocks_before_norm": -2, "blocks_after_norm": -1}.items():
        measured = [*mean[:-2], mean[last]][place.startswith("blocks") :]
        by_depth = [correlation(range(len(measured)), measured)[0] for correlation in (spearmanr, kendalltau)]
        assert (content[place]["spearman"], content[place]["kendall"]) == pytest.approx(by_depth)
        assert (float(rows[0][f"spearman_{place}"]), float(rows[-1][f"kendall_{place}"])) == pytest.approx(by_depth)
        assert "{:.3g} {:.3g}".format(*by_depth) in table
        assert f"{mean[last]:.3g}" in table


@pytest.mark.parametrize("name", ["gpt2", "run"])
def test_the_last_tokens_and_the_logits(name, request, command, text, tmp_path):
    folder, options = request.getfixturevalue(name), ("--sequences", 4, "--max-length", N, "--batch-size", 2)
    command(folder, "--text", text, "--out", tmp_path, "--logits", "--last-n", 7, *options)
    found = Condensation.load(next(tmp_path.glob("*.npz")))
    (target,) = find_targets([str(folder)], False, None).values()
    tokens = cut_sequences(read_texts(text, None, 0), target.encode, 4, N)
    if name == "run":
        logits = load_model(find_saved(folder))(tokens)
    else:
        logits = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits
    logits = logits[None, :, -7:].detach()
    expected = by_the_papers_formulas(logits)[:2]
    np.testing.assert_allclose([found.mean_cosine[-1:], found.std_cosine[-1:]], expected, atol=1e-5)
    v = np.linalg.eigvalsh(np.cov(logits.double().flatten(0, 2).numpy().T))
    expected = [(v.sum() ** 2 / (v**2).sum() - 1) / (len(v) - 1), v[-1] / v.sum()]
    np.testing.assert_allclose(found.covariance[[0, 2], -1], expected, rtol=1e-4)
    assert (found.to_json()["layers"][-2:], found.tokens) == (["final norm", "logits"], 7)
    assert len(found.untrained_mean_cosine) == len(found.mean_cosine)


def test_the_root_of_logits_with_a_bias():
    head, h = torch.nn.Linear(5, 9000), torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    logits, like = head(h).double(), torch.nn.functional.pad(h.double(), (0, 1), value=1.0) @ logits_root(head)
    torch.testing.assert_close(like @ like.T, logits @ logits.T, rtol=1e-5, atol=1e-2)
    with pytest.raises(ConfigError, match="--logits needs an output layer that is linear"):
        logits_root(None)


def test_pictures_of_a_run_and_a_model(command, run, gpt2, text, tmp_path, capsys):
    command(run, gpt2, "--all-steps", "--text", text, "--out", tmp_path, "--sequences", 2)
    names = ["run-step-10", "run-step-20", "gpt2"]
    pictures = {f"heatmap-{n}.png" for n in names} | {f"side_by_side_{kind}.png" for kind in ("pooled", "averaged")}
    pictures |= {"depth.png", "mean_cosine.png", "over_training.png", "over_steps.png"}
    tables = {*(f"{n}.npz" for n in names), "metrics.json", "metrics.csv"}
    assert {path.name for path in tmp_path.iterdir()} == pictures | tables
    for picture in pictures:
        ink = (imread(tmp_path / picture)[..., :3] < 0.9).any(-1)
        assert (ink.shape[1] >= 800, 0.01 < ink.mean() < 0.9) == (True, True), picture
    told = capsys.readouterr()
    assert all(name in told.out for name in names)
    assert f"sequences have {N} tokens, not 512, because gpt2 has no more positions" in told.err


def test_the_same_sample_from_a_seed_and_from_each_source(command, gpt2, sample, tmp_path):
    split, found = sample / "en" / "c4-validation.00000-of-00001.json.gz", []
    data_sets = [("--dataset", sample), ("--dataset", f"{sample}/en/*valid*")]
    for source in (*data_sets, ("--text", split), ("--text", split, "--seed", 4)):
        command(gpt2, *source, "--out", tmp_path, "--sequences", 2)
        found.append(json.loads((tmp_path / "metrics.json").read_text())["targets"][0]["mean_cosine"])
    assert found[0] == found[1] == found[2] != found[3]


def test_plain_text_is_read_whole_and_shuffled(text):
    pieces = read_texts(text, None, seed=0)
    assert len(pieces) > 3
    assert "".join(sorted(pieces, key=text.read_text().index)) == text.read_text()
    assert pieces == read_texts(text, None, seed=0) != read_texts(text, None, seed=1)


def test_short_texts_give_fewer_or_shorter_sequences():
    for texts, shape, expected in (
        (["abc", "de"], (9, 3), [[97, 98, 99], [10, 10, 100]]),
        (["abc"], (2, 9), [[97, 98, 99]]),
    ):
        assert cut_sequences(texts, lambda text: [ord(c) for c in text], *shape).tolist() == expected


def test_another_field_of_the_text(tmp_path):
    file, table = tmp_path / "some.jsonl", tmp_path / "some.parquet"
    file.write_text('{"meta": {"body": "one"}}\n{"meta": {"body": "two"}}\n')
    table.write_bytes(parquet(body=["one", "two"]))
    for source, field, message in (
        ((file, None), "meta.body", 'no field "text", only meta.body; set --text-field'),
        ((None, str(table)), "body", r"only body \(string\): set --text-field"),
    ):
        assert sorted(read_texts(*source, 0, text_field=field)) == ["one", "two"]
        with pytest.raises(ConfigError, match=message):
            read_texts(*source, 0)


def test_a_wrong_field_is_found_before_the_files_are_read(tmp_path, monkeypatch):
    read = []

    def counted(documents, original=Documents.read):
        read.append(documents.file.name)
        return original(documents)

    monkeypatch.setattr(Documents, "read", counted)
    for name in ("validation-0.jsonl", "validation-1.jsonl"):
        (tmp_path / name).write_text('{"url": "u", "body": "one"}\n' * 700)
    with pytest.raises(ConfigError, match='first 1,000 documents have no text.*: no field "text", only url, body; set'):
        read_texts(None, str(tmp_path), 0)
    assert len(read) <= 1001


@pytest.mark.parametrize("before", ['{"body": "a"}\n' * 999, '{"text": ""}\n' * 3000, "x\n" * 1500, ""])
def test_a_corpus_with_many_bad_documents_is_read_to_its_end(tmp_path, capsys, before):
    between = "" if before else '{"body": "a"}\n' * 3000
    (tmp_path / "some.jsonl").write_text(before + '{"text": "one"}\n' + between + '{"text": "two"}\n')
    assert sorted(read_texts(tmp_path / "some.jsonl", None, 0)) == ["one", "two"]
    assert f"skipped {(before + between).count(chr(10)):,} bad documents" in capsys.readouterr().err


def test_names_tell_targets_apart(gpt2, run, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(gpt2, tmp_path / name / "model")
    one, two = tmp_path / "a" / "model", tmp_path / "b" / "model"
    assert list(find_targets([str(one), str(run)], False, None)) == ["model", "run-step-20"]
    assert list(find_targets([str(one), str(two), f"{one}/"], False, None)) == ["a-model", "b-model"]
    assert list(find_targets([str(run), f"{run}/step-20", f"{run}/10"], False, None)) == ["run-step-20", "run-step-10"]


def small_vocabulary(gpt2, folder):
    config = transformers.GPT2Config(vocab_size=100, n_positions=N, n_embd=8, n_layer=1, n_head=1)
    return save_hugging_face(transformers.GPT2LMHeadModel(config), gpt2, folder)


def partial_weights(gpt2, folder):
    shutil.copytree(gpt2, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_layer": 4}))


def diverged(gpt2, folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(gpt2)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.bias[0] = float("nan")
    save_hugging_face(model, gpt2, folder)


def without(pattern):
    return lambda gpt2, folder: shutil.copytree(gpt2, folder, ignore=shutil.ignore_patterns(pattern))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (small_vocabulary, "has 2048 tokens, but .* vocabulary of 100"),
        (partial_weights, "holds an incomplete causal language model: it lacks 12 weights"),
        (diverged, "layer 2 has values that are not finite"),
        (without("*.safetensors"), "has a config.json but no weights"),
        (without("token*"), "holds no tokenizer. Name another folder with --tokenizer DIR"),
    ],
)
def test_unusable_models(make, message, gpt2, text, tmp_path, command, capsys):
    make(gpt2, tmp_path / "model")
    capsys.readouterr()
    told = refused(command, capsys, tmp_path / "model", "--text", text, "--out", tmp_path / "out", "--sequences", 1)
    assert re.search(f"titan-disp: error: .*{message}", told), told
    assert not list(tmp_path.glob("out/*"))  # nothing that looks like a result


def test_blocks_are_found_by_what_they_are():
    """The largest list with as many modules as layers. Other lists of the same length may be norms."""
    body = torch.nn.Module()
    body.norms = torch.nn.ModuleList(torch.nn.LayerNorm(4) for _ in range(3))
    body.inner = torch.nn.Module()
    body.inner.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    body.heads = torch.nn.ModuleList(torch.nn.Linear(4, 400) for _ in range(2))
    assert find_blocks(body, 3) == list(body.inner.blocks)
    with pytest.raises(ConfigError, match="^Module has no list of its 4 layers"):
        find_blocks(body, 4)


def test_another_tokenizer(gpt2, sample, text, command, tmp_path):
    folder = without("token*")(gpt2, tmp_path / "model")
    command(folder, "--tokenizer", sample / "tokenizer", "--text", text, "--out", tmp_path / "out", "--sequences", 1)
    small = small_vocabulary(gpt2, tmp_path / "small")
    with pytest.raises(ConfigError, match="2048 tokens, but the model .* vocabulary of 100"):
        find_targets([str(small)], False, sample / "tokenizer")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("nothing-here", "'nothing-here' is not a folder here"),
        ("TMP/nothing", "nothing' does not exist"),
        ("TMP", "is not a run's folder"),
        ("RUN/7", "has no checkpoint of step 7; it has 10, 20"),
        ("", "no target is given"),
        ("GPT2 --all-steps", "--all-steps needs a run's folder"),
        ("GPT2 --dataset x", "expected one of --text FILE and --dataset PATH"),
        ("GPT2 --sequences 0", "--sequences is 0"),
        ("GPT2 --max-length 1", "--max-length is 1, expected at least 2"),
        ("GPT2 --batch-size 0", "--batch-size is 0"),
        ("GPT2 --last-n 1", "--last-n is 1, expected at least 2"),
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
        ("NONE GPT2 --dataset TMP", "holds no validation data"),
        ("GPT2 --family gpt2", "--family is 'gpt2', expected NAME=MODEL,MODEL"),
        ("GPT2 --family gpt2=a", "with at least two models"),
        ("GPT2 --pair a", "--pair is 'a', expected two models"),
        ("BROKEN", "holds no model of flavor 'debugmodel'"),
    ],
)
def test_refused(options, message, gpt2, run, text, tmp_path, command, capsys):
    contents = {"empty": b"", "short": b"a", "latin": b"caf\xe9", "c4-train.json": b'{"text": "a b"}'}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    if options == "BROKEN":
        change_config(shutil.copytree(run, tmp_path / "run"), "model", flavor="debugmodel")
    for word, path in {"GPT2": gpt2, "RUN": run, "TMP": tmp_path, "BROKEN": tmp_path / "run"}.items():
        options = options.replace(word, str(path))
    source = () if "NONE " in options else ("--text", text)
    options = options.removeprefix("NONE ").split()
    assert message in refused(command, capsys, *source, "--out", tmp_path / "out", *options)
