"""Attention within documents: a packed sequence gives what each of its documents gives
alone. On meshes: ``test_meshes``.
"""

from functools import partial
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.models.attention import FlexAttentionWrapper

import titan_disp.plugin  # noqa: F401
from tests import streams
from tests.distributed import spawn
from tests.mesh import (
    SEQ_LEN,
    alone,
    dims,
    documents,
    global_batch,
    parts_of,
    plain_model,
    trained,
)
from tests.pages import changed
from tests.run_invariants import check_run
from tests.test_assembly import OPTIONS
from titan_disp.checks import check_config
from titan_disp.data.listing import list_files
from titan_disp.data.loader import open_stream
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.data.validation import held_out_sequences
from titan_disp.errors import ConfigError
from titan_disp.lab.digest import digest
from titan_disp.lab.export.saved import find_saved, load_model
from titan_disp.models.decoder import document_mask
from titan_disp.models.registry import MODELS, model_args
from titan_disp.run.identity import check_identity
from titan_disp.run.reader import read_condensation, read_metrics, read_validation
from titan_disp.spec import train_spec
from titan_disp.train import DispTrainer

MASK = ("--stream.document_mask",)
RESTART = (*MASK, "--stream.restart_positions")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_packed_sequence_equal_those_of_each_document(name, restart):
    args = model_args(name, "nano")
    args.activations = (6, 7)
    args.max_seq_len = SEQ_LEN
    args.attn_type = "flex"
    args.restart_positions = restart
    model = MODELS[name].model_cls(args)
    torch.manual_seed(4)
    model.init_weights()
    plain = plain_model(model.state_dict(), (), name, activations=(6, 7)).to(DEVICE)
    model = model.to(DEVICE)
    inputs = global_batch()[0].to(DEVICE)
    segments = documents().to(DEVICE)
    # Among them one, and documents of one token
    assert len({len(parts_of(row.tolist())) for row in segments}) > 3
    masks = model.get_attention_masks(inputs, None, {"segments": segments})
    logits, activations, given = model(inputs, masks, segments=segments)
    expected, theirs = alone(plain, inputs, segments, restart)
    assert given is segments  # for the loss
    for found, wanted in zip((logits, *activations), (expected, *theirs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    # What measures condensation passes the model the same.
    trainer = MagicMock(model_parts=[model], model_args=args)
    trainer.parallel_dims.cp_enabled = False
    trainer.post_dataloading_process = partial(
        DispTrainer.post_dataloading_process, trainer
    )
    DispTrainer.measure_condensation(trainer)
    (forward,) = trainer.monitor.measure.call_args.args
    torch.testing.assert_close(
        forward(inputs, inputs, segments).activations[-2:], activations
    )
    # attention across documents would be seen
    assert (logits - plain(inputs)[0])[1:].abs().amax((1, 2)).min() > 0.01
    # One document: the same as without masks. Evaluation, export and generation know
    # only such sequences.
    one = torch.zeros_like(segments)
    found = model(
        inputs, model.get_attention_masks(inputs, None, {"segments": one}), segments=one
    )[0]
    torch.testing.assert_close(found, plain(inputs)[0], rtol=1e-4, atol=1e-5)
    # GPT-2 learns a vector for each position; rotary embeddings know only distances.
    other = alone(plain, inputs, segments, not restart)[0]
    assert torch.allclose(logits, other, rtol=1e-4, atol=1e-5) == (name != "gpt2_disp")
    with pytest.raises(ValueError, match="attention_masks is None"):
        model(inputs, segments=segments)


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU runs flex attention itself")
def test_the_mask_of_a_cpu_is_flex_attentions():
    """What runs on a GPU, as far as a CPU can tell: forward only, and not compiled."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(8, heads, SEQ_LEN, 16, generator=generator) for heads in (4, 2, 2)
    )
    mask = document_mask(documents())
    found = FlexAttentionWrapper()(q, k, v, block_mask=mask, scale=0.3, enable_gqa=True)
    with torch.no_grad():
        torch.testing.assert_close(
            found, flex_attention(q, k, v, block_mask=mask, scale=0.3, enable_gqa=True)
        )


@pytest.mark.parametrize("window", [0, 5])
def test_segments_are_the_documents(tmp_path, window):
    """Against packing anew.

    EOS, 0, would find other documents: it is in their texts. Some are longer than three
    sequences.
    """
    texts = [
        " ".join(
            [str(i), "0", str(i)] * (1 + i % 4) + [str(i)] * (40 if i % 9 == 0 else 0)
        )
        for i in range(1, 60)
    ]
    streams.write_texts(tmp_path / "c4-train.00000-of-00001.json.gz", texts)
    files = list_files("c4", str(tmp_path))
    (rank,) = streams.streams_of(
        files, 1, 1, seq_len=10, segments=True, shuffle_window=window
    )
    (slot,) = rank.slots.values()
    found = np.zeros((2, 70, 11), dtype=np.int64)
    stream = []
    for tokens, segments in zip(*found, strict=True):
        slot.fill(tokens, segments)
    if window:  # the tokens but EOS say which document they are of
        numbers = [int(n) for n in found[0].flatten() if n]
        order = [
            n - 1
            for n, before in zip(numbers, [0, *numbers], strict=False)
            if n != before
        ]
    else:
        order = [
            i
            for _, i in streams.order_by_hand(
                files, [len(texts)], 1, 0, 0, size=lambda f, i: len(texts[i])
            )
        ]
    for number, i in enumerate(order):
        stream += [(token, number) for token in streams.encode(texts[i])]
    rows = np.array(stream[: len(stream) // 11 * 11]).reshape(-1, 11, 2)[:70]
    assert len(rows) >= 60
    assert found[0, : len(rows)].tolist() == rows[..., 0].tolist()
    # each row begins with 0
    assert found[1, : len(rows)].tolist() == (rows[..., 1] - rows[:, :1, 1]).tolist()


def test_digest_and_held_out_sequences(one_rank, sample):
    job, without, within = (
        streams.config(sample, "--training.seq_len", "200", *options)
        for options in (
            MASK,
            (),
            ("--dispersion.enabled", "--dispersion.within_documents"),
        )
    )
    one, two, plain, of_loss = (
        digest(*given).hashes
        for given in (
            (job, 3, [(0, 1)]),
            (job, 3, [(0, 2), (1, 4)]),
            (without, 3, [(0, 1)]),
            (within, 3, [(0, 1)]),
        )
    )
    assert (one, plain) == (two, of_loss)
    assert not set(one) & set(plain)
    tokenizer = load_tokenizer(sample / "tokenizer")
    tokens, segments = held_out_sequences(job, tokenizer, 5)
    assert torch.equal(tokens, held_out_sequences(without, tokenizer, 5)[0])
    assert segments.max() > 0
    inputs, _ = next(
        iter(open_stream(job, list_files("c4", str(sample)), tokenizer, 1, 0))
    )
    for ids, found in ((tokens, segments), (inputs["input"], inputs["segments"])):
        ends = (ids == tokenizer.eos_id).long()  # no text of the sample holds EOS
        assert torch.equal(found.long(), ends.cumsum(1) - ends)
    build_loss = train_spec(MODELS["qwen3_disp"]).build_loss_fn
    assert [
        build_loss(job, dims(1)).within_documents for job in (job, without, within)
    ] == [False, False, True]


def test_what_cannot_keep_to_documents(sample):
    job = streams.config(sample, "--dispersion.within_documents")
    for key, value, message in (
        (
            "dispersion.estimator",
            "moments",
            "dispersion.estimator is 'moments', which cannot be limited to pairs within",
        ),
        (
            "dispersion.losses",
            [{"variant": "koleo"}],
            r"losses\[0\].variant is 'koleo', which is not a loss",
        ),
        (
            "parallelism.context_parallel_degree",
            2,
            "within_documents is true, but parallelism.context_parallel_degree",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            check_config(changed(job, {key: value}), 2)


RUN = (
    *(
        *OPTIONS,
        *RESTART,
        "--training.seq_len",
        "128",
        "--condensation.interval",
        "2",
        "--condensation.sequences",
        "4",
    ),
    *(
        "--condensation.max_tokens",
        "32",
        "--stream.prefetch",
        "2",
        "--validation.enable",
        "--validation.freq",
        "2",
    ),
    *(
        "--validation.steps",
        "-1",
        "--validation.local_batch_size",
        "2",
        "--stream.validation_sequences",
        "4",
    ),
    *("--validation.dataset", "c4_validation", "--dispersion.within_documents"),
)


def train(sample, folder, runs):
    for name, options in runs.items():
        trained(
            sample,
            folder / name,
            *RUN,
            "--validation.dataset_path",
            str(sample),
            *options,
        )


@pytest.fixture(scope="module")
def runs(sample, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    spawn(
        1, train, sample, folder, {"whole": (), "gpt2": ("--model.name", "gpt2_disp")}
    )
    spawn(
        2,
        train,
        sample,
        folder,
        {"two": (), "tp": ("--parallelism.tensor_parallel_degree", "2")},
    )
    for run in folder.iterdir():
        check_run(run)
    return folder


def held_out_losses(run):
    return {step: row["cross_entropy"] for step, row in read_condensation(run).items()}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["two", "tp"])
def test_two_ranks_train_as_one_process(runs, mesh):
    one = read_metrics(runs / "whole")
    two = read_metrics(runs / mesh)
    for name in ("loss", "ce", "dispersion", "grad_norm"):
        assert [row[name] for row in two.values()] == pytest.approx(
            [row[name] for row in one.values()], rel=1e-4
        ), name
    assert read_validation(runs / mesh) == pytest.approx(
        read_validation(runs / "whole"), rel=1e-5
    )
    assert held_out_losses(runs / mesh) == pytest.approx(
        held_out_losses(runs / "whole"), rel=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("run", ["whole", "gpt2"])
def test_held_out_text_is_measured_within_documents(runs, sample, run):
    """Validation and condensation take the same four sequences: against each document
    alone, by the saved model.
    """
    measured = held_out_losses(runs / run)
    assert list(measured) == [0, 2, 4, 5]
    validated = read_validation(runs / run)
    assert [validated[2], validated[4]] == pytest.approx(
        [measured[2], measured[4]], rel=1e-5
    )
    # as export, generate and condensation do
    model = load_model(find_saved(runs / run))
    tokens = streams.first_sequences_by_hand(
        sample / streams.VALIDATION_FILE, sample, 4, 129
    )
    ends = (tokens == load_tokenizer(sample / "tokenizer").eos_id).long()
    segments = (ends.cumsum(1) - ends)[:, :-1]
    assert segments.max() > 0
    logits, _ = alone(
        partial(model, return_activations=(0,)), tokens[:, :-1], segments, restart=True
    )
    losses = [
        cross_entropy_loss(x, tokens[:, 1:]).item() / (4 * 128)
        for x in (logits, model(tokens[:, :-1]))
    ]
    assert measured[5] == pytest.approx(losses[0], rel=1e-6)
    assert measured[5] != pytest.approx(losses[1], rel=1e-5)


def test_a_checkpoint_of_an_earlier_version_was_trained_without_masks():
    now = {"model.name": "qwen3_disp", "stream.document_mask": True}
    with pytest.raises(
        ConfigError,
        match="stream.document_mask is False in the checkpoint and True in the config",
    ):
        check_identity({"model.name": "qwen3_disp", "attn_type": "sdpa"}, now)
    check_identity({}, now)  # of TorchTitan's own trainer
    check_identity({"model.name": "qwen3_disp"}, now | {"stream.document_mask": False})
