"""What a run has seen of each of several sources, in the real trainer, against float64 by hand."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests import ring_attention
from tests.distributed import spawn
from tests.mesh import GLOBAL_BATCH, SEQ_LEN, job_config, plain_model, weights
from tests.run_invariants import check_run, check_sources
from tests.streams import write_texts
from titan_disp.data.loader import open_stream
from titan_disp.data.sources import training_sets
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.dispersion import DispersionLoss, DispersionObjective, LossLedger
from titan_disp.job_config import Source
from titan_disp.lab.digest import global_batch
from titan_disp.run.reader import read_metrics
from titan_disp.spec import cross_entropies

TP, CP = (("--parallelism.tensor_parallel_degree", "2"), ("--parallelism.context_parallel_degree", "2"))
ONE_BY_ONE = ("--training.local_batch_size", "1")
CHUNKED = ("--training.head_chunk_tokens", "24")
CASES = {
    1: {"alone": (), "off": ("--dispersion.no-enabled",), "chunked": CHUNKED},
    4: {
        "hsdp": ("--parallelism.data_parallel_replicate_degree", "2", *ONE_BY_ONE),
        "fsdp_tp": TP,
        "fsdp_tp_chunked": (*TP, *CHUNKED),
        "fsdp_cp": CP,
        "stock": ONE_BY_ONE,
    },
}


def job_of(sample, run, *options):
    """Three slots of eight are of code, whose documents are shorter."""
    common = ("--training.steps", "3", "--metrics.log_freq", "2", "--model.overrides", "n_layers=1")
    job = job_config(sample, run, *options, *common)
    job.training.dataset_path = None
    paths = {name: run.parent / name / "texts.json" for name in ("web", "code")}
    job.stream.sources = [Source(weight, str(paths[name]), name=name) for name, weight in (("web", 5.0), ("code", 3.0))]
    return job


def train(sample, folder, cases):
    from torchtitan.train import Trainer

    from titan_disp.train import DispTrainer

    ring_attention.install()
    for name, options in cases.items():
        trainer = (Trainer if name == "stock" else DispTrainer)(job_of(sample, folder / name, *options))
        before = weights(trainer)
        trainer.train()
        trainer.close()
        if name == "alone":
            torch.save(before, folder / "weights.pt")


@pytest.fixture(scope="module")
def folder(sample, tmp_path_factory):
    folder = tmp_path_factory.mktemp("seen")
    write_texts(folder / "web" / "texts.json", [f"Page {i} has some words about the weather." * 2 for i in range(99)])
    write_texts(folder / "code" / "texts.json", [f"x = {i} + y" for i in range(99)])
    for ranks, cases in CASES.items():
        spawn(ranks, train, sample, folder, cases)
    return folder


@pytest.fixture(scope="module")
def expected(sample, folder):
    """Cross-entropies of the first batch's web and code, in float64."""
    job = job_of(sample, folder / "by_hand")
    files = [file for one in training_sets(job) for file in one.files()]
    loader = iter(open_stream(job, files, load_tokenizer(sample / "tokenizer"), 1, 0))
    tokens = global_batch([loader], job, GLOBAL_BATCH, GLOBAL_BATCH)
    model = plain_model(torch.load(folder / "weights.pt"), "n_layers=1").double()
    with torch.no_grad():
        logits = model(tokens[:, :-1])
    logits = logits[0] if isinstance(logits, tuple) else logits
    losses = cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    return {"ce/web": losses[:5].mean().item(), "ce/code": losses[5:].mean().item()}


@pytest.mark.parametrize("name", [name for cases in CASES.values() for name in cases])
def test_cross_entropy_of_each_source(folder, expected, name):
    if name != "stock":
        check_run(folder / name)
    rows, alone = (read_metrics(folder / one) for one in (name, "alone"))
    assert list(rows) == [1, 2]
    assert abs(expected["ce/web"] - expected["ce/code"]) > 1e-2
    for key, ce in expected.items():
        assert rows[1][key] == pytest.approx(ce, rel=2e-6)
        if name != "off":  # whose gradients are others
            assert rows[2][key] == pytest.approx(alone[2][key], rel=1e-5)
            assert rows[2]["grad_norm"] == pytest.approx(alone[2]["grad_norm"], rel=1e-4)
    for step, row in rows.items():
        check_sources(row)
        assert row["data"]["tokens/code"] == step * 3 * SEQ_LEN
        assert row["data"]["documents/code"] > row["data"]["documents/web"] > 0


def test_rows_are_told_apart_by_their_place():
    """Two rounds of three slots, in microbatches of two rows with padding. What is not finite stays with its source."""
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 5, 9, dtype=torch.float64), torch.randint(9, (6, 5))
    labels[torch.rand(6, 5) < 0.4] = -100
    losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none").unflatten(0, (2, 3))
    counts = (labels != -100).unflatten(0, (2, 3))
    ledger = LossLedger()
    ledger.sources = {"web": 2, "none here": 0, "code": 1}
    objective = DispersionObjective(cross_entropies, DispersionLoss(), lambda step: 1.0, ledger=ledger)

    def found():
        ledger.reset()
        with torch.no_grad():  # as in validation
            objective(logits[:1], labels[:1])
        for rows in torch.arange(6).split(2):
            objective(logits[rows], labels[rows])
        return ledger.mean(None)

    expected = {"web": losses[:, :2].sum() / counts[:, :2].sum(), "code": losses[:, 2].sum() / counts[:, 2].sum()}
    for name, ce in expected.items():
        assert found()[f"ce/{name}"] == pytest.approx(ce.item(), rel=1e-6)
    assert math.isnan(found()["ce/none here"])
    logits[5] = math.nan
    assert math.isnan(found()["ce/code"])
    assert found()["ce/web"] == pytest.approx(expected["web"].item(), rel=1e-6)
