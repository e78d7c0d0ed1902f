"""The prefetch worker: a process of each rank, which starts before the process group."""

import json
import multiprocessing
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from itertools import islice

import pytest
import torch
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from tests.command_line import DEMO, ROOT, rank_environment
from tests.streams import loader, write_files
from titan_disp.data.listing import list_files
from titan_disp.data.options import StreamOptions
from titan_disp.data.prefetch import Worker
from titan_disp.data.tokenizer import Encoder, load_tokenizer, odd_texts
from titan_disp.errors import UserError
from titan_disp.run.reader import read_metrics

# A rank of the real trainer, which writes (process id, in ticks since the boot when it
# began) of its children: before the process group is made, and in the last step.
RANK = """
import json, multiprocessing, os, sys
import torch.distributed as dist
from titan_disp.run.lock import process_fields
from titan_disp.train import DispTrainer, main

def children():
    pids = [child.pid for child in multiprocessing.active_children()]
    return [(pid, process_fields(pid)[19]) for pid in pids]

def make_group(*args, **options):
    record["before the group"] = children()
    init_process_group(*args, **options)

class Recorder(DispTrainer):
    def train_step(self, data_iterator):
        super().train_step(data_iterator)
        record["in a step"] = children()

record = {}
init_process_group = dist.init_process_group
dist.init_process_group = make_group
main(trainer_class=Recorder)
print(json.dumps(record))
"""


def train(sample, run, *options):
    """Train the demo on one rank, and return the finished process."""
    words = (
        *("--job.config_file", DEMO, "--job.dump_folder", run),
        *("--model.hf_assets_path", f"{sample}/tokenizer"),
        *("--training.dataset_path", sample, "--training.seq_len", "32"),
        *("--training.global_batch_size", "8", "--lr_scheduler.warmup_steps", "0"),
        *("--model.overrides", "n_layers=1", "--condensation.interval", "0"),
        *("--metrics.log_freq", "1", "--checkpoint.interval", "100", *options),
    )
    return subprocess.run(
        [sys.executable, "-c", RANK, *map(str, words)],
        cwd=ROOT,
        env=rank_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_worker_is_older_than_the_process_group(sample, tmp_path):
    done = train(sample, tmp_path, "--training.steps", "2", "--stream.prefetch", "4")
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["in a step"] == record["before the group"]
    assert len(record["in a step"]) == 1
    assert list(read_metrics(tmp_path)) == [1, 2]


def early(stream):
    """Return a worker that has started without a stream, which then uses it."""
    worker = Worker(stream.options, stream.local_batch_size)
    stream.use(worker)
    return worker


def test_batches_of_an_early_worker(sample):
    files = list_files("c4", str(sample))
    how = {"seq_len": 100, "segments": True}
    plain = loader(files, sample, prefetch=0, **how)
    expected = list(islice(plain, 20))
    first = loader(files, sample, prefetch=4, **how)
    early(first)
    batches = list(islice(first, 12))
    first.close()
    second = loader(files, sample, prefetch=4, **how)
    early(second)
    second.load_state_dict(first.state_dict())
    batches += islice(second, 4)
    batches += islice(second, 4)  # a second iteration, in a worker of its own
    second.close()
    for (inputs, labels), (inputs_ahead, labels_ahead) in zip(
        expected, batches, strict=True
    ):
        assert torch.equal(labels, labels_ahead)
        for name, values in inputs.items():
            assert torch.equal(values, inputs_ahead[name])
    assert torch.equal(second.positions, plain.positions)
    assert sum(second.bytes_read.values()) > 0


@pytest.mark.parametrize(
    ("library", "fast"),  # gigatoken does not support the sample's model
    [("tokenizers", False), ("tokenizers", True), ("sentencepiece", False)],
)
def test_an_encoder_is_pickled(sample, hf_tokenizer, library, fast):
    """The copy treats text that spells a special token as text, too."""
    folder = hf_tokenizer if library == "tokenizers" else sample / "tokenizer"
    tokenizer = load_tokenizer(folder)
    encode = Encoder(tokenizer, str(folder), fast)
    copy = pickle.loads(pickle.dumps(encode))
    for text in (*odd_texts(tokenizer, 300), "<|endoftext|> </s> <unk>"):
        assert [*copy(text)] == [*encode(text)]


def test_an_error_in_an_early_worker(sample, tmp_path):
    damaged = write_files(tmp_path, [90])
    stream = loader(damaged, sample, prefetch=2)
    early(stream)
    for path in tmp_path.glob("*.json.gz"):
        path.write_bytes(b"this is no gzip")
    with pytest.raises(UserError, match=r"0\.json\.gz") as error:
        next(iter(stream))
    assert "Traceback" not in str(error.value)


def ended(child):
    child.join(20)
    return child.exitcode is not None


def test_a_worker_that_is_not_needed_ends(sample):
    """At once, if the trainer closes it, and soon after the rank is killed."""
    stream = loader(list_files("c4", str(sample)), sample, prefetch=2)
    worker = early(stream)
    (child,) = multiprocessing.active_children()
    start = time.monotonic()
    worker.close()
    del worker, stream
    assert ended(child)
    assert time.monotonic() - start < 4  # DataLoader waits 5 s before it kills


def idle_worker(pipe):
    worker = Worker(StreamOptions(prefetch=2), 2)
    (child,) = multiprocessing.active_children()
    pipe.send(child.pid)
    time.sleep(200)
    worker.close()


def test_a_waiting_worker_ends_with_its_rank():
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    rank = fork.Process(target=idle_worker, args=(there,))
    rank.start()
    pid = here.recv()
    worker = os.pidfd_open(pid)
    while len(os.listdir(f"/proc/{pid}/task")) == 1:  # it handles signals in a thread
        time.sleep(0.01)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.pidfd_send_signal(worker, number)  # as SLURM does before the end
    assert not select.select([worker], [], [], 1)[0]
    rank.kill()
    assert select.select([worker], [], [], 100)[0]
    os.close(worker)
    rank.join()


def test_a_tokenizer_that_is_not_ours(sample, hf_tokenizer, caplog):
    """The worker then starts at the first batch, as under TorchTitan's own trainer."""
    files = list_files("c4", str(sample))
    stream = loader(files, sample, prefetch=2)
    stream.tokenizer = HuggingFaceTokenizer(str(hf_tokenizer))
    early(stream)
    assert "HuggingFaceTokenizer is no tokenizer of titan-disp" in caplog.text
    inputs, _ = next(iter(stream))
    expected, _ = next(iter(loader(files, sample, prefetch=0)))
    assert torch.equal(inputs["input"], expected["input"])
    stream.close()
