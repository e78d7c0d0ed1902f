"""The arithmetic of tokens, steps and ranks, off the multiples: the same run on any
mesh, and no token too few.
"""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.command_line import DEMO
from tests.pages import changed, loaded
from titan_disp.checks import (
    check_batch,
    check_stream,
    resolve_replicas,
)
from titan_disp.config import batch
from titan_disp.data.validation import validation_sequences
from titan_disp.errors import ConfigError
from titan_disp.schedules import build_coeff_schedule

few = st.integers(1, 12)
degrees = st.integers(1, 4)
# Other work on the machine may take the time of an example
quick = settings(deadline=None)


@pytest.fixture(autouse=True, scope="module")
def parsed():
    loaded(DEMO)


@st.composite
def runs(draw):
    """A config with any mesh and batch, and its number of ranks.

    The global batch may be -1.
    """
    dp = draw(few)
    cp = draw(degrees)
    tp = draw(degrees)
    local = draw(few)
    microbatches = draw(few)
    size = draw(st.sampled_from([-1, local * microbatches * dp]))
    keys = {
        "local_batch_size": local,
        "seq_len": draw(st.integers(2, 5000)),
        "global_batch_size": size,
    }
    keys = {f"training.{key}": value for key, value in keys.items()}
    keys |= {
        "parallelism.context_parallel_degree": cp,
        "parallelism.tensor_parallel_degree": tp,
    }
    job = changed(loaded(DEMO), keys)
    size = local * dp if size == -1 else size
    return SimpleNamespace(
        job=job,
        ranks=dp * cp * tp,
        dp=dp,
        batch=size,
        tokens=size * job.training.seq_len,
    )


@quick
@given(runs(), st.integers(1, 10**12), st.floats(0, 1))
def test_steps_cover_the_budget_and_the_stop(run, tokens, fraction):
    job = changed(run.job, {"budget.tokens": tokens, "training.steps": -1})
    assert batch.data_parallel_degree(job, run.ranks) == run.dp
    assert batch.tokens_per_step(job, run.dp) == run.tokens
    for _ in range(2):  # ranks resolve a config that the launcher has resolved
        batch.resolve_steps(job, run.ranks)
        steps = job.training.steps
        assert (steps - 1) * run.tokens < tokens <= steps * run.tokens
    assert batch.last_step(job, run.dp) == steps
    job.budget.stop_at_tokens = stop = max(
        1, min(steps * run.tokens, int(fraction * steps * run.tokens))
    )
    batch.resolve_steps(job, run.ranks)
    last = batch.last_step(job, run.dp)
    assert (last - 1) * run.tokens < stop <= last * run.tokens
    # of the whole budget
    assert job.training.steps == build_coeff_schedule(job).total_steps == steps
    job.budget.stop_at_tokens = steps * run.tokens + 1
    with pytest.raises(ConfigError, match="stop_at_tokens"):
        batch.resolve_steps(job, run.ranks)
    job.training.steps = steps + 1
    job.budget.stop_at_tokens = 0
    with pytest.raises(ConfigError, match=r"training\.steps is"):
        batch.resolve_steps(job, run.ranks)


@quick
@given(runs(), st.data())
def test_a_batch_is_divided_into_equal_parts_or_refused(run, data):
    """Of the sequences among microbatches and ranks, of the slots among ranks, and of
    the sequences among slots.
    """
    # few of all numbers
    accepted = [n for n in range(run.dp, run.batch + 1, run.dp) if run.batch % n == 0]
    slots = data.draw(st.integers(1, 200) | st.sampled_from(accepted))
    job = changed(run.job, {"stream.slots": slots})
    check_batch(job, run.ranks)
    if run.batch % slots == 0 and slots % run.dp == 0:
        check_stream(job, run.ranks)
        assert batch.slot_count(job, run.dp) == slots
    else:
        with pytest.raises(ConfigError, match=f"slots is {slots}"):
            check_stream(job, run.ranks)
    assert batch.slot_count(run.job, run.dp) == run.batch
    uneven = changed(job, {"training.global_batch_size": run.batch + 1})
    if job.training.local_batch_size * run.dp > 1:
        with pytest.raises(ConfigError, match="not a positive multiple"):
            check_batch(uneven, run.ranks)


@quick
@given(runs(), st.integers(1, 16))
def test_replicas_use_every_rank(run, most):
    job = run.job
    p = run.job.parallelism
    p.data_parallel_replicate_degree = -1
    p.data_parallel_shard_degree = most
    if run.dp % min(most, run.dp):
        with pytest.raises(ConfigError, match=f"but there are {run.ranks}"):
            resolve_replicas(job, run.ranks)
        return
    for _ in range(2):
        resolve_replicas(job, run.ranks)
        assert p.data_parallel_shard_degree == min(most, run.dp)
        assert p.data_parallel_replicate_degree * p.data_parallel_shard_degree == run.dp
    assert batch.data_parallel_degree(job, run.ranks) == run.dp


@pytest.mark.parametrize(
    ("times", "rest"), [((0, 0), (0, 0)), ((1, 4), (0, 0)), ((0, 4), (1, 11))]
)
@quick
@given(runs(), few, st.data(), st.integers(-1, 4))
def test_validation_takes_as_many_sequences_as_were_asked_for(
    times, rest, run, local, data, steps
):
    step = local * run.dp
    wanted = data.draw(st.integers(*times)) * step + data.draw(st.integers(*rest))
    keys = {
        "validation.local_batch_size": local,
        "validation.steps": steps,
        "stream.validation_sequences": wanted,
    }
    job = changed(run.job, keys)
    if wanted and wanted % step == 0 and (steps == -1 or steps * step >= wanted):
        assert validation_sequences(job, run.dp) == wanted
    elif not wanted and steps > 0:
        assert validation_sequences(job, run.dp) == steps * step
    else:
        with pytest.raises(
            ConfigError, match=r"validation\.steps|validation_sequences"
        ):
            validation_sequences(job, run.dp)
