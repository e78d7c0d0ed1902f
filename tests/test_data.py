import gzip
import json
import os
from pathlib import Path

import pytest
from datasets import load_dataset
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from titan_disp.data.fast_tokenizer import fast_encoder
from titan_disp.data.files import check_data, list_files
from titan_disp.data.fingerprint import differences, fingerprint
from titan_disp.data.hf_tokenizer import plain_encoder
from titan_disp.data.sample import TRAIN_FILES, documents, is_complete, train_tokenizer, write_sample
from titan_disp.data.stream import StreamOptions
from titan_disp.data.tokenizer import encoder, find_tokenizer, load_tokenizer, load_tokenizer_for
from titan_disp.errors import ConfigError, DataError

TEXT = "Return a list of lines,\n\n    keepends: bool  — naïve 中"


def records(folder, pattern):
    found = []
    for file in sorted(folder.glob(pattern)):
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            found += [json.loads(line) for line in lines]
    return found


def test_shape_of_c4(sample):
    train_names = {f"c4-train.{i:05d}-of-{TRAIN_FILES:05d}.json.gz" for i in range(TRAIN_FILES)}
    assert {p.name for p in (sample / "en").iterdir()} == {*train_names, "c4-validation.00000-of-00001.json.gz"}
    train, validation = records(sample / "en", "c4-train*"), records(sample / "en", "c4-validation*")
    assert all(set(r) == {"text", "timestamp", "url"} for r in train + validation)
    assert len(train) > 1000
    assert len(validation) > 30
    texts = [r["text"] for r in train + validation]
    assert len(texts) == len(set(texts)) == len(documents()), "a document is lost, doubled, or in both splits"


def test_deterministic(sample, tmp_path):
    write_sample(tmp_path / "again")
    files = [p.relative_to(sample) for p in sample.rglob("*") if p.is_file()]
    assert len(files) == TRAIN_FILES + 3
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (sample / file).read_bytes(), file


def test_names_no_path_of_this_machine(sample):
    assert str(sample).encode() not in (sample / "tokenizer" / "sample.model").read_bytes()


def test_read_by_datasets_as_the_hub_is(sample):
    """TorchTitan's own c4 loader asks for name="en", streaming, by split."""
    train = load_dataset(str(sample), name="en", split="train", streaming=True)
    assert train.num_shards == TRAIN_FILES
    assert next(iter(train))["text"]
    validation = load_dataset(str(sample), name="en", split="validation", streaming=True)
    assert len(list(validation)) == len(records(sample / "en", "c4-validation*"))


