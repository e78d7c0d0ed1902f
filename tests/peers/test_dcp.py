"""torch's conversion of checkpoints: a run resumes from its own checkpoint after
dcp_to_torch_save and torch_save_to_dcp (make test-peers).
"""

import shutil
from pathlib import Path

from torch.distributed.checkpoint.format_utils import (
    dcp_to_torch_save,
    torch_save_to_dcp,
)

from tests.distributed import spawn
from tests.test_run_ends import ONE_RANK, train
from titan_disp.run.reader import read_metrics

ALLOW = "--checkpoint.allow_unverified"  # what torch writes has no hashes.json


def losses(run):
    rows = read_metrics(run)
    return {step: (row["ce"], row["dispersion"]) for step, row in rows.items()}


def resumed_from_a_converted_checkpoint(sample, folder):
    folder = Path(folder)
    options = (*ONE_RANK, "--metrics.log_freq", "1", "--training.steps")
    expected = folder / "expected"
    run = folder / "run"
    for path in (expected, run):
        assert train(sample, path, *options, "2") == 2
    checkpoint = run / "checkpoint" / "step-2"
    file = folder / "step-2.pt"
    dcp_to_torch_save(checkpoint, file)
    shutil.rmtree(checkpoint)
    torch_save_to_dcp(file, checkpoint)
    assert train(sample, expected, *options, "4") == 4
    assert train(sample, run, *options, "4", ALLOW) == 4
    assert losses(run) == losses(expected)


def test_a_converted_checkpoint_resumes(sample, tmp_path):
    spawn(1, resumed_from_a_converted_checkpoint, sample, str(tmp_path))
