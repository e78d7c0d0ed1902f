"""lm_eval's own command line against titan-disp evaluate, document by document, on the
same exported models and tasks (make test-peers).
"""

import json
import subprocess
import sys

import pytest

from tests.test_evaluate import models, own, samples_of  # noqa: F401
from titan_disp.config.command_options import EvaluateOptions
from titan_disp.lab.evaluate.evaluation import evaluate

METRICS = {"choice": ("acc", "acc_norm"), "word": ("acc", "perplexity")}


def samples_of_lm_eval(model, tasks, out):
    """Return task → the rows that lm_eval writes of its documents, in their order."""
    subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "run", "--model", "hf"),
            *("--model_args", f"pretrained={model},dtype=float32"),
            *("--tasks", *METRICS, "--include_path", tasks),
            *("--device", "cpu", "--batch_size", "3"),
            *("--output_path", out, "--log_samples"),
        ],
        check=True,
        env={"HF_HUB_OFFLINE": "1", "PATH": "", "HOME": str(out)},
    )
    rows = {}
    for task in METRICS:
        (path,) = out.rglob(f"samples_{task}_*.jsonl")
        rows[task] = [json.loads(line) for line in path.read_text().splitlines()]
    return rows


@pytest.mark.parametrize("number", [0, 1])
def test_each_document_has_the_score_of_lm_eval(models, own, number, tmp_path):  # noqa: F811
    model = models[number]
    expected = samples_of_lm_eval(model, own, tmp_path / "lm_eval")
    options = EvaluateOptions(
        [model], [*METRICS], include_path=own, out=tmp_path / "ours"
    )
    evaluate(options)
    scores = samples_of(tmp_path / "ours", "hf")
    compared = 0
    for task, metrics in METRICS.items():
        of_task = [row for row in scores if row["task"] == task]
        assert len(of_task) == len(expected[task])
        by_document = {row["doc_id"]: row for row in expected[task]}
        for row in of_task:
            for metric in metrics:
                theirs = by_document[row["doc_id"]][metric]
                assert row[metric] == pytest.approx(theirs, rel=2e-6)
                compared += 1
    assert compared == 64