def test_an_existing_folder_is_kept(sample, tmp_path):
    assert is_complete(sample)
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="not a sample corpus"):
        write_sample(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "precious"
    assert not is_complete(tmp_path)


@pytest.mark.parametrize("kind", ["sentencepiece", "hugging face"])
def test_tokenizer_protocol(sample, hf_tokenizer, kind):
    tokenizer = load_tokenizer(sample / "tokenizer" if kind == "sentencepiece" else hf_tokenizer)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.get_vocab_size() == 2048
    assert all(0 <= i < 2048 for i in ids)
    # Neither has a bos token, as Qwen's and T5's have none: asking for one adds nothing.
    assert tokenizer.encode(TEXT, add_bos=True, add_eos=True) == [*ids, tokenizer.eos_id]
    assert tokenizer.encode("", add_bos=False, add_eos=True) == [tokenizer.eos_id]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("template", [False, True])
def test_encoder_agrees_with_torchtitans_tokenizer(hf_tokenizer, tmp_path, bos, template):
    """The faster call gives the same ids, whether TorchTitan or the tokenizer itself adds bos and eos."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(hf_tokenizer / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    if template:
        ids = [("<s>", tokenizer.token_to_id("<s>")), ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))]
        single = "<s> $A <|endoftext|>" if bos else "$A <|endoftext|>"
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>"} | ({"bos_token": "<s>"} if bos else {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(tmp_path)
    for text in (TEXT, "", "plain"):
        assert encoder(loaded)(text) == loaded.encode(text, add_bos=True, add_eos=True)
    assert encoder(loaded)(TEXT)[-1] == loaded.eos_id
    assert (encoder(loaded)(TEXT)[0] == loaded.bos_id) == bos
    fast = fast_encoder(loaded, str(tmp_path), encoder(loaded))
    for text in (TEXT, "", "plain"):
        assert fast(text).tolist() == encoder(loaded)(text)


def test_fast_tokenizer_of_sentencepiece(sample, tmp_path):
    texts = [r["text"] for r in records(sample, "en/c4-validation*.json.gz")]
    (tmp_path / "plain.model").write_bytes(train_tokenizer(texts, 2048, user_defined_symbols=()))
    spm = load_tokenizer(tmp_path)
    fast = fast_encoder(spm, str(tmp_path), encoder(spm))
    assert all(fast(text).tolist() == encoder(spm)(text) for text in texts)


def test_fast_tokenizer_is_not_trusted(sample, hf_tokenizer, monkeypatch):
    import gigatoken

    from titan_disp.data import fast_tokenizer

    # It puts SentencePiece's dummy prefix after user-defined symbols too, as the sample's "\n" is one.
    spm = load_tokenizer(sample / "tokenizer")
    with pytest.raises(ConfigError, match="other ids than the tokenizer's own library"):
        fast_encoder(spm, str(sample / "tokenizer"), encoder(spm))

    class Wrong(gigatoken.Tokenizer):
        """Knows one character less, or one word."""

        unknown = "\u4e2d"

        def encode(self, text):
            return super().encode(text.replace(self.unknown, ""))

    monkeypatch.setattr(gigatoken, "Tokenizer", Wrong)
    loaded = load_tokenizer(hf_tokenizer)
    with pytest.raises(ConfigError, match="other ids"):
        fast_encoder(loaded, str(hf_tokenizer), encoder(loaded))
    Wrong.unknown = "dispersion"
    monkeypatch.setattr(fast_tokenizer, "CHECK_EVERY", 3)
    fast = fast_encoder(loaded, str(hf_tokenizer), encoder(loaded))
    fast("dispersion")
    fast("condensation")
    with pytest.raises(DataError, match="set stream.fast_tokenizer = false"):
        fast("dispersion")


NAMES = ["</s>", "<unk>", "<|endoftext|>", "<|im_end|>", "<think>"]


@pytest.fixture(params=["sentencepiece", "hugging face", "of Qwen's kind"])
def with_special_tokens(request, sample, hf_tokenizer, tmp_path):
    """A tokenizer's folder, and text → ids without EOS, made otherwise: the library alone, which knows no special tokens."""
    if request.param == "sentencepiece":
        texts = [r["text"] for r in records(sample, "en/c4-validation*.json.gz")]
        model = train_tokenizer(texts, 2048, user_defined_symbols=())
        (tmp_path / "plain.model").write_bytes(model)
        return tmp_path, SentencePieceProcessor(model_proto=model).encode
    content = json.loads((hf_tokenizer / "tokenizer.json").read_text())
    config = {"eos_token": "<|endoftext|>"}
    if request.param == "of Qwen's kind":  # a word that is added but not special, as <think> is
        added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        extra = [{"content": "<think>", "special": False} | added, {"content": "<|im_end|>", "special": True} | added]
        content["added_tokens"] += [{"id": 2048 + i} | token for i, token in enumerate(extra)]
        decoder = {"0": content["added_tokens"][0]} | {str(2048 + i): token for i, token in enumerate(extra)}
        config["added_tokens_decoder"] = {i: {k: v for k, v in t.items() if k != "id"} for i, t in decoder.items()}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    words = [token for token in content["added_tokens"] if not token["special"]]
    plain = Tokenizer.from_str(json.dumps(content | {"added_tokens": words}))
    return tmp_path, lambda text: plain.encode(text).ids


def test_text_makes_no_special_tokens(with_special_tokens):
    """EOS ends documents and nothing else does, whatever a text spells: both kinds, and gigatoken."""
    folder, plain = with_special_tokens
    loaded = load_tokenizer(folder)
    encode, eos = encoder(loaded), loaded.eos_id
    fast = fast_encoder(loaded, str(folder), encode)
    for text in [*NAMES, *(f"a {name}b{name} {name}" for name in NAMES), "".join(NAMES * 3)]:
        ids = encode(text)
        assert ids == [*plain(text), eos]
        assert ids.index(eos) == len(ids) - 1
        assert fast(text).tolist() == ids
        assert plain_encoder(loaded)(text) == ids[:-1]
        assert loaded.decode(ids[:-1]) == text
    if loaded.get_vocab_size() == 2050:  # of Qwen's kind
        assert 2049 not in encode("<|im_end|>")
        assert encode("<think>") == [2048, eos]
        written = AutoTokenizer.from_pretrained(folder)
        for text in ("a <think> b", "a <|im_end|> b"):
            assert written(text, split_special_tokens=True).input_ids == encode(text)[:-1]


def test_tokens_of_text_are_in_the_fingerprint(sample, hf_tokenizer):
    """Of Hugging Face's kind, whose ids were others once."""
    files, options = list_files("c4", str(sample)), StreamOptions(seq_len=8)
    now = fingerprint(files, str(hf_tokenizer), options, 4)
    old = {key: value for key, value in now.items() if key != "special_tokens"}
    assert differences(now, now) == []
    assert differences(old, now) == [
        "data: an older version of titan-disp made special tokens of text that spells them (</s>)"
    ]
    assert "special_tokens" not in fingerprint(files, str(sample / "tokenizer"), options, 4)


def test_a_folder_with_both_uses_hugging_face(sample, hf_tokenizer, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((hf_tokenizer / "tokenizer.json").read_bytes())
    (tmp_path / "sample.model").write_bytes((sample / "tokenizer" / "sample.model").read_bytes())
    assert find_tokenizer(tmp_path).name == "tokenizer.json"


def test_bad_tokenizers(sample, tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        load_tokenizer(sample / "tokenizer" / "sample.model")
    with pytest.raises(ConfigError, match="holds no tokenizer file"):
        load_tokenizer(tmp_path)
    (tmp_path / "a.model").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot load the tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "b.model").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"holds a\.model, b\.model"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="2048 tokens, but model.flavor 'tiny' has a vocabulary of 100"):
        load_tokenizer_for("tiny", 100, sample / "tokenizer")


def test_bad_data(sample, tmp_path):
    check_data("c4", str(sample))
    check_data("c4_validation", str(sample))
    check_data("c4", None)  # the hub: only reached when training starts
    with pytest.raises(ConfigError, match="holds no train data, but no files; expected files such as en/c4-train"):
        check_data("c4", str(tmp_path))
    with pytest.raises(ConfigError, match=r"validation\.dataset_path .* holds no validation data"):
        check_data("c4_validation", str(tmp_path), key="validation")
    with pytest.raises(ConfigError, match="matches no file"):
        check_data("c4", f"{tmp_path}/*.json.gz")
    (tmp_path / "x.csv").write_text("x")
    with pytest.raises(ConfigError, match=r"x.csv'; expected a name that ends in .json.gz"):
        check_data("c4", f"{tmp_path}/x.csv")


def test_local_layouts(sample, tmp_path):
    hub = [(f.name, f.size) for f in list_files("c4", str(sample))]
    assert [name for name, _ in hub] == [f"c4-train.{i:05d}-of-{TRAIN_FILES:05d}.json.gz" for i in range(TRAIN_FILES)]
    for path in (sample / "en", f"{sample}/en/c4-train*", f"{sample}/**/c4-train.*.json.gz"):
        assert [(f.name, f.size) for f in list_files("c4", str(path))] == hub
    assert len(list_files("c4_validation", str(sample))) == 1
    assert len(list_files("c4", f"{sample}/en/c4-train.00003-of-00008.json.gz")) == 1
    # A folder whose names say no split is training data; hidden files are not looked at.
    for name in ("a.jsonl", "b.parquet", ".hidden.jsonl", "c.txt"):
        (tmp_path / name).write_text("")
    assert [f.name for f in list_files("c4", str(tmp_path))] == ["a.jsonl", "b.parquet"]
    # Words decide, not parts of them.
    words = tmp_path / "words"
    words.mkdir()
    for name in ("constraints.jsonl", "latest.jsonl", "x_test.jsonl", "validation-0.jsonl"):
        (words / name).write_text("")
    assert [f.name for f in list_files("text", str(words))] == ["constraints.jsonl", "latest.jsonl"]
    assert [f.name for f in list_files("text_validation", str(words))] == ["validation-0.jsonl"]
    # A clone of the data set: the stream from the hub reads en only.
    for folder in ("en", "en.noclean", "realnewslike"):
        (tmp_path / "clone" / folder).mkdir(parents=True)
        (tmp_path / "clone" / folder / "c4-train.00000-of-00001.json.gz").write_bytes(b"x")
    (only,) = list_files("c4", str(tmp_path / "clone"))
    assert Path(only.url).parent.name == "en"
    assert len(list_files("text", str(tmp_path / "clone"))) == 3


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "a"}\n')


