"""The parts of titan-disp condensation: layers one at a time, names of the hub and of
groups, and the paper's sampling.
"""

import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers

from tests.saved_run import change_config, random_model, save_run
from tests.streams import parquet
from titan_disp.data.documents import Documents
from titan_disp.data.listing import list_files
from titan_disp.errors import ConfigError
from titan_disp.lab.export.saved import find_saved, load_model
from titan_disp.lab.inspection import targets
from titan_disp.lab.inspection.command import step_of
from titan_disp.lab.inspection.texts import (
    contiguous_sequences,
    cut_sequences,
    read_texts,
)
from titan_disp.models.decoder import draw

BLOCKS = 6
SIZES = {
    "vocab_size": 120,
    "hidden_size": 16,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
}
CONFIGS = {
    "GPT2": {"max_position_embeddings": 64},
    "Qwen3": {"intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 8},
    "Llama": {"intermediate_size": 32},
    "Bloom": {},
    "GPTNeoX": {"intermediate_size": 32, "max_position_embeddings": 64},
    "OPT": {"ffn_dim": 32, "max_position_embeddings": 64, "word_embed_proj_dim": 16},
    # There are as many experts as layers, in other lists.
    "Mixtral": {
        "intermediate_size": 32,
        "num_local_experts": BLOCKS,
        "num_key_value_heads": 1,
    },
}


def tokens(count=2, length=12):
    return torch.arange(count * length).view(count, length) * 7 % 120


def largest_number_alive(layers):
    alive = []
    most = 0

    def take_in(_, z):
        nonlocal most
        alive[:] = [reference for reference in alive if reference() is not None] + [
            weakref.ref(z)
        ]
        most = max(most, len(alive))

    layers(tokens(), take_in)
    return most


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_are_transformers_hidden_states(name):
    """One at a time: at most a layer, the embedding and a block's output are alive."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **CONFIGS[name])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    layers = targets.hugging_face_layers(model)
    got = {}
    layers(tokens(), lambda layer, z: got.update({layer: z.clone()}))
    assert list(got) == list(range(layers.layer_count)) == list(range(BLOCKS + 2))
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    )
    *expected, last = model.base_model(
        tokens(), output_hidden_states=True
    ).hidden_states
    for layer, z in (*enumerate(expected), (BLOCKS + 1, last)):
        torch.testing.assert_close(got[layer], z, rtol=0, atol=0)
    # before the final norm, and after it
    assert not torch.equal(got[BLOCKS], got[BLOCKS + 1])
    if name == "Qwen3":
        torch.testing.assert_close(model.model.norm(got[BLOCKS]), got[BLOCKS + 1])
    assert layers.parameters == sum(p.numel() for p in set(model.parameters()))
    assert largest_number_alive(layers) <= 3
    layers.untrain(seed=0)  # the weights had a standard deviation of 0.3
    # OPT's name for it
    expected = getattr(model.config, "initializer_range", None) or model.config.init_std
    assert model.get_input_embeddings().weight.std() == pytest.approx(expected, rel=0.1)


@torch.no_grad()
def test_a_model_of_another_layout():
    """XLNet's layers are [N, B, F].

    They would be measured as other sequences, without a word.
    """
    config = transformers.XLNetConfig(
        vocab_size=20, d_model=8, n_layer=2, n_head=2, d_inner=8
    )
    model = transformers.XLNetLMHeadModel(config).eval()
    with pytest.raises(
        ConfigError, match=r"layer 0 has the shape \[5, 3, 8\] for \[3, 5\] tokens"
    ):
        targets.hugging_face_layers(model)(
            torch.arange(15).view(3, 5), lambda layer, h: None
        )


def test_blocks_are_found_by_what_they_are():
    """The largest list with as many modules as layers.

    Other lists of the same length may be norms.
    """
    body = torch.nn.Module()
    body.norms = torch.nn.ModuleList(torch.nn.LayerNorm(4) for _ in range(3))
    body.inner = torch.nn.Module()
    body.inner.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    body.heads = torch.nn.ModuleList(torch.nn.Linear(4, 400) for _ in range(2))
    assert targets.find_blocks(body, 3) == list(body.inner.blocks)
    with pytest.raises(ConfigError, match="^Module has no list of its 4 layers"):
        targets.find_blocks(body, 4)


@torch.no_grad()
def test_layers_of_a_run(tmp_path, hf_tokenizer):
    run = save_run(tmp_path / "run", random_model(), hf_tokenizer)
    (target,) = targets.find_targets([str(run)], False, None).values()
    layers = target.load(torch.device("cpu"), "float32")
    got = {}
    layers(tokens(length=16), lambda layer, z: got.update({layer: z}))
    model = load_model(find_saved(run))
    expected = model(tokens(length=16), return_activations=range(8)).activations
    assert list(got) == list(range(8))
    torch.testing.assert_close([*got.values()], [*expected], rtol=0, atol=0)
    assert largest_number_alive(layers) <= 3
    layers.untrain(0)
    # the run's own seed
    expected = draw(
        "tok_embeddings.weight", layers.head.weight.shape, model.model_args, seed=42
    )
    assert torch.equal(layers.head.weight, expected)
    change_config(run, "debug", seed=0)  # a seed, too
    (target,) = targets.find_targets([str(run)], False, None).values()
    (layers := target.load(torch.device("cpu"), "float32")).untrain(5)
    expected = draw(
        "tok_embeddings.weight", layers.head.weight.shape, model.model_args, seed=0
    )
    assert torch.equal(layers.head.weight, expected)
    dcp.save(
        model.state_dict(), checkpoint_id=run / "checkpoint" / "step-0", no_dist=True
    )
    layers.untrain(0)
    assert torch.equal(layers.head.weight, model.output.weight)
    every = targets.find_targets([str(run)], True, None)
    assert ([*every], targets.name_of(str(run), every)) == (
        ["run-step-0", "run-step-30"],
        "run-step-30",
    )


def test_the_root_of_logits_with_a_bias():
    head = torch.nn.Linear(5, 9000)
    h = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    logits = head(h).double()
    like = torch.nn.functional.pad(h.double(), (0, 1), value=1.0) @ targets.logits_root(
        head
    )
    torch.testing.assert_close(like @ like.T, logits @ logits.T, rtol=1e-5, atol=1e-2)
    with pytest.raises(
        ConfigError, match="--logits needs an output layer that is linear"
    ):
        targets.logits_root(None)


def test_steps_of_revisions():
    steps = {
        "step1000": 1000,
        "stage1-step140000-tokens294B": 140000,
        "step_7": 7,
        "main": None,
        None: None,
    }
    assert {
        name: step_of(SimpleNamespace(revision=name, step=None)) for name in steps
    } == steps


def test_ids_of_the_hub():
    for name in ("gpt2", "Qwen/Qwen3-0.6B"):
        assert targets.parse_id(name) == targets.HubModel(name, None)
    assert targets.parse_id("lab/m@refs/pr/1") == targets.HubModel("lab/m", "refs/pr/1")
    for name in ("/lab/m", "./gpt2", "outputs/runs/demo", "a b", "m@"):
        assert targets.parse_id(name) is None


def test_groups(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    groups = {
        "off=a,b,c": ("off", ["a", "b", "c"]),
        "on=one": ("on", ["one"]),
        "x=lr=3,y": ("x", ["lr=3", "y"]),
    }
    assert {text: targets.parse_group(text) for text in groups} == groups
    (tmp_path / "lr=3").mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / "lr=3" / name).touch()
    assert {
        targets.parse_group(path)
        for path in ("plain", "lr=3", "lr=3/30", "lr=3/checkpoint/step-30")
    } == {None}
    for text in ("=a,b", "off=", "off=a,,b", "off=a,a"):
        with pytest.raises(ConfigError, match="expected NAME=A,B,C"):
            targets.parse_group(text)


def letters(text):
    return [ord(c) for c in text]


def test_contiguous_sequences():
    lines = [f"line {i}\n" for i in range(300)]
    whole = "".join(lines)
    found = contiguous_sequences(lines, letters, 50, 40, seed=3)
    places = [whole.index("".join(map(chr, sequence))) for sequence in found.tolist()]
    assert all(place == 0 or whole[place - 1] == "\n" for place in places)
    assert (found.shape, len(set(places)) > 30) == ((50, 40), True)
    same, other = (
        contiguous_sequences(lines, letters, 50, 40, seed) for seed in (3, 4)
    )
    assert (torch.equal(found, same), torch.equal(found, other)) == (True, False)
    assert (
        "".join(
            map(chr, contiguous_sequences(lines, letters, 3, len(whole), seed=0)[2])
        )
        == whole
    )
    with pytest.raises(
        ConfigError,
        match=f"has {len(whole):,} tokens, expected at least {len(whole) + 1:,}",
    ):
        contiguous_sequences(lines, letters, 1, len(whole) + 1, seed=0)


def test_short_texts_give_fewer_or_shorter_sequences():
    assert cut_sequences(["abc", "de"], letters, 9, 3).tolist() == [
        [97, 98, 99],
        [10, 10, 100],
    ]
    assert cut_sequences(["abc"], letters, 2, 9).tolist() == [[97, 98, 99]]


def test_plain_text_is_read_whole_and_shuffled(text):
    pieces = read_texts(text, None, seed=0)
    assert len(pieces) > 3
    assert "".join(sorted(pieces, key=text.read_text().index)) == text.read_text()
    assert pieces == read_texts(text, None, seed=0) != read_texts(text, None, seed=1)


def test_another_field_of_the_text(tmp_path):
    file = tmp_path / "some.jsonl"
    table = tmp_path / "some.parquet"
    file.write_text('{"meta": {"body": "one"}}\n{"meta": {"body": "two"}}\n')
    table.write_bytes(parquet(body=["one", "two"]))
    for source, field, message in (
        (
            (file, None),
            "meta.body",
            'no field "text", only meta.body; set --text-field',
        ),
        ((None, str(table)), "body", r"only body \(string\): set --text-field"),
    ):
        assert sorted(read_texts(*source, 0, text_field=field)) == ["one", "two"]
        with pytest.raises(ConfigError, match=message):
            read_texts(*source, 0)


def test_a_folder_has_the_split_of_a_run(tmp_path, sample):
    """Held out by a hash of the names, as training does it; in a copy of C4 by name."""
    for i in range(120):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    held_out = list_files("text_validation", str(tmp_path))
    expected = sorted(f"text {file.name.removesuffix('.txt')}" for file in held_out)
    assert len(expected) == 6
    for source in ((None, str(tmp_path)), (tmp_path, None)):
        assert sorted(read_texts(*source, 0)) == expected
    c4 = list_files("c4_validation", str(sample))
    assert sorted(read_texts(sample, None, 0)) == sorted(read_texts(None, c4[0].url, 0))


def test_a_wrong_field_is_found_before_the_files_are_read(tmp_path, monkeypatch):
    read = []

    def counted(documents, original=Documents.read):
        read.append(documents.file.name)
        return original(documents)

    monkeypatch.setattr(Documents, "read", counted)
    for name in ("validation-0.jsonl", "validation-1.jsonl"):
        (tmp_path / name).write_text('{"url": "u", "body": "one"}\n' * 700)
    with pytest.raises(
        ConfigError,
        match='first 1,000 documents have no text.*: no field "text", only url, body; set',
    ):
        read_texts(None, str(tmp_path), 0)
    assert len(read) <= 1001


@pytest.mark.parametrize(
    "before", ['{"body": "a"}\n' * 999, '{"text": ""}\n' * 3000, "x\n" * 1500, ""]
)
def test_a_corpus_with_many_bad_documents_is_read_to_its_end(tmp_path, capsys, before):
    between = "" if before else '{"body": "a"}\n' * 3000
    (tmp_path / "some.jsonl").write_text(
        before + '{"text": "one"}\n' + between + '{"text": "two"}\n'
    )
    assert sorted(read_texts(tmp_path / "some.jsonl", None, 0)) == ["one", "two"]
    assert (
        f"skipped {(before + between).count(chr(10)):,} bad documents"
        in capsys.readouterr().err
    )
