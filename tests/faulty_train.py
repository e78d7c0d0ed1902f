"""``python -m tests.faulty_train``: the trainer with the faults that the environment
variable FAULTS asks for.

FAULTS="nan_loss:3@1,inf_gradient:5-9@0" makes the cross-entropy of rank 1 NaN at step
3, and gives rank 0 an infinite gradient at steps 5 to 9. The others: crash (an
exception), hang (the rank stops itself with SIGSTOP), freeze (it waits forever before
the step, as for a file system), kill (it kills itself with SIGKILL), kill_node
(torchrun's agent on its node as well), asked_to_stop (it
gets SIGUSR1), nospace (the file system is full from this step on), await_save (it waits
until its asynchronous save has ended), slow (the step takes SLOW seconds longer, by
default 0.5) and slow_save (so does the next save).

FAULTS_ONCE names a file that the first fault creates. Faults do not happen if it
exists. (freeze uses one such file per rank, so that every named rank freezes once.)
"""

import math
import os
import signal
import time
from concurrent.futures import wait
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor

from titan_disp.train import DispTrainer, main


def faults():
    for text in filter(None, os.environ.get("FAULTS", "").split(",")):
        name, _, where = text.partition(":")
        steps, _, rank = where.partition("@")
        first, _, last = steps.partition("-")
        yield name, range(int(first), int(last or first) + 1), int(rank)


def active(name, step):
    """Whether a fault is due at this step on this rank."""
    rank = int(os.environ.get("RANK", "0"))
    once = os.environ.get("FAULTS_ONCE")
    if not any(
        fault == name and step in steps and of == rank for fault, steps, of in faults()
    ):
        return False
    if once:
        file = Path(f"{once}.{rank}" if name == "freeze" else once)
        if file.exists():
            return False
        file.touch()
    return True


class FaultyTrainer(DispTrainer):
    def __init__(self, job_config):
        super().__init__(job_config)
        cross_entropy = self.loss_fn.cross_entropy

        def broken(logits, labels):
            ce = cross_entropy(logits, labels)
            return ce * math.nan if active("nan_loss", self.step) else ce

        self.loss_fn.cross_entropy = broken

    def forward_backward_step(self, **kwargs):
        loss = super().forward_backward_step(**kwargs)
        if active("inf_gradient", self.step):
            gradient = next(
                p.grad for p in self.model_parts[0].parameters() if p.grad is not None
            )
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.view(-1)[0] = torch.inf
        return loss

    def train_step(self, data_iterator):
        if active("crash", self.step):
            raise RuntimeError(f"crashed on purpose at step {self.step}")
        if active("kill_node", self.step):
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        for fault, number in {
            "hang": signal.SIGSTOP,
            "kill": signal.SIGKILL,
            "asked_to_stop": signal.SIGUSR1,
        }.items():
            if active(fault, self.step):
                os.kill(os.getpid(), number)
        if active("freeze", self.step):
            while True:
                time.sleep(1)
        if active("slow", self.step):
            time.sleep(float(os.environ.get("SLOW", "0.5")))
        if active("slow_save", self.step):
            FileSystem.create_stream = _slow
        if active("await_save", self.step):
            wait([self.checkpointer.save_future])
        if active("nospace", self.step):
            FileSystem.create_stream = _no_space
        super().train_step(data_iterator)


create_stream = FileSystem.create_stream


def _slow(self, path, mode):
    FileSystem.create_stream = create_stream  # only the first file of the save
    time.sleep(float(os.environ["SLOW"]))
    return create_stream(self, path, mode)


def _no_space(self, path, mode):
    raise OSError(28, "No space left on device", str(path))


if __name__ == "__main__":
    main(trainer_class=FaultyTrainer)