def names_in(dataset, path):
    return [file.name for file in list_files(dataset, str(path))]


@pytest.fixture
def told(caplog):
    """The log of a listing, as if it were the first in this process."""
    from titan_disp.data import local

    local._warn.cache_clear()
    local._say.cache_clear()
    with caplog.at_level("INFO"):
        yield lambda level: [r.getMessage() for r in caplog.records if r.levelname == level]


def test_links_are_followed(tmp_path, told):
    """To files and folders; a folder that is reached twice, or that holds itself, counts once."""
    write(tmp_path / "elsewhere", "b.jsonl", "deep/c.jsonl")
    write(tmp_path / "data", "a.jsonl")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "linked-too").symlink_to(tmp_path / "elsewhere" / "deep")
    (tmp_path / "data" / "linked" / "round").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "d.jsonl").symlink_to(tmp_path / "elsewhere" / "b.jsonl")
    assert names_in("text", tmp_path / "data") == ["a.jsonl", "d.jsonl", "linked-too/c.jsonl", "linked/b.jsonl"]
    assert ["round is left out, as it is a link" in m or "deep is left out, as it" in m for m in told("WARNING")] == [
        True
    ] * 2


@pytest.mark.parametrize("name", ["b.jsonl", "folder"])
def test_dangling_links_are_refused(tmp_path, name):
    write(tmp_path, "a.jsonl")
    (tmp_path / name).symlink_to("/nowhere/b")
    with pytest.raises(ConfigError, match=rf"{name}' is a link to '/nowhere/b', which does not exist"):
        list_files("text", str(tmp_path))
    if name == "b.jsonl":
        for path in (f"{tmp_path}/*.jsonl", tmp_path / name):
            with pytest.raises(ConfigError, match=r"is a link to '/nowhere/b', which does not exist"):
                list_files("text", str(path))


