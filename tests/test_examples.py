"""The examples train, and Hugging Face's Trainer minimises what it should."""

import copy
import importlib.util
import json
import re
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.command_line import ROOT, train
from tests.oracle import oracle
from tests.pages import commands
from titan_disp.run.reader import read_metrics


def load(name):
    spec = importlib.util.spec_from_file_location(
        name, ROOT / "examples" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def typed(monkeypatch, example, *words):
    monkeypatch.setattr("sys.argv", [f"{example.__name__}.py", *map(str, words)])
    example.main()


STEPS = 25
LOOPS = {
    "plain_loop": f"--steps {STEPS} --batch-size 4 --seq-len 32 --width 32 --depth 2 --every 1",
    "accelerate_loop": f"--steps {STEPS} --batch-size 2 --seq-len 48 --every 1",
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name, monkeypatch, capsys):
    """Cross-entropy falls, and training with the loss lowers dispersion.

    A single step says little: dispersion varies from step to step by more than the
    margin, and rounding changes by how much. So the second half's mean is compared.
    """
    pytest.importorskip("accelerate") if name == "accelerate_loop" else None
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = load(name)
    found = {}
    for coeff in ("0", "1"):
        typed(monkeypatch, example, *LOOPS[name].split(), "--coeff", coeff)
        numbers = re.findall(
            r"(?:cross-entropy|dispersion|mean cosine) (\S+)", capsys.readouterr().out
        )
        found[coeff] = np.array(numbers, dtype=float).reshape(STEPS, -1)
    assert (found["0"][0] == found["1"][0]).all()  # nothing has been trained
    assert max(rows[-1, 0] - rows[0, 0] for rows in found.values()) < -1
    # dispersion and mean cosine
    off, on = (rows[STEPS // 2 :, 1:].mean(0) for rows in found.values())
    assert (on < off - 0.02).all()


@pytest.fixture(scope="module")
def hf():
    pytest.importorskip(
        "accelerate",
        reason="Trainer needs accelerate: pip install accelerate",
    )
    return load("hf_trainer")


def by_hand(model, batches, coeff):
    """Loss and gradient norm of a step, summed over tokens, and each dispersion: its
    sequences one by one, not padded.
    """
    outputs = []
    total = 0.0
    dispersions = []
    for block in getattr(model.base_model, "h", None) or model.base_model.layers:
        block.register_forward_hook(lambda module, args, output: outputs.append(output))
    for batch in batches:
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
            ids = ids[mask.bool()][None]
            outputs.clear()
            ce = cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:])
            dispersions.append(
                torch.stack([oracle("angular", z) for z in outputs]).mean()
            )
            total = total + (ids.shape[1] - 1) * (ce + coeff * dispersions[-1])
    total.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    return total.item(), norm, [one.item() for one in dispersions]


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_step_of_the_trainer_is_the_mean_over_its_tokens(
    hf, name, tmp_path, monkeypatch
):
    small = hf.Example(
        model=name,
        batch_size=2,
        accumulation=3,
        seq_len=160,
        coeff=2.0,
        steps=1,
        every=1,
    )
    trainer = hf.build_trainer(small, str(tmp_path))
    before = copy.deepcopy(trainer.model)
    batches = []
    items = []
    compute_loss = trainer.compute_loss

    def recorded(model, inputs, num_items_in_batch):
        batches.append(dict(inputs))
        items.append(num_items_in_batch.item())
        return compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)

    monkeypatch.setattr(trainer, "compute_loss", recorded)
    trainer.train()
    padded = [(batch["attention_mask"] == 0).sum().item() for batch in batches]
    assert (len(padded), len(set(padded)) > 1, min(padded) > 0) == (3, True, True)
    total, norm, dispersions = by_hand(before, batches, coeff=2.0)
    logged = trainer.state.log_history[0]
    # float32 against float64
    assert logged["loss"] * items[0] == pytest.approx(total, rel=1e-4)
    assert logged["grad_norm"] * items[0] == pytest.approx(norm, rel=1e-4)
    # of the last microbatch
    assert logged["dispersion"] == pytest.approx(np.mean(dispersions[-2:]), rel=1e-4)
    batch = hf.collate(trainer.train_dataset[:3])
    model = trainer.model.eval()
    assert not torch.equal(
        model.get_input_embeddings().weight, before.get_input_embeddings().weight
    )
    with torch.no_grad():
        assert torch.equal(compute_loss(model, batch), model(**batch).loss)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": text}) for text in topics.values()]
    (folder / "train.jsonl").write_text(
        "\n".join([*lines[:40], "no JSON", *lines[40:]]) + "\n"
    )
    return folder


@pytest.mark.slow
def test_own_text(corpus, tmp_path, monkeypatch, capsys):
    import transformers

    own = tmp_path / "own_tokenizer"
    typed(monkeypatch, load("train_tokenizer"), corpus, own, 2049)
    printed = capsys.readouterr()
    assert (
        f'hf_assets_path = "{own}"\noverrides = {{ vocab_size = 2049 }}\n'
        in printed.out
    )
    assert "documents that cannot be used: 1, the first: " in printed.err
    tokenizer = transformers.AutoTokenizer.from_pretrained(own)
    for text in (*list(topics.values())[:1], " naïve 🙂\n\ttabs"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.eos_token, len(tokenizer)) == ("<|endoftext|>", 2049)

    file = ROOT / "examples" / "own_text.toml"
    (words,) = (words for words in commands(file) if "nano" in words)
    changes = {"--training.steps": "5", "--job.dump_folder": str(tmp_path / "run")}
    given = [
        changes.get(before, word)
        for before, word in zip(words[2:], words[3:], strict=False)
    ]
    given += [
        "--model.hf_assets_path",
        str(own),
        "--model.overrides",
        "vocab_size=2049",
        "--metrics.log_freq",
        "1",
    ]
    train(file, corpus, tmp_path / "run", *given)
    metrics = read_metrics(tmp_path / "run")
    assert metrics[5]["ce"] < metrics[1]["ce"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("CORPUS x 256", "vocab_size is 256, expected at least 257"),
        ("nowhere x 300", "which does not exist"),
        ("CORPUS CORPUS/train.jsonl 300", "File exists"),
        ("CORPUS x 300 --text-field body", "has no text in the field 'body'"),
    ],
)
def test_a_tokenizer_that_cannot_be_trained(
    corpus, tmp_path, monkeypatch, capsys, words, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        typed(
            monkeypatch,
            load("train_tokenizer"),
            *words.replace("CORPUS", str(corpus)).split(),
        )
    assert message in f"{exit.value.code} {capsys.readouterr().err}"


def test_a_column_as_text(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "plain_text").mkdir()
    files = {
        "train-00001-of-2": ["c\n"],
        "train-00000-of-2": ["a", "", None, "b é"],
        "validation-0": ["no"],
    }
    for name, texts in files.items():
        table = pyarrow.table({"context": texts, "id": texts})
        pyarrow.parquet.write_table(table, tmp_path / "plain_text" / f"{name}.parquet")
    load("text_column").main(tmp_path, "context", tmp_path / "text.txt")
    assert (tmp_path / "text.txt").read_bytes().decode() == "a\nb é\nc\n"
