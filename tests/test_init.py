"""``titan-disp init``: a folder, JSON lines and a long .txt become runs that the checks
of a start accept.
"""

import json
import re
from contextlib import nullcontext
from pydoc_data.topics import topics
from types import SimpleNamespace

import pyarrow.parquet
import pytest
import torch

from tests.command_line import typed
from titan_disp.config.command_options import InitOptions, Machine
from titan_disp.config.load import load_config
from titan_disp.data import ledger
from titan_disp.data.listing import list_files, listing_of
from titan_disp.data.options import Format, StreamOptions
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.errors import ConfigError
from titan_disp.lab.init import (
    _check_left_out,
    _Hardware,
    _read,
    _sized,
    _Tokens,
    init,
)
from titan_disp.models.registry import MODELS

PROSE = "\n".join(topics[name] for name in sorted(topics))
TEXTS = [PROSE[i : i + 3000].strip() for i in range(0, 450_000, 3000)]


def folder_of_texts(where):
    (where / "texts").mkdir()
    for i, text in enumerate(TEXTS):
        (where / "texts" / f"{i}.txt").write_text(text)
    return where / "texts"


def json_lines(where):
    (where / "own.jsonl").write_text(
        "".join(json.dumps({"body": text}) + "\n" for text in [*TEXTS, *TEXTS[:20]])
    )
    return where / "own.jsonl"


def long_text(where):
    (where / "own.txt").write_text(
        "\n\n".join(" \n".join(text.split("\n\n")) for text in TEXTS)
    )
    return where / "own.txt"


@pytest.mark.parametrize("write", [folder_of_texts, json_lines, long_text])
def test_a_run_of_own_text(write, tmp_path, monkeypatch, capsys):
    if write is not folder_of_texts:  # which measures the speed
        monkeypatch.setattr("titan_disp.lab.init._cpu_flops", lambda *_: 2e10)
    text = write(tmp_path)
    run = tmp_path / "my run [*]"
    model = "llama_disp" if write is json_lines else "qwen3_disp"
    words = ["--text", text, "--text-field", "body", "--model", model]
    assert typed(monkeypatch, "init", run, *words) == 0
    _, held, *_, train, _, off = capsys.readouterr().out.splitlines()
    assert (held == "held out   7 files, by a hash of their names") == (
        write is folder_of_texts
    )
    ranks = _Hardware(0, Machine(1, 1)).ranks
    assert train == f"titan-disp train '{run}'/config.toml --nproc {ranks}"
    assert off == f"{train} --dispersion.no-enabled --job.dump_folder '{run}'/off"
    config = load_config(["--job.config_file", str(run / "config.toml")])
    assert config.model.name == model
    options = StreamOptions(format=Format(text_split=config.stream.text_split))
    paths = {
        "text": config.training.dataset_path,
        "text_validation": config.validation.dataset_path,
    }
    kept, held_out = (
        [*_read(list_files(*one, "validation"), options, 1e9, []).values()]
        for one in paths.items()
    )
    assert len(kept) + len(held_out) == len({*kept, *held_out}) >= len(TEXTS)
    assert 0.01 < sum(map(len, held_out)) / len(PROSE) <= 0.05
    assert config.condensation.interval == max(5, config.training.steps // 20)
    tokenizer = load_tokenizer(config.model.hf_assets_path)
    assert all(
        tokenizer.decode(tokenizer.encode(text)) == text
        for text in [*kept, *held_out, "\t–  ᚠ\n"]
    )
    assert typed(monkeypatch, "init", run, "--text", text) == 2
    assert "is not an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 9999"])
