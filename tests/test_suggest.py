"""What ``plan --suggest`` lists against the plan of each of its configs."""

import json

import pytest

from tests.command_line import DEMO, typed
from tests.pages import loaded
from titan_disp.cluster.cost import GPUS
from titan_disp.cluster.plan import make_plan
from titan_disp.cluster.suggest import suggest
from titan_disp.config.options import Machine
from titan_disp.errors import ConfigError

PAPER = "train_configs/qwen3_0.6b_c4.toml"
MACHINE = Machine(1, 8, "MI250X-GCD")


@pytest.mark.slow
def test_the_paper_on_one_node(monkeypatch):
    monkeypatch.setattr("titan_disp.cluster.plan.MAX_NODES", 1)
    now, *others = suggest(loaded(PAPER), MACHINE)
    assert now.options == []
    assert others[0].step_seconds < 0.9 * now.step_seconds
    assert [one.step_seconds for one in others] == sorted(one.step_seconds for one in others)
    batches = []
    for one in [now, *others]:
        job = loaded(PAPER, *(word for option in one.options for word in option.split("=")))
        plan = make_plan(job, MACHINE)
        assert plan.memory.total == one.memory <= 0.9 * GPUS[MACHINE.gpu].memory
        assert plan.batch.global_batch_size == 1920
        again = {"none": 0, "selective": 0.5, "full": 1}[job.activation_checkpoint.mode]
        assert one.step_seconds == pytest.approx(plan.time.step_seconds + again * plan.time.computing_seconds / 3)
        batches.append(job.training.local_batch_size)
    largest = loaded(PAPER, "--activation_checkpoint.mode", "full", "--training.head_chunk_tokens", "2048")
    for size in (n for n in range(max(batches) + 1, 241) if 240 % n == 0):  # no larger one fits
        largest.training.local_batch_size = size
        assert make_plan(largest, MACHINE).memory.total > 0.9 * GPUS[MACHINE.gpu].memory


@pytest.mark.parametrize(("global_batch", "local"), [(-1, 8), (64, 4), (-1, 1)])
def test_the_global_batch_stays(global_batch, local):
    """Also where it follows from the local batch (−1)."""
    batch = ["--training.global_batch_size", str(global_batch), "--training.local_batch_size", str(local)]
    same = make_plan(loaded(PAPER, *batch), Machine(1, 8, "H100")).batch.global_batch_size
    for one in suggest(loaded(PAPER, *batch), Machine(1, 8, "H100")):
        job = loaded(PAPER, *batch, *(word for option in one.options for word in option.split("=")))
        assert make_plan(job, Machine(1, 8, "H100")).batch.global_batch_size == same
        assert one.options != ["--training.global_batch_size=64"]


def test_a_config_that_is_refused():
    with pytest.raises(ConfigError, match="tensor_parallel_degree 3"):
        suggest(loaded(PAPER, "--parallelism.tensor_parallel_degree", "3"), MACHINE)


def test_the_command(monkeypatch, capsys):
    monkeypatch.setattr("titan_disp.cluster.plan.MAX_NODES", 1)
    words = f"plan {DEMO} --gpus-per-node 2 --training.global_batch_size 4 --suggest --training.local_batch_size 2"
    words += " --activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option 0"  # of all blocks
    assert typed(monkeypatch, *words.split(), "--json") == 0
    first = json.loads(capsys.readouterr().out)["suggestions"][0]
    assert (first["options"], first["memory"] > 1e6) == ([], True)
    assert typed(monkeypatch, *words.split()) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("now", "suggested"))]
    assert lines[0].endswith(" GB: the config as it is")
    assert all(" --" in line for line in lines[1:])
    monkeypatch.setattr("titan_disp.cluster.suggest.FILLED", 0)
    assert typed(monkeypatch, *words.split()) == 0
    assert "suggested       nothing: no other" in capsys.readouterr().out
