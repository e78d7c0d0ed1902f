"""What TorchTitan needs on a machine without an accelerator."""

import logging

import pytest
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import Color, NoColor

from tests.mesh import dims
from titan_disp import cpu
from titan_disp.config.load import load_config

pytestmark = pytest.mark.skipif(not cpu.active(), reason="this machine has an accelerator")


@pytest.mark.parametrize("colours", [Color(), NoColor()], ids=["colour", "no colour"])
def test_no_unknown_mfu_in_the_log(one_rank, colours, caplog):
    """TorchTitan's own line of a step, which ends in "mfu: nan%" where the peak is unknown."""
    cpu.install()
    metrics = MetricsProcessor(load_config([]), dims(1))
    metrics.color, metrics.num_flops_per_token = colours, 1
    metrics.ntokens_since_last_log = 10
    metrics.data_loading_times.append(0.0)
    with caplog.at_level(logging.INFO, logger.name):
        metrics.log(3, 2.0, 2.0, 1.0)
    (line,) = (record.getMessage() for record in caplog.records if "grad_norm" in record.getMessage())
    assert "step:  3" in line
    assert "tflops: 0.00" in line
    assert "mfu" not in line
