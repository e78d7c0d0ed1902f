"""In every group, all ranks make the same collective calls in the same order, with the
same shapes and dtypes, on contiguous tensors.

NCCL hangs or mixes up data where this does not hold; gloo, with which the other tests
run, often forgives it. The real trainer runs here with what a run may meet: saves,
measurements, and faults of one rank.
"""

import json
import threading
from collections import defaultdict
from contextlib import suppress
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import ring_attention
from tests.distributed import spawn
from titan_disp.errors import CheckpointError

LOSSES = '[{"variant": "vicreg", "weight": 0.01}, {"variant": "uniformity"}]'
# Two microbatches in each of four steps. A save, with measurements, after steps 2 and 4
USUAL = (
    "--training.steps 4 --training.local_batch_size 2 --training.global_batch_size 8 "
    "--checkpoint.interval 2 --checkpoint.async_mode async --metrics.log_freq 2 "
    "--condensation.interval 2 --condensation.sequences 4 --model.overrides n_layers=2"
)
HSDP = "--parallelism.data_parallel_replicate_degree 2"
TP = "--parallelism.tensor_parallel_degree 2"
CP = "--parallelism.context_parallel_degree 2"
MASK = "--stream.document_mask --stream.restart_positions"
# name: (ranks, options, faults of tests/faulty_train.py)
CASES = {
    "fsdp": (2, "", ""),
    "synchronous": (2, "--checkpoint.async_mode disabled", ""),
    "validation": (
        2,
        "--validation.enable --validation.freq 2 --validation.steps 2 --validation.dataset_path SAMPLE",
        "",
    ),
    "tp": (2, TP, ""),
    "cp": (2, f"{CP} --condensation.interval 0", ""),
    "masks": (2, f"{MASK} --dispersion.within_documents", ""),
    "losses": (2, f"--dispersion.losses {LOSSES.replace(' ', '')}", ""),
    "sampled": (2, "--dispersion.estimator sampled --dispersion.max_tokens 8", ""),
    "nan": (2, "", "nan_loss:2@1"),
    "infinite": (2, TP, "inf_gradient:2@0"),
    "signal": (2, "", "asked_to_stop:3@1"),
    "full disk": (2, "", "nospace:2@1"),
    "hsdp": (4, f"{HSDP} --training.local_batch_size 1", ""),
    "fsdp and tp": (4, TP, ""),
    "hsdp and a signal": (4, HSDP, "asked_to_stop:3@2"),
    "cp and tp": (4, f"{CP} {TP} --condensation.interval 0", ""),
}


class Log(TorchDispatchMode):
    """Records the collective calls of all threads in ``calls``, in their order."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # the calls that a DTensor makes come here again
        namespace, operation = func._schema.name.split("::")
        group = None
        if namespace == "c10d":
            group = next(map(dist.ProcessGroup.unbox, filter(is_group, args)))
        elif namespace == "_c10d_functional" and isinstance(args[-1], str):
            group = _resolve_process_group(args[-1])
        if group is not None:
            self.record(group, operation, tree_leaves(args))
        return func(*args, **(kwargs or {}))

    def record(self, group, operation, values):
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        is_main = threading.current_thread() is threading.main_thread()
        self.calls.append(
            {
                "group": group.group_name,
                "ranks": dist.get_process_group_ranks(group),
                "thread": "main" if is_main else "another",
                "operation": operation,
                # the root of a gather alone has a list of outputs
                "tensors": sorted({f"{x.dtype} {[*x.shape]}" for x in tensors}),
                "contiguous": all(x.is_contiguous() for x in tensors),
            }
        )


def is_group(argument):
    is_object = isinstance(argument, torch.ScriptObject)
    return is_object and "ProcessGroup" in str(argument._type())


def run(sample, folder, name):
    """Train, and write what this rank has called."""
    from tests.test_run_ends import train

    _, options, faults = CASES[name]
    words = f"{USUAL} {options}".replace("SAMPLE", sample).split()
    calls = []
    run_thread = threading.Thread.run

    def logged(thread):
        with Log(calls):
            run_thread(thread)

    if CP in options:
        ring_attention.install()
    with (
        mock.patch.object(threading.Thread, "run", logged),
        Log(calls),
        suppress(CheckpointError),  # of a full disk, on all ranks
    ):
        train(sample, folder / "run", *words, faults=faults)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(calls))


def logs_of(sample, folder, name):
    """The calls of each rank in a case."""
    ranks = CASES[name][0]
    spawn(ranks, run, str(sample), folder, name)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def by_group_and_thread(calls):
    """The calls of one rank, by (group, its ranks, thread)."""
    parts = defaultdict(list)
    for call in calls:
        rest = dict(call)
        key = (rest.pop("group"), tuple(rest.pop("ranks")), rest.pop("thread"))
        parts[key].append(rest)
    return parts


def check(calls_of_ranks):
    """Return the groups that threads other than the main one use on rank 0."""
    logs = [by_group_and_thread(calls) for calls in calls_of_ranks]
    for log in logs:
        for (group, ranks, thread), calls in log.items():
            where = f"{group} of ranks {ranks}, {thread} thread"
            for rank in ranks:
                assert logs[rank][group, ranks, thread] == calls, where
            assert all(call["contiguous"] for call in calls), where
    return {group for group, _, thread in logs[0] if thread != "main"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_call_the_same(sample, tmp_path, name):
    logs = logs_of(sample, tmp_path, name)
    assert len(logs[0]) > 100
    # DCP's thread uses the group of saves only
    assert len(check(logs)) == (name != "synchronous")


@pytest.mark.slow
def test_gradients_of_norms_are_summed_once(sample, tmp_path):
    """Of TP without FSDP: clipping, the optimizer and the guard find them whole."""
    calls = logs_of(sample, tmp_path, "tp")[0]
    of_norms = (["torch.float32 [64]"], ["torch.float32 [16]"])
    sums = [
        call
        for call in calls
        if call["operation"] == "all_reduce" and call["tensors"] in of_norms
    ]
    # in each of 4 steps: 4 norms of each of 2 blocks, and the last one
    assert len(sums) == 4 * (4 * 2 + 1)


def three_calls(folder):
    """Write three calls, the last one of a tensor that is not contiguous."""
    calls = []
    with Log(calls):
        dist.all_reduce(torch.zeros(2, 3))
        dist.all_reduce(torch.zeros(2))
        dist.broadcast(torch.zeros(3, 2).t(), 0)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(calls))


def test_a_wrong_order_is_noticed(tmp_path):
    spawn(2, three_calls, tmp_path)
    logs = [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(2)]
    assert [call["contiguous"] for call in logs[0]] == [True, True, False]
    good = [calls[:2] for calls in logs]
    assert check(good) == set()
    for first, second in (
        (logs[0], logs[1]),
        (good[0], good[1][::-1]),
        (good[0], good[1][:1]),
        (good[0], [{**good[1][0], "tensors": ["torch.float64 [2, 3]"]}, good[1][1]]),
    ):
        with pytest.raises(AssertionError, match="of ranks"):
            check([first, second])
