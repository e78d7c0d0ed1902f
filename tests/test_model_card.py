"""README.md of an exported model describes the data, losses on other text,
condensation, and dispersion's settings.
"""

import json
import re

import huggingface_hub
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.saved_run import SEQ_LEN, change_config, random_model, save_run
from titan_disp.condensation.record import Measurement
from titan_disp.data.options import StreamOptions
from titan_disp.data.position import Field
from titan_disp.data.sources import DataSet, list_for_run
from titan_disp.lab.export.model_card import model_card
from titan_disp.lab.export.saved import find_saved


def rows_of(run):
    card = model_card(find_saved(run), "small", 427008, "float32", {})
    return dict(re.findall(r"^\| (\S.*?) \| (.*) \|$", card, re.MULTILINE))


@pytest.fixture
def run(tmp_path, sample):
    data = ("--training.dataset_path", str(sample))
    return save_run(tmp_path / "run", random_model(), sample / "tokenizer", *data)


def save_files(run, files):
    state = {
        "fingerprint": json.dumps({"files": files}),
        "positions": torch.zeros(1, len(Field), dtype=torch.int64),
    }
    dcp.save(
        {"dataloader": state},
        checkpoint_id=run / "checkpoint" / "step-40",
        no_dist=True,
    )


def test_what_became_of_the_data(run, tmp_path):
    assert "stored data" not in rows_of(run)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_bytes("Voilà.\n".encode("cp1252") * 100)
    (tmp_path / "corpus/b.txt").write_text("a text")
    data = [DataSet("text", str(tmp_path / "corpus"), "training")]
    list_for_run(data, StreamOptions(run_folder=str(run)))
    row = {
        "step": 20,
        "time": 2e9,
        "data": {"skipped_documents": 3.0, "skipped_bytes": 1234.0},
    }
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    rows = rows_of(run)
    assert rows["stored data"] == (
        "used       6 bytes of 1 file; "
        "converted  700 bytes of 1 file, such as a.txt: from cp1252"
    )
    assert rows["skipped in training"] == "3 documents, about 1,234 bytes of text"


def test_files_of_the_checkpoint(run, sample):
    on_disk = len([*(sample / "en").glob("c4-train*")])
    assert re.match(rf"{on_disk} files, .* to `c4-train", rows_of(run)["data"])
    save_files(
        run, [[f"c4-train.{i:05}-of-01024.json.gz", 319_400_000] for i in range(1024)]
    )
    assert rows_of(run)["data"] == (
        "1,024 files, 327.1 GB: `c4-train.00000-of-01024.json.gz` to "
        "`c4-train.01023-of-01024.json.gz` (laid out as allenai/c4, from a local "
        f"folder or file named `{sample.name}`)"
    )
    web = {"name": "", "path": "/data/web", "dataset": "text", "weight": 3.0}
    change_config(
        run,
        "stream",
        sources=[web, web | {"name": "code", "path": "/data/c", "weight": 1.0}],
    )
    save_files(run, [["a.jsonl", 1_500_000], ["b.jsonl", 500_000]])
    assert (
        rows_of(run)["data"]
        == "`web` (75%), `code` (25%); in total 2 files, 2 MB: `a.jsonl`, `b.jsonl`"
    )


