"""README.md of an exported model describes the data, losses on other text, condensation, and dispersion's settings."""

import json
import re

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.tensorboard import SummaryWriter

from tests.saved_run import SEQ_LEN, change_config, random_model, save_run
from titan_disp.condensation.record import Condensation
from titan_disp.data.position import Field
from titan_disp.lab.export.model_card import model_card
from titan_disp.lab.export.saved import find_saved


def rows_of(run):
    card = model_card(find_saved(run), "small", 427008, "float32", {})
    return dict(re.findall(r"^\| (\S.*?) \| (.*) \|$", card, re.MULTILINE))


@pytest.fixture
def run(tmp_path, sample):
    return save_run(tmp_path / "run", random_model(), sample / "tokenizer", "--training.dataset_path", str(sample))


def test_files_of_the_checkpoint(run):
    """The files on disk may have changed since the checkpoint."""
    c4 = [[f"c4-train.{i:05}-of-01024.json.gz", 319_400_000] for i in range(1024)]
    positions = torch.zeros(1, len(Field), dtype=torch.int64)
    state = {"dataloader": {"fingerprint": json.dumps({"files": c4}), "positions": positions}}
    dcp.save(state, checkpoint_id=run / "checkpoint" / "step-40", no_dist=True)
    assert rows_of(run)["data"] == (
        "1,024 files, 327.1 GB: `c4-train.00000-of-01024.json.gz` to `c4-train.01023-of-01024.json.gz` "
        "(allenai/c4, a local copy named `sample`)"
    )


def test_files_of_several_sources(run):
    sources = [
        {"name": "", "path": "/data/web", "dataset": "text", "weight": 3.0},
        {"name": "code", "path": "/data/c", "dataset": "text", "weight": 1.0},
    ]
    change_config(run, "stream", sources=sources)
    state = {"fingerprint": json.dumps({"files": [["a.jsonl", 1_500_000], ["b.jsonl", 500_000]]})}
    state["positions"] = torch.zeros(1, len(Field), dtype=torch.int64)
    dcp.save({"dataloader": state}, checkpoint_id=run / "checkpoint" / "step-40", no_dist=True)
    assert rows_of(run)["data"] == "`web` (75%), `code` (25%); in total 2 files, 2 MB: `a.jsonl`, `b.jsonl`"


def test_files_on_this_disk(run, sample):
    """If the checkpoint has no files, those of the training split are listed."""
    files = sorted((sample / "en").glob("c4-train*"))
    told = rows_of(run)["data"]
    assert told.startswith(f"{len(files)} files, ")
    assert f"`{files[0].name}`" in told
    assert f"`{files[-1].name}`" in told
    assert "validation" not in told
    assert str(sample) not in told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--training.dataset_path", "/gone/mirror"), "allenai/c4, a local copy named `mirror`"),
        ((), "allenai/c4, from the hub"),
    ],
)
def test_files_that_nobody_knows(options, told, tmp_path, sample):
    run = save_run(tmp_path / "run", random_model(), sample / "tokenizer", *options)
    if not options:
        change_config(run, "training", dataset_path=None)
    assert rows_of(run)["data"] == told


def test_other_documents(tmp_path, sample):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.jsonl").write_text('{"text": "a b"}\n')
    options = ("--training.dataset", "text", "--training.dataset_path", str(tmp_path / "docs"))
    run = save_run(tmp_path / "run", random_model(), sample / "tokenizer", *options)
    assert rows_of(run)["data"] == "1 file, 16 bytes: `a.jsonl` (documents, a local copy named `docs`)"


def test_dispersions_settings(run):
    told = rows_of(run)["dispersion"]
    for setting in ("coeff = 0.1", "norm_coeff = 0.1", "include_diagonal = True", "max_tokens = 256"):
        assert setting in told
    assert "baseline" not in rows_of(run)


def test_a_baselines_settings(run):
    change_config(run, "baseline", method="active_forgetting", forget_every=100)
    told = rows_of(run)["baseline"]
    assert told == "active_forgetting, forget_every = 100, forget_lr = 0.0, forget_warmup = 0.08"


def measured(step, level):
    mean = np.array([0.1, 0.2, 0.4, 0.9 * level, 0.5])
    found = Condensation(mean, mean, mean, mean, np.zeros((5, 128)), 64, 8, cross_entropy=5 * level)
    return json.dumps({"step": step, "time": 1.0, "condensation": found.to_json(), "seconds": 1.0}) + "\n"


def test_losses_and_condensation_up_to_the_step(run):
    """The card of step 30 has the measurement of step 20, not a later one, and the last loss of the repeated step 30."""
    with open(run / "metrics.jsonl", "a") as file:
        file.write(measured(10, 2.0) + measured(20, 1.0) + measured(40, 0.0))
    config = change_config(run, "validation", enable=True)
    with SummaryWriter(str(run / config["metrics"]["save_tb_folder"])) as board:
        for step, loss in ((10, 8.0), (30, 7.5), (30, 7.25), (50, 6.0)):
            board.add_scalar("validation_metrics/loss", loss, step)
    rows = rows_of(run)
    assert rows["cross-entropy, validation"] == "7.2500 at step 30"
    assert rows["cross-entropy, held-out text"] == f"5.0000 at step 20 (8 sequences of {SEQ_LEN} tokens)"
    assert rows["condensation, held-out text"] == (
        "mean cosine of two tokens 0.100 in the embedding, 0.500 on average over the blocks, 0.900 after the last block, "
        "0.500 after the final norm; with depth, up to the last block: ρ 1.00, τ 1.00; "
        "at step 20 (8 sequences, 64 tokens of each)"
    )


def test_mean_cosines_that_hardly_differ(run):
    """ρ and τ are then left out."""
    found = json.loads(measured(10, 1.0))
    found["condensation"]["before_norm"] |= {"spearman": None, "kendall": None}
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(found) + "\n")
    assert "0.500 after the final norm; at step 10" in rows_of(run)["condensation, held-out text"]


def test_what_a_run_has_not_is_not_told(run):
    assert not {"cross-entropy, validation", "condensation, held-out text"} & rows_of(run).keys()
