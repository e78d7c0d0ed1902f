"""The examples train, and what they say of Hugging Face's hidden states and of the scale is so."""

import copy
import importlib.util
import json
import re
import subprocess
import sys
from pydoc_data.topics import topics

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy

from tests.command_line import ROOT, environment
from tests.oracle import oracle
from tests.pages import commands, loaded
from titan_disp.config.batch import global_batch_size
from titan_disp.models.registry import args_of
from titan_disp.run.reader import read_metrics


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_plain_loop(monkeypatch, capsys):
    """As it is typed, without dispersion and with much of it."""
    example, found = load("plain_loop"), {}
    small = "--steps 25 --batch-size 4 --seq-len 32 --width 32 --depth 2 --every 25"
    for coeff in ("0", "1"):
        monkeypatch.setattr("sys.argv", ["plain_loop.py", *small.split(), "--coeff", coeff])
        example.main()
        rows = re.findall(r"cross-entropy (\S+)  dispersion (\S+)  mean cosine (\S+)", capsys.readouterr().out)
        found[coeff] = [tuple(map(float, row)) for row in rows]
    (start, off), (same_start, on) = found["0"], found["1"]
    assert start == same_start  # step 1: nothing has been trained
    assert max(off[0], on[0]) < start[0] - 1  # cross-entropy
    assert on[1] < off[1] - 0.02  # dispersion
    assert on[2] < off[2] - 0.02  # mean cosine


@pytest.fixture(scope="module")
def hf():
    pytest.importorskip(
        "accelerate", reason="transformers' Trainer needs accelerate: pip install 'titan-disp[examples]'"
    )
    return load("hf_trainer")