def test_other_files(run, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.jsonl").write_text('{"text": "a b"}\n')
    docs = "1 file, 16 bytes: `a.jsonl` (documents, from a local folder or file named `docs`)"
    for dataset, path, told in (
        (
            "c4",
            "/gone/mirror",
            "laid out as allenai/c4, from a local folder or file named `mirror`",
        ),
        ("c4", None, "allenai/c4, from the hub"),
        ("text", f"{tmp_path}/docs", docs),
    ):
        change_config(run, "training", dataset=dataset, dataset_path=path)
        assert rows_of(run)["data"] == told


def test_settings_of_dispersion_and_of_a_baseline(run):
    told = rows_of(run)
    assert re.fullmatch(r"\d+ sequences", told["batch"])
    assert re.fullmatch(
        r"[\d,]+ steps of warm-up, then \w+ decay to [\d.]+ of the peak",
        told["schedule"],
    )
    assert re.fullmatch(r"\w+ \(weights\), 0 \(order of the data\)", told["seeds"])
    for setting in (
        "coeff = 0.1",
        "norm_coeff = 0.1",
        "include_diagonal = True",
        "max_tokens = 256",
    ):
        assert setting in told["dispersion"]
    assert not {"baseline", "attention in training"} & told.keys()
    change_config(run, "stream", document_mask=True, restart_positions=True)
    assert (
        rows_of(run)["attention in training"]
        == "within documents, whose positions begin at 0"
    )
    change_config(run, "baseline", method="active_forgetting", forget_every=100)
    expected = (
        "active_forgetting, forget_every = 100, forget_lr = 0.0, forget_warmup = 0.08"
    )
    assert rows_of(run)["baseline"] == expected


def test_formula_of_the_run(run):
    """With the run's own values, but only where the variant is angular alone."""

    def card():
        return model_card(find_saved(run), "small", 427008, "float32", {})

    own = {"coeff": 0.3, "tau": 0.5, "clamp": 0.1, "norm_eps": 0.02}
    change_config(run, "dispersion", **own)
    lines = card().splitlines()
    start = lines.index(f"    u_i = z_i / (‖z_i‖ + ε)  {'ε = 0.02':>40}")
    values = [line.split("  ")[-1].strip() for line in lines[start : start + 6]]
    assert values[2::2] + values[5:] == ["κ = 0.1", "τ = 0.5", "λ = 0.3"]
    # arccos(0.9) / (π · 0.5) = 0.2871
    assert "It cannot rise above −0.287, " in card()
    assert "every cosine is at least 0.9." in card()
    for change in (
        {"variant": "cosine"},
        {"variant": "angular", "losses": [{"variant": "vicreg"}]},
        {"losses": [], "enabled": False},
    ):
        change_config(run, "dispersion", **change)
        assert "L_CE" not in card()


def measured(step, level):
    mean = np.array([0.1, 0.2, 0.4, 0.9 * level, 0.3])
    found = Measurement(
        mean, mean, mean, mean, np.zeros((5, 128)), 64, 8, cross_entropy=5 * level
    )
    return (
        json.dumps(
            {"step": step, "time": 1.0, "condensation": found.to_json(), "seconds": 1.0}
        )
        + "\n"
    )


def test_losses_and_condensation_up_to_the_step(run):
    """The card of step 30 has the measurement of step 20, and the last loss of the
    repeated step 30.
    """
    absent = {"cross-entropy, validation", "condensation, held-out text"}
    assert not absent & rows_of(run).keys()
    validated = [
        {"step": s, "time": 1.0, "validation": x}
        for s, x in ((10, 8.0), (30, 7.5), (30, 7.25), (50, 6.0))
    ]
    with open(run / "metrics.jsonl", "a") as file:
        file.write(measured(10, 2.0) + measured(20, 1.0) + measured(40, 0.0))
        file.writelines(json.dumps(row) + "\n" for row in validated)
    rows = rows_of(run)
    assert rows["cross-entropy, validation"] == "7.2500 at step 30"
    assert (
        rows["cross-entropy, held-out text"]
        == f"5.0000 at step 20 (8 sequences of {SEQ_LEN} tokens)"
    )
    told = rows["condensation, held-out text"]
    # In the embedding, over the blocks, after the last block, after the final norm; ρ
    # and τ with their range; step, sequences and tokens.
    assert re.findall(r"\d+\.?\d*", told) == [
        "0.100",
        "0.500",
        "0.900",
        "0.300",
        "0.50",
        "0.33",
        "0.2",  # the range
        "20",
        "8",
        "64",
    ]
    # ρ and τ are left out if the mean cosines are equal
    found = json.loads(measured(30, 1.0))
    found["condensation"]["blocks_after_norm"] |= {"spearman": None, "kendall": None}
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(found) + "\n")
    assert (
        "0.300 after the final norm; at step 30"
        in rows_of(run)["condensation, held-out text"]
    )
    found["condensation"].pop("blocks_after_norm")  # as a run of an earlier version
    (run / "metrics.jsonl").write_text(json.dumps(found) + "\n")
    assert (
        "0.300 after the final norm; at step 30"
        in rows_of(run)["condensation, held-out text"]
    )


def test_metadata_is_that_of_the_hub(run):
    """huggingface_hub reads the card's head."""

    def metadata():
        card = model_card(find_saved(run), "small", 427008, "float32", {})
        return huggingface_hub.ModelCard(card, ignore_metadata_errors=False).data

    change_config(run, "training", dataset="c4", dataset_path=None)
    data = metadata()
    assert (data.language, data.datasets) == ("en", ["allenai/c4"])
    assert (data.base_model, data.eval_results) == (None, None)
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert data.tags == ["dispersion-loss", "titan-disp"]

    change_config(run, "training", dataset="hf:owner/name:config", dataset_path="/x")
    change_config(run, "model", hf_assets_path="assets/hf/Qwen3-0.6B")
    change_config(run, "checkpoint", initial_load_in_hf=True)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 20, "time": 9, "validation": 3.5}) + "\n")
    data = metadata()
    assert (data.language, data.datasets) == (None, ["owner/name"])
    assert data.base_model == "Qwen3-0.6B"
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value) == ("cross_entropy", 3.5)
    assert (result.dataset_name, result.task_type) == ("name", "text-generation")
    assert data.model_name == "small"  # the hub shows the score under this name
    # A folder of one's own has no name on the hub.
    change_config(run, "training", dataset="text", dataset_path="/x/corpus")
    assert metadata().datasets is None