def test_an_unreadable_folder_is_refused(tmp_path, monkeypatch):
    """As root reads everything, the refusal is the file system's here."""
    write(tmp_path, "a.jsonl", "closed/b.jsonl")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(
        ConfigError, match=r"dataset_path is .*, but '.*closed' cannot be read: Permission denied. Permit it"
    ):
        list_files("text", str(tmp_path))


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "*/*.jsonl", "clo*/b.jsonl", "*/**/b.jsonl"])
def test_a_glob_refuses_what_cannot_be_read(tmp_path, monkeypatch, pattern):
    """Python's own passes over it: one file of two would be read."""
    write(tmp_path, "a.jsonl", "open/a.jsonl", "closed/b.jsonl")
    assert f"{tmp_path}/closed/b.jsonl" in [file.url for file in list_files("text", f"{tmp_path}/{pattern}")]
    scandir = os.scandir
    there = ("closed", "closed/") if pattern != "clo*/b.jsonl" else (str(tmp_path),)

    def refuse(path):
        if str(path).endswith(there):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(
        ConfigError, match=rf"dataset_path is .*, but '.*{there[0]}/?' cannot be read: Permission denied. P"
    ):
        list_files("text", f"{tmp_path}/{pattern}")


def test_what_a_glob_leaves_out_is_said(tmp_path, told):
    """Folders that it matches; and files that it would read twice, through a link to their folder."""
    write(tmp_path, "part-0.jsonl", "part-1/a.jsonl", "part-1/b.jsonl")
    assert names_in("text", f"{tmp_path}/part-*") == ["part-0.jsonl"]
    assert f"1 folders are left out, such as {tmp_path}/part-1. " in told("WARNING")[0]
    with pytest.raises(ConfigError, match="which matches no file, but 1 folders; expected files named"):
        list_files("text", f"{tmp_path}/part-1*")
    (tmp_path / "part-1" / "round").symlink_to(tmp_path)
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "part-0.jsonl")
    assert names_in("text", f"{tmp_path}/**") == ["c.jsonl", "part-0.jsonl", "part-1/a.jsonl", "part-1/b.jsonl"]
    assert "files are left out, as links lead to their folders a second time, such as " in told("WARNING")[-1]
    assert len(told("WARNING")) == 2


