"""What a run has seen of each of several sources, in the real trainer, against float64
by hand.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy
from torchtitan.train import Trainer

from tests import ring_attention
from tests.distributed import spawn
from tests.mesh import GLOBAL_BATCH, SEQ_LEN, job_config, plain_model, weights
from tests.pages import changed
from tests.run_invariants import check_run, check_sources
from tests.streams import write_texts
from titan_disp.dispersion import DispersionLoss
from titan_disp.job_config import Source
from titan_disp.lab.digest import global_batch
from titan_disp.models.registry import MODELS
from titan_disp.objective import DispersionObjective, LossLedger
from titan_disp.run.reader import read_metrics
from titan_disp.spec import cross_entropies, train_spec
from titan_disp.train import DispTrainer

TP = {"parallelism.tensor_parallel_degree": 2}
CP = {"parallelism.context_parallel_degree": 2}
HSDP = {"parallelism.data_parallel_replicate_degree": 2}
ONE_BY_ONE = {"training.local_batch_size": 1}
CHUNKED = {"training.head_chunk_tokens": 24}
CASES = {
    1: {"alone": {}, "off": {"dispersion.enabled": False}, "chunked": CHUNKED},
    4: {
        "hsdp": HSDP | ONE_BY_ONE,
        "fsdp_tp": TP,
        "fsdp_tp_chunked": TP | CHUNKED,
        "fsdp_cp": CP,
        "stock": ONE_BY_ONE,
    },
}


def train(sample, folder, cases):
    """Three slots of eight are of code, whose documents are shorter."""
    ring_attention.install()
    common = (
        "--training.steps",
        "2",
        "--metrics.log_freq",
        "2",
        "--model.overrides",
        "n_layers=1",
    )
    common += ("--stream.prefetch", "0")
    whole = job_config(sample, folder, *common)
    whole.training.dataset_path = None
    whole.stream.sources = [
        Source(w, str(folder / f"{n}.json"), name=n)
        for n, w in (("web", 5.0), ("code", 3.0))
    ]
    for name, keys in cases.items():
        job = changed(whole, keys | {"job.dump_folder": str(folder / name)})
        trainer = (Trainer if name == "stock" else DispTrainer)(job)
        if name == "alone":
            tokens = global_batch(
                [iter(trainer.dataloader)], job, GLOBAL_BATCH, GLOBAL_BATCH
            )
            torch.save((weights(trainer), tokens), folder / "first.pt")
            trainer.dataloader.restart(0)
        trainer.train()
        trainer.close()


@pytest.fixture(scope="module")
def folder(sample, tmp_path_factory):
    folder = tmp_path_factory.mktemp("seen")
    write_texts(
        folder / "web.json",
        [f"Page {i} has some words about the weather." * 2 for i in range(99)],
    )
    write_texts(folder / "code.json", [f"x = {i} + y" for i in range(99)])
    for ranks, cases in CASES.items():
        spawn(ranks, train, sample, folder, cases)
        for name in cases.keys() - {"stock"}:
            check_run(folder / name)
    return folder


@pytest.mark.parametrize("name", [name for cases in CASES.values() for name in cases])
def test_cross_entropy_of_each_source(folder, name):
    rows, alone = (read_metrics(folder / one) for one in (name, "alone"))
    before, tokens = torch.load(folder / "first.pt")
    logits = plain_model(before, "n_layers=1").double()(tokens[:, :-1])
    losses = cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    for key, of_source in (("ce/web", losses[:5]), ("ce/code", losses[5:])):
        assert rows[1][key] == pytest.approx(of_source.mean().item(), rel=2e-6)
        if name != "off":  # whose gradients are others
            assert rows[2][key] == pytest.approx(alone[2][key], rel=1e-5)
            assert rows[2]["grad_norm"] == pytest.approx(
                alone[2]["grad_norm"], rel=1e-4
            )
    for step, row in rows.items():
        check_sources(row)
        assert row["data"]["tokens/code"] == step * 3 * SEQ_LEN
        assert row["data"]["documents/code"] > row["data"]["documents/web"] > 0


def test_sources_of_an_earlier_trainer_are_forgotten(sample, tmp_path, monkeypatch):
    """Both trainers of a process share the parts of a spec."""
    loaders = iter([{"web": 2, "code": 1}, {"text": 3}])
    monkeypatch.setattr(
        "titan_disp.spec.build_dataloader",
        lambda *arguments: SimpleNamespace(slot_counts=next(loaders)),
    )
    job = job_config(sample, tmp_path)
    dims = SimpleNamespace(tp_enabled=False, get_optional_mesh=lambda name: None)
    spec = train_spec(MODELS["qwen3_disp"])
    ledger = spec.build_loss_fn(job, dims).ledger
    for sources in ({"web": 2, "code": 1}, {}):
        spec.build_dataloader_fn(1, 0, None, job)
        assert ledger.sources == sources


def test_rows_are_told_apart_by_their_place():
    """Two rounds of three slots, in microbatches of two rows with padding.

    What is not finite stays with its source.
    """
    logits = torch.randn(6, 5, 9, dtype=torch.float64)
    labels = torch.randint(9, (6, 5))
    labels[:, 0] = 1
    labels[:, 1:][torch.rand(6, 4) < 0.4] = -100
    losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none").unflatten(
        0, (2, 3)
    )
    counts = (labels != -100).unflatten(0, (2, 3))
    ledger = LossLedger()
    ledger.sources = {"web": 2, "none here": 0, "code": 1}
    objective = DispersionObjective(
        cross_entropies, DispersionLoss(), lambda step: 1.0, ledger=ledger
    )

    def found(name):
        ledger.reset()
        with torch.no_grad():  # as in validation
            objective(logits[:1], labels[:1])
        for rows in torch.arange(6).split(2):
            objective(logits[rows], labels[rows])
        return ledger.mean(None)[f"ce/{name}"]

    web = pytest.approx((losses[:, :2].sum() / counts[:, :2].sum()).item(), rel=1e-6)
    assert found("web") == web
    assert found("code") == pytest.approx(
        (losses[:, 2].sum() / counts[:, 2].sum()).item(), rel=1e-6
    )
    logits[5] = math.nan
    assert found("web") == web
    assert all(math.isnan(found(name)) for name in ("code", "none here"))