def small(hf, **changes):
    return hf.Example(**({"batch_size": 2, "seq_len": 48, "steps": 1, "every": 1} | changes))


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_hidden_states_of_hugging_face(hf, name):
    """The embedding first, the outputs of all blocks but the last, and the last one after the final norm only."""
    torch.manual_seed(0)
    model = hf.build_model(name, 16).eval()
    body = model.base_model
    blocks, norm = (body.h, body.ln_f) if name == "gpt2" else (body.layers, body.norm)
    torch.nn.init.uniform_(norm.weight)  # at 1, a norm of what is normed already would change nothing
    tokens, outputs, entered = torch.arange(32).view(2, 16), [], []
    blocks[0].register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    for block in blocks:
        block.register_forward_hook(lambda module, args, out: outputs.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        hidden = model(input_ids=tokens, output_hidden_states=True).hidden_states
        expected = [*entered, *outputs[:-1], norm(outputs[-1])]
    assert len(hidden) == len(blocks) + 1
    for got, wanted in zip(hidden, expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert not torch.allclose(hidden[-1], outputs[-1])
    if name == "qwen3":
        assert torch.equal(hidden[0], body.embed_tokens(tokens))


def by_hand(model, batches, coeff):
    """Loss and gradient norm of a step, summed over tokens: its sequences one by one, not padded; dispersion in float64."""
    total = 0.0
    for batch in batches:
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            ids = ids[mask.bool()][None]
            out = model(input_ids=ids, output_hidden_states=True)
            dispersion = torch.stack([oracle("angular", z) for z in out.hidden_states[1:]]).mean()
            ce = cross_entropy(out.logits[0, :-1], ids[0, 1:])
            total = total + (ids.shape[1] - 1) * (ce + coeff * dispersion)
    total.backward()
    return total.item(), torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_step_of_the_trainer_is_the_mean_over_its_tokens(hf, name, tmp_path, monkeypatch):
    """Padded sequences in three microbatches of two: each weighs as much as it has labels, whatever microbatch it is in."""
    trainer = hf.build_trainer(small(hf, model=name, accumulation=3, seq_len=160, coeff=2.0), str(tmp_path))
    before, batches, items = copy.deepcopy(trainer.model), [], []
    compute_loss = trainer.compute_loss

    def recorded(model, inputs, num_items_in_batch):
        batches.append(dict(inputs))
        items.append(num_items_in_batch.item())
        return compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)

    monkeypatch.setattr(trainer, "compute_loss", recorded)
    trainer.train()
    assert len(batches) == 3
    assert len({batch["attention_mask"].sum().item() for batch in batches}) > 1
    assert all((batch["attention_mask"] == 0).any() for batch in batches)
    total, norm = by_hand(before, batches, coeff=2.0)
    logged = trainer.state.log_history[0]
    assert logged["loss"] * items[0] == pytest.approx(total, rel=1e-4)  # float32 against float64
    assert logged["grad_norm"] * items[0] == pytest.approx(norm, rel=1e-4)


def test_trainer_disperses(hf, tmp_path):
    """Beside a run without dispersion; evaluation is the cross-entropy alone."""
    logged = {}
    for coeff in (0.0, 1.0):
        trainer = hf.build_trainer(small(hf, steps=15, every=14, coeff=coeff), str(tmp_path))
        trainer.train()
        logged[coeff] = [row for row in trainer.state.log_history if "dispersion" in row]
    (start, off), (same_start, on) = logged[0.0], logged[1.0]
    assert same_start["dispersion"] == start["dispersion"]
    assert same_start["loss"] == pytest.approx(start["loss"] + start["dispersion"], rel=1e-3)
    assert off["loss"] < start["loss"] - 0.5
    assert on["loss"] < same_start["loss"] - 0.5
    assert on["dispersion"] < off["dispersion"] - 0.05  # means over steps 2 to 14
    batch = hf.collate(trainer.train_dataset[:3])
    model = trainer.model.eval()
    with torch.no_grad():
        assert torch.equal(trainer.compute_loss(model, batch), model(**batch).loss)


def test_own_text(tmp_path, monkeypatch, capsys):
    """A tokenizer is trained on text in two formats. Then the config trains with the options that its comment gives for a CPU."""
    corpus, own = tmp_path / "corpus", tmp_path / "own_tokenizer"
    corpus.mkdir()
    texts = list(topics.values())
    lines = [json.dumps({"text": text}) for text in texts]
    (corpus / "train.jsonl").write_text("\n".join([*lines[:40], "no JSON", *lines[40:]]) + "\n")
    monkeypatch.chdir(ROOT)
    example = load("train_tokenizer")
    monkeypatch.setattr("sys.argv", ["train_tokenizer.py", str(corpus), str(own), "2049"])
    example.main()
    printed = capsys.readouterr()
    assert f'hf_assets_path = "{own}"\noverrides = {{ vocab_size = 2049 }}\n' in printed.out
    assert "documents that cannot be used: 1, the first: " in printed.err
    for arguments, message in (
        ([str(corpus), "x", "256"], "vocab_size is 256, expected at least 257"),
        ([str(corpus), "x", "many"], "invalid int value"),
        ([str(tmp_path / "nowhere"), str(tmp_path / "x"), "300"], "which does not exist"),
        ([str(corpus), str(corpus / "train.jsonl"), "300"], "File exists"),
        ([str(corpus), str(tmp_path / "x"), "300", "--text-field", "body"], "has no text in the field 'body'"),
    ):
        monkeypatch.setattr("sys.argv", ["train_tokenizer.py", *arguments])
        with pytest.raises(SystemExit) as exit:
            example.main()
        assert message in f"{exit.value.code} {capsys.readouterr().err}"
    assert not (tmp_path / "x" / "tokenizer.json").exists()
    tokenizer = transformers.AutoTokenizer.from_pretrained(own)
    for text in (texts[0], " naïve 🙂\n\ttabs"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == "<|endoftext|>"
    assert len(tokenizer) == 2049

    file = ROOT / "examples" / "own_text.toml"
    (words,) = (words for words in commands(file) if "nano" in words)
    words[words.index("--training.steps") + 1] = "5"
    done = subprocess.run(
        [sys.executable, "-m", "titan_disp.cli", *words[1:], "--job.dump_folder", str(tmp_path / "run")]
        + ["--training.dataset_path", str(corpus), "--model.hf_assets_path", str(own)]
        + ["--model.overrides", "vocab_size=2049", "--metrics.log_freq", "1"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    metrics = read_metrics(tmp_path / "run")
    assert list(metrics) == [1, 2, 3, 4, 5]
    assert metrics[5]["ce"] < metrics[1]["ce"]


def test_own_text_fits_one_gpu_s_batches():
    """The config itself, without its data: sizes, batches and schedule."""
    job = copy.deepcopy(loaded("examples/own_text.toml"))
    assert global_batch_size(job, 1) == 128
    assert args_of(job).vocab_size == 16384