def test_a_folder_that_may_be_listed_and_not_entered_is_refused(tmp_path, monkeypatch):
    """Its files look as if they did not exist, though no link leads to them."""
    write(tmp_path, "closed/b.jsonl")
    stat = os.stat

    def refuse(path, **options):
        if str(path).endswith("b.jsonl"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(ConfigError, match=r"but '.*b.jsonl' cannot be read: Permission denied. Permit it"):
        list_files("text", str(tmp_path))


def test_what_is_left_out_is_said(tmp_path, told):
    write(tmp_path, "a.jsonl", "b.jsonl.bz2", "c.jsonl.bz2", "d.csv", "README.md", "e.json", ".hidden.jsonl")
    assert names_in("text", tmp_path) == ["a.jsonl", "e.json"]
    assert names_in("text", tmp_path) == ["a.jsonl", "e.json"]  # said once
    left_out, mixed = told("WARNING")
    assert "left out, as they end in none of" in left_out
    assert ": 2 *.bz2, 1 *.csv, such as " in left_out
    assert mixed.endswith("files of several formats are read together: 1 *.json, 1 *.jsonl")
    assert [m.endswith("1 *.md, such as " + str(tmp_path / "README.md")) for m in told("INFO")] == [True]


def test_a_name_with_train_in_it_hides_no_others(tmp_path, told):
    write(tmp_path / "text", "train_schedules.jsonl", "books1.jsonl", "books2.jsonl", "validation.jsonl")
    assert names_in("text", tmp_path / "text") == ["books1.jsonl", "books2.jsonl", "train_schedules.jsonl"]
    assert "1 of 4 files are left out, as their names do not say train: validation.jsonl" in told("WARNING")[0]
    assert names_in("text", f"{tmp_path}/text/*.jsonl") == sorted(p.name for p in (tmp_path / "text").iterdir())
    write(tmp_path / "c4", "c4-train.0.json", "c4-validation.0.json", "c4.json")
    assert names_in("c4", tmp_path / "c4") == ["c4-train.0.json"]
    assert "2 of 3 files are left out, as their names do not say train or they are not in en: c4-v" in told("INFO")[-1]


def test_a_path_that_exists_is_no_glob(tmp_path):
    write(tmp_path, "runs [1]/a.jsonl", "runs 1/b.jsonl", "x[1].jsonl", "x1.jsonl")
    assert names_in("text", tmp_path / "runs [1]") == ["a.jsonl"]
    assert names_in("text", tmp_path / "x[1].jsonl") == ["x[1].jsonl"]
    assert names_in("text", tmp_path / "x[0-9].jsonl") == ["x1.jsonl"]