def test_a_gpu(name, tmp_path, monkeypatch, capsys):
    # Else it tries a thousand
    monkeypatch.setattr("titan_disp.cluster.plan.MAX_NODES", 1)
    device = SimpleNamespace(name=name, total_memory=24e9, multi_processor_count=128)
    for function, value in (
        ("is_available", True),
        ("device_count", 1),
        ("get_device_name", name),
    ):
        monkeypatch.setattr(torch.cuda, function, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    init(InitOptions(tmp_path / "run", str(json_lines(tmp_path)), "body"))
    words = ["--nodes", "1", "--gpus-per-node", "1", "--gpu", "RTX4090", "--strict"]
    assert typed(monkeypatch, "plan", tmp_path / "run/config.toml", *words) == 0
    assert "a GPU would need" not in capsys.readouterr().out


def sized(text_tokens, vocab_size, seq_len, hardware, minutes=None, model="qwen3_disp"):
    tokens = _Tokens(vocab_size, 4.0, text_tokens, 1000)
    return _sized(MODELS[model], tokens, seq_len, hardware, minutes)


def test_sizes_follow_text_and_time(monkeypatch):
    h100s = _Hardware(8, Machine(1, 8, "H100"))
    cpu = _Hardware(0, Machine(1, 1, "H100"))
    size = sized(1e12, 16384, 2048, h100s)
    assert (size.model.overrides["dim"], size.lr) == (768, 6e-4)
    assert sized(1e12, 16384, 2048, h100s, minutes=2400).model.flavor == "0.6B"
    llama = sized(1e12, 16384, 2048, h100s, minutes=2400, model="llama_disp")
    assert llama.model.flavor == "SmolLM2-360M"
    little = sized(1e6, 2048, 256, h100s)
    assert (little.model.overrides, little.lr) == ({"vocab_size": 2048}, 1.6e-2)
    assert little.steps * little.global_batch_size * 256 == little.tokens
    assert little.tokens == pytest.approx(4e6, rel=0.01)
    for text in (1e6, 1e12):  # a rank's share of six can be halved
        six = sized(text, 16384, 1024, _Hardware(6, Machine(1, 6, "H100")))
        assert six.local_batch_size in (4, 64)
        assert 16 <= six.global_batch_size == 6 * six.local_batch_size <= 512
    steps = []
    monkeypatch.setattr("titan_disp.lab.init.cores", lambda: 2)
    for speed, minutes in ((2e10, 5), (2e10, 10), (1e10, 20)):
        monkeypatch.setattr(
            "titan_disp.lab.init._cpu_flops", lambda *_, speed=speed: speed
        )
        steps.append(sized(1e9, 2048, 256, cpu, minutes).steps)
    assert steps == pytest.approx([steps[0], 2 * steps[0], 2 * steps[0]], rel=0.01)


def test_bad_input(tmp_path):
    text = json_lines(tmp_path)
    for name, content in (
        ("ids.bin", b"\0" * 9),
        ("short.txt", b"word " * 99),
        ("long.txt", b"a line\n" * 50_000),
    ):
        (tmp_path / name).write_bytes(content)
    pyarrow.parquet.write_table(
        pyarrow.table({"text": TEXTS}), tmp_path / "table.parquet"
    )
    for path, options, message in (
        (tmp_path / "none", {}, "which does not exist; expected a folder"),
        (tmp_path / "ids.bin", {}, "which holds token ids; expected text"),
        (tmp_path / "short.txt", {}, "495 characters; expected at least 200,000"),
        (tmp_path / "long.txt", {}, "In a .txt file, blank lines divide them"),
        (text, {"text_field": "no"}, 'no field "no", only body; set --text-field to'),
        (
            tmp_path / "table.parquet",
            {},
            'has no column "body", only text .*: set --text-field to',
        ),
        (tmp_path, {}, "is in the folder of --text"),
        (text, {"minutes": 0.0}, "--minutes is 0.0, expected a number > 0"),
        (text, {"tokenizer": tmp_path}, "holds no tokenizer file"),
    ):
        with pytest.raises(ConfigError, match=message):
            init(
                InitOptions(
                    tmp_path / "run", str(path), **{"text_field": "body"} | options
                )
            )
        assert not (tmp_path / "run").exists()


FRENCH = "À l’été, les élèves préfèrent la forêt où chante le hêtre. "


def odd_folder(where):
    """A stranger's folder of text: encodings, line ends, one long line, and what is
    no text.
    """
    folder = where / "mes textes é"
    folder.mkdir()
    paragraphs = [f"{FRENCH * 20}Paragraphe {i}." for i in range(400)]
    for name, encoding, part in (
        ("übung un.txt", "utf-8", paragraphs[:100]),
        ("deux.txt", "latin-1", [p.replace("’", "'") for p in paragraphs[100:200]]),
        ("trois.TXT", "utf-16", paragraphs[200:300]),
        ("quatre.txt", "cp1252", paragraphs[300:]),
    ):
        end = "\r\n\r\n" if name == "quatre.txt" else "\n\n"
        (folder / name).write_bytes(end.join(part).encode(encoding))
    (folder / "long.txt").write_text("word " * 1000 + "\n\n" + "x" * 5_000)
    (folder / "empty.txt").write_text("")
    (folder / "scan.txt").write_bytes(b"%PDF-1.7\n\xe2\xe3\xcf\xd3\n" + bytes(20_000))
    (folder / "photo.jpeg").write_bytes(b"\xff\xd8" + bytes(999))
    (folder / "cinq.txt").write_bytes("Un autre texte, déjà lu.".encode("utf-16-le"))
    return folder


def test_a_folder_of_odd_text(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("titan_disp.lab.init._cpu_flops", lambda *_: 2e10)
    folder = odd_folder(tmp_path)
    run = tmp_path / "run"
    assert typed(monkeypatch, "init", run, "--text", folder) == 2
    error = capsys.readouterr().err
    assert "scan.txt: it is PDF, which its name does not say" in error
    assert "To go on without, --allow-loss" in error
    assert typed(monkeypatch, "init", run, "--text", folder, "--allow-loss") == 0
    out = capsys.readouterr().out
    assert re.search(r"of 2 files, such as (deux|quatre).txt: from cp1252", out)
    assert "of 1 file, such as trois.txt: from utf-16" in out
    assert "of 1 file, such as cinq.txt: from utf-16-le" in out
    assert "skipped    0 bytes of 1 file, such as empty.txt: the file is empty" in out
    assert "of 1 file, such as scan.txt: it is PDF" in out
    entries = ledger.read(str(run / "data/train"))
    monkeypatch.chdir(run / "data/train")
    assert ledger.read(None) == []  # data on the hub has no folder
    stored = sum(path.stat().st_size for path in folder.iterdir())
    assert sum(entry.size for entry in entries) == stored
    assert {entry.file for entry in entries if entry.fate == "left out"} == {
        "photo.jpeg"
    }
    config = load_config(["--job.config_file", str(run / "config.toml")])
    options = StreamOptions(format=Format())
    texts = _read(
        list_files("text", config.training.dataset_path), options, 1e9, []
    ).values()
    text = "".join(texts)
    assert all(f"Paragraphe {i}." in text for i in range(120, 130))
    assert not {"\ufffd", "Ã"} & {*text}


@pytest.mark.parametrize(
    ("others", "lost"),
    [
        ({"a.md": b"# A title\n" * 80}, "8%"),  # this is not enough
        ({"a.md": b"# A title\n" * 2000}, "67%"),
        ({"a.pdf": bytes(20_000), "b.docx": bytes(20_000)}, "80%"),
        ({"a.json.xz": bytes(20_000)}, "67%"),
        ({"a.html": b"caf\xe9 " * 1000, "b.rst": "\u00e9".encode() * 9000}, "70%"),
        # The text is only beside a table of documents
        ({"b.jsonl": b'{"text": "words"}\n'}, "100%"),
        # no text, and text of other splits
        ({"a.jpeg": b"\xff\xd8" + bytes(99_999), "b.npz": bytes(9)}, ""),
        ({"validation.txt": b"words " * 9000}, ""),
        ({"test.txt": b"words " * 9000, "dev.txt": b"words " * 9}, ""),
    ],
)
def test_a_folder_of_text_that_is_not_read(tmp_path, others, lost):
    (tmp_path / "own.txt").write_text("words and words " * 625)  # 10 kB
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
    for path in (str(tmp_path), f"{tmp_path}/*"):
        listing = listing_of("text", path, path_key="--text")
        expected = nullcontext()
        # A glob reads texts beside other documents
        if lost and float(lost[:-1]) > 50 and not (path[-1] == "*" and lost == "100%"):
            expected = pytest.raises(ConfigError, match=f": {lost} of the bytes that")
        with expected:
            _check_left_out(path, listing)


def test_allow_loss(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("titan_disp.lab.init._cpu_flops", lambda *_: 2e10)
    folder = folder_of_texts(tmp_path)
    (folder / "book.md").write_text(PROSE * 2)
    run = tmp_path / "run"
    assert typed(monkeypatch, "init", run, "--text", folder) == 2
    error = capsys.readouterr().err
    assert "such as book.md: files with such suffixes are not read. Convert" in error
    assert not run.exists()
    assert typed(monkeypatch, "init", run, "--text", folder, "--allow-loss") == 0
    assert "of 1 file, such as book.md: files with such" in capsys.readouterr().out


def test_documents_that_are_lost_stop_init(tmp_path, monkeypatch, capsys):
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[20] = lines[20][:-20]
    lines[30] = lines[30][:-20]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    run = tmp_path / "run"
    assert typed(monkeypatch, "init", run, "--text", tmp_path / "own.jsonl") == 2
    error = capsys.readouterr().err
    assert re.search(r"1\.\d% of its bytes cannot be used", error)
    assert "malformed JSON" in error
