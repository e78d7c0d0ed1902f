"""This module runs lm-evaluation-harness on one model."""

import gc
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from titan_disp.errors import counted
from titan_disp.lab.evaluate.compare import Scores, scaled_values
from titan_disp.lab.evaluate.tasks import Row, Suite
from titan_disp.lab.export.saved import load_causal_lm, longest_sequence

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CPU_BATCH = 8  # the harness searches for the largest batch until memory runs out, which kills the process on a CPU


@dataclass(frozen=True)
class Settings:
    """The settings for all models of an evaluation.

    Attributes:
        limit: number of first documents per task; None means all.
        batch_size: sequences per batch; "auto" means the largest that fits on a GPU, or 8 on a CPU.
        device: a device such as "cpu" or "cuda:0".
        dtype: dtype of the weights; "auto" means the saved one.
        seed: seed for the choice of examples, and for everything else that is random.
    """

    limit: int | None
    batch_size: int | Literal["auto"]
    device: str
    dtype: Dtype
    seed: int


@dataclass(frozen=True)
class Result:
    """The harness's results for one model.

    Attributes:
        harness: all numbers, task configs and versions as JSON values, without documents.
        samples: task, doc_id, hashes of document and prompt, filter and every metric of each document.
        scores: scores by row of the table.
        dtype: dtype of the weights.
    """

    harness: dict[str, Any]
    samples: list[dict[str, Any]]
    scores: dict[str, Scores]
    dtype: str


def run_model(folder: Path, suite: Suite, settings: Settings) -> Result:
    """Load a Hugging Face causal language model, run all tasks, and free it.

    Raises:
        ConfigError: Weights are missing or cannot be read.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import handle_non_serializable
    from transformers import AutoTokenizer

    on_cpu = torch.device(settings.device).type == "cpu"
    batch_size = CPU_BATCH if on_cpu and settings.batch_size == "auto" else settings.batch_size
    loaded = load_causal_lm(folder, settings.dtype).to(settings.device)
    model = HFLM(
        # This is the model rather than its name, because the harness does not report missing weights of a named model.
        pretrained=loaded,
        max_length=longest_sequence(loaded.config),  # the harness would use all positions, trained or not
        tokenizer=AutoTokenizer.from_pretrained(folder, local_files_only=True),
        batch_size=batch_size,
    )
    dtype = str(model.model.dtype).removeprefix("torch.")
    try:
        found = simple_evaluate(
            model=model,
            tasks=suite.items,
            task_manager=suite.manager,
            limit=settings.limit,
            batch_size=batch_size,
            device=settings.device,
            bootstrap_iters=1000,  # for LAMBADA's perplexity; accuracies have closed forms
            random_seed=settings.seed,
            numpy_random_seed=settings.seed,
            torch_random_seed=settings.seed,
            fewshot_random_seed=settings.seed,
        )
    finally:
        del model, loaded
        gc.collect()
        torch.cuda.empty_cache()
    found = json.loads(json.dumps(found, default=handle_non_serializable))
    by_task = found.pop("samples")
    samples = [_compact(task, sample) for task, of_task in by_task.items() for sample in of_task]
    return Result(found, samples, {row.name: _scores(row, found, by_task) for row in suite.rows}, dtype)


def _compact(task: str, sample: dict[str, Any]) -> dict[str, Any]:
    kept = ("doc_id", "doc_hash", "prompt_hash", "filter", *sample["metrics"])
    return {"task": task, **{name: sample[name] for name in kept}}


def _scores(row: Row, found: dict[str, Any], by_task: dict[str, list[dict[str, Any]]]) -> Scores:
    """Collect the scores of a row. If a task has several filters for a model's answer, the first one counts."""
    first = by_task[row.tasks[0]][0]["filter"]
    values = [np.array([s[row.metric] for s in by_task[task] if s["filter"] == first], float) for task in row.tasks]
    result = found["results"][row.name]
    error = result.get(f"{row.metric}_stderr,{first}")
    shots = {found["n-shot"][task] for task in row.tasks}
    return Scores(
        score=result[f"{row.metric},{first}"],
        standard_error=error if isinstance(error, float) else None,  # "N/A" for a single document
        num_fewshot=shots.pop() if len(shots) == 1 else "mixed",
        values=scaled_values(values, row.weight_by_size),
    )


# This module shows each warning of lm-evaluation-harness once, rather than for each of 57 subjects of each model.


class _FirstOfEach(logging.Filter):
    """Lets the first record of each line of code through, and counts the others."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        place = (record.pathname, record.lineno)
        self.seen[place] += 1
        return self.seen[place] == 1


@contextmanager
def warnings_once(name: str = "lm_eval") -> Iterator[None]:
    """Print the first warning of each line of code on stderr, and at the end the number of others."""
    logger, first = logging.getLogger(name), _FirstOfEach()
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.addFilter(first)
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before
        if more := sum(first.seen.values()) - len(first.seen):
            print(
                f"{name} gave {counted(more, 'more warning')} of the same kinds, for other tasks or models",
                file=sys.stderr,
            )
