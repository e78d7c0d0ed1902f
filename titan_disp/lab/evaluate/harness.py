"""The interface to lm-evaluation-harness: builds tasks, loads their data, evaluates a
model, and prints repeated warnings once.

The tasks are built before a model is loaded, so that a wrong name or missing data is
reported at once.
"""

import gc
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from titan_disp.errors import ConfigError, counted, did_you_mean, reported
from titan_disp.lab.evaluate.compare import Row, Scores, scaled_values
from titan_disp.lab.export.saved import load_causal_lm, longest_sequence

# The batch size in place of "auto". With "auto", the harness searches for the largest
# batch until memory runs out, which would kill the process on a CPU.
CPU_BATCH = 8
SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")


@dataclass(frozen=True)
class Protocol:
    shots: Mapping[str, int]  # number of examples in the prompt of each task
    limit: int | None  # number of documents per task, from the first on; None means all
    # The dtype of the weights; "auto" means the dtype of the files.
    dtype: Literal["auto", "float16"] = "auto"


PAPER = {
    **dict.fromkeys(
        (
            "anli_r2",
            "lambada_openai",
            "openbookqa",
            "piqa",
            "truthfulqa_mc2",
            "winogrande",
        ),
        0,
    ),
    **dict.fromkeys(("arc_easy", "arc_challenge", "medmcqa", "mmlu"), 5),
}
"""The ten tasks of arXiv 2602.00217 and their numbers of few-shot examples.

The paper's text names the tasks. The rest follows the authors' released code
(github.com/ChenLiu-1996/LM-Dispersion). The numbers of examples are those of its
mid-training of Qwen3 (with GPT-2, one example in place of five). TruthfulQA is MC2
(the probability of the true answers). The metric is ``acc`` for all ten tasks;
results.json also has ``acc_norm`` if the harness computes it. The authors' code scores
200 documents per task (Qwen3) or 500 (GPT-2). Scoring all documents is our choice.
"""

PRETRAIN = {
    **dict.fromkeys(
        (
            "anli_r1",
            "anli_r2",
            "anli_r3",
            "hellaswag",
            "lambada_openai",
            "lambada_standard",
        ),
        0,
    ),
    **dict.fromkeys(("openbookqa", "piqa", "truthfulqa_mc2", "winogrande"), 0),
    **dict.fromkeys(("arc_challenge", "arc_easy", "mathqa", "mmlu", "medmcqa"), 5),
}
"""The tasks with which the authors' fork of TorchTitan evaluates a run of 156 B tokens
(eval/eval_hf.py at e894b93).

The fork uses the tags ``anli`` and ``lambada``, whose tasks are listed here. The task
``paloma_wikitext_103`` is left out, because it has only perplexities, which cannot be
compared document by document, and because its data set (allenai/paloma) requires an
agreement on the hub.
"""

PROTOCOLS = {
    "paper": Protocol(PAPER, limit=None),
    "authors-qwen3": Protocol(PAPER, limit=200),
    "authors-gpt2": Protocol(
        {task: min(shots, 1) for task, shots in PAPER.items()}, limit=500
    ),
    "authors-pretrain": Protocol(PRETRAIN, limit=200, dtype="float16"),
}
"""The values of --protocol.

``authors-…`` follow the authors' scripts (train_configs/authors/README.md).
"""


@dataclass(frozen=True)
class Suite:
    """The tasks of one evaluation.

    All models use the same objects, and therefore the same documents and prompts.
    """

    rows: tuple[Row, ...]
    items: list[Any]  # Task and Group objects of the harness
    manager: Any  # the harness's TaskManager


def build_suite(
    names: Sequence[str],
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    shots: Mapping[str, int] = PAPER,
) -> Suite:
    """Return the tasks with their data sets loaded.

    ``names`` are tasks, groups or tags of the harness; ``paper`` stands for the tasks
    in ``shots``. A prompt has ``num_fewshot`` examples, or else the number in
    ``shots``, or else the task's default. Tasks that fix 0 examples keep 0. If the
    Hugging Face hub does not answer, data comes only from its cache.

    Raises ConfigError if a task or its data does not exist, tasks overlap, or a task
    has no metric that can be compared.
    """
    from lm_eval.tasks import TaskManager

    if not names:
        raise ConfigError("--tasks is empty; expected paper, or names of tasks")
    if include_path is not None and not include_path.is_dir():
        raise ConfigError(
            f"--include-path {str(include_path)!r} is not a folder; expected one with "
            "*.yaml files"
        )
    manager = TaskManager(include_path=include_path and str(include_path))
    wanted: dict[str, None] = {}
    for name in names:
        if name == "paper":
            wanted |= dict.fromkeys(shots)
        else:
            wanted[name] = None
    for name in wanted:
        if name not in manager.all_tasks:
            hint = did_you_mean(
                name,
                ["paper", *manager.all_tasks],
                otherwise="; lm-eval ls tasks lists them",
                most=5,
            )
            raise ConfigError(f"lm-evaluation-harness has no task {name!r}{hint}")
    with _offline_if_unreachable() as reachable:
        loaded = _load(manager, list(wanted), reachable, include_path)
    items: dict[str, Any] = {}
    for by_type in loaded:
        groups = by_type["groups"]
        members = set().union(*(group.child_names for group in groups.values()))
        items |= {
            name: item
            for name, item in (groups | by_type["tasks"]).items()
            if name not in members
        }
    with reported("--tasks: name only one of them", ValueError):
        manager.load(list(items.values()))
    for name, item in items.items():
        examples = num_fewshot
        if examples is None:
            examples = shots.get(name)
        for task in manager.load(item)["tasks"].values():
            # A task with 0 fixes this number. TruthfulQA's prompt already has examples.
            if examples is not None and task.get_config("num_fewshot") != 0:
                task.set_config("num_fewshot", examples)
    rows = {row.name: row for row in chain.from_iterable(map(_rows, items.values()))}
    return Suite(tuple(rows.values()), list(items.values()), manager)


def _rows(item: Any) -> Iterator[Row]:
    """Yield the rows of a task or a group.

    A group that the harness does not average has a row for each member. Raises
    ConfigError if tasks lack the metric that their group averages.
    """
    from lm_eval.api.group import Group

    if not isinstance(item, Group):
        yield Row(item.task_name, _metrics(item)[0], (item.task_name,))
    elif not item.aggregate_metric_list:
        for member in item:
            yield from _rows(member)
    else:
        tasks = item.get_all_tasks()
        averaged = item.aggregate_metric_list[0]
        for task in tasks:
            if averaged.metric not in _metrics(task):
                raise ConfigError(
                    f"the group {item.name!r} averages {averaged.metric!r}, which "
                    f"{task.task_name!r} does not have as a mean over documents; name "
                    f"the group's tasks instead: {', '.join(item.child_names)}"
                )
        yield Row(
            item.name,
            averaged.metric,
            tuple(t.task_name for t in tasks),
            bool(averaged.weight_by_size),
        )


def _metrics(task: Any) -> list[str]:
    """Return the names of the metrics that can be compared: means over documents, the
    higher the better.

    Raises ConfigError if the task has none.
    """
    from lm_eval.api.metrics import mean

    better = task.higher_is_better()
    metrics = [
        name
        for name, aggregate in task.aggregation().items()
        if aggregate is mean and better[name]
    ]
    if not metrics:
        raise ConfigError(
            f"the task {task.task_name!r} has no metric that is a mean over documents "
            f"and better when it is higher (it has {', '.join(better)}), so it cannot "
            "compare models document by document; leave it out of --tasks"
        )
    return metrics


def _load(
    manager: Any, names: Sequence[str], reachable: bool, include_path: Path | None
) -> list[Any]:
    """Return the harness's dictionary of groups and tasks for each name.

    Raises ConfigError with all failures in one message, so that the user can download
    all missing data at once.
    """
    loaded = []
    failed = {}
    for name in names:
        try:
            loaded.append(manager.load(name))
        # datasets, its file readers, jinja2 and yaml raise errors of many types
        except Exception as error:
            failed[name] = error
    if not failed:
        return loaded
    lines = [
        f"{name}: {type(error).__name__}: {str(error).strip()}"
        for name, error in failed.items()
    ]
    message = "these tasks cannot be loaded:\n  " + "\n  ".join(lines)
    missing = [
        name
        for name, error in failed.items()
        if isinstance(error, (ConnectionError, ValueError))
    ]
    if missing and not reachable:
        argument = ""
        if include_path is not None:
            argument = f"include_path={str(include_path)!r}"
        message += (
            "\nThe Hugging Face hub does not answer here, and the data are not in its cache. On a machine with "
            "internet access, download them to a folder that this machine sees:\n  HF_HOME=DIR python -c "
            f'"from lm_eval.tasks import TaskManager; TaskManager({argument}).load({missing})"\n'
            "Then set HF_HOME=DIR and HF_HUB_OFFLINE=1 here"
        )
    raise ConfigError(message)


@contextmanager
def _offline_if_unreachable() -> Iterator[bool]:
    """Yield whether the Hugging Face hub answers, and stay offline in the context if it
    does not.

    Otherwise, each data set would wait 24 s for an answer.
    """
    import datasets
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    reachable = False
    if not any(before):
        # The error is from requests or httpx, depending on huggingface_hub's version.
        with suppress(Exception):
            reachable = (
                get_session().head(constants.ENDPOINT, timeout=5.0).status_code < 500
            )
    if not reachable:
        print(
            "the Hugging Face hub is offline or does not answer: data sets come from its cache",
            file=sys.stderr,
        )
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield reachable
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before


@dataclass(frozen=True)
class Settings:
    """The settings for all models of an evaluation."""

    limit: int | None  # number of documents per task, from the first on; None means all
    # "auto" means the largest batch that fits on a GPU, and CPU_BATCH on a CPU
    batch_size: int | Literal["auto"]
    device: str
    # The dtype of the weights; "auto" means the dtype of the files.
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    seed: int  # seed of the choice of examples, and of all other random choices
    tokenizer: str | None = None  # folder that replaces the model's tokenizer


@dataclass(frozen=True)
class Result:
    """The harness's results for one model."""

    # the harness's numbers, task configs and versions as JSON values, without documents
    harness: dict[str, Any]
    # for each document: task, doc_id, hashes of document and prompt, filter, metrics
    samples: list[dict[str, Any]]
    scores: dict[str, Scores]  # by the name of the row
    dtype: str  # of the weights


def run_model(folder: Path, suite: Suite, settings: Settings) -> Result:
    """Return the results of a Hugging Face causal language model on all tasks.

    The model's memory is freed afterwards. Raises ConfigError like ``load_causal_lm``,
    or if the tokenizer cannot be loaded.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import handle_non_serializable
    from transformers import AutoTokenizer

    on_cpu = torch.device(settings.device).type == "cpu"
    batch_size = settings.batch_size
    if on_cpu and batch_size == "auto":
        batch_size = CPU_BATCH
    with reported("--tokenizer: transformers cannot load it", OSError, ValueError):
        tokenizer = AutoTokenizer.from_pretrained(
            settings.tokenizer or folder, local_files_only=True
        )
    loaded = load_causal_lm(folder, settings.dtype).to(settings.device)
    model = HFLM(
        # The model is passed rather than its folder, because the harness would not report
        # missing weights.
        pretrained=loaded,
        # The harness would use all positions, also those that were never trained.
        max_length=longest_sequence(loaded.config),
        tokenizer=tokenizer,
        batch_size=batch_size,
    )
    dtype = str(model.model.dtype).removeprefix("torch.")
    try:
        results = simple_evaluate(
            model=model,
            tasks=suite.items,
            task_manager=suite.manager,
            limit=settings.limit,
            batch_size=batch_size,
            device=settings.device,
            # standard error of LAMBADA's perplexity; accuracies need no bootstrap
            bootstrap_iters=1000,
            **dict.fromkeys(SEEDS, settings.seed),
        )
    finally:
        del model, loaded
        gc.collect()
        torch.cuda.empty_cache()
    results = json.loads(json.dumps(results, default=handle_non_serializable))
    by_task = results.pop("samples")
    identity = ("doc_id", "doc_hash", "prompt_hash", "filter")
    samples = []
    for task, of_task in by_task.items():
        for sample in of_task:
            names = (*identity, *sample["metrics"])
            samples.append({"task": task, **{name: sample[name] for name in names}})
    return Result(
        results,
        samples,
        {row.name: _scores(row, results, by_task) for row in suite.rows},
        dtype,
    )


def _scores(
    row: Row, results: dict[str, Any], by_task: dict[str, list[dict[str, Any]]]
) -> Scores:
    """Return the scores of a row.

    If a task has several filters for a model's answer, the first filter is used.
    """
    first = by_task[row.tasks[0]][0]["filter"]
    values = [
        np.array([s[row.metric] for s in by_task[task] if s["filter"] == first], float)
        for task in row.tasks
    ]
    result = results["results"][row.name]
    error = result.get(f"{row.metric}_stderr,{first}")
    shots = {results["n-shot"][task] for task in row.tasks}
    if not isinstance(error, float):
        error = None  # the harness has "N/A" for a single document
    num_fewshot = "mixed"
    if len(shots) == 1:
        num_fewshot = shots.pop()
    return Scores(
        score=result[f"{row.metric},{first}"],
        standard_error=error,
        num_fewshot=num_fewshot,
        values=scaled_values(values, row.weight_by_size),
    )


@contextmanager
def warnings_once(name: str = "lm_eval") -> Iterator[None]:
    """Print to stderr only the first warning from each line of the source, and finally
    the number of repeated warnings.

    The harness repeats a warning for each of MMLU's 57 subjects of each model.
    """
    seen: Counter[tuple[str, int]] = Counter()

    def is_first(record: logging.LogRecord) -> bool:
        place = (record.pathname, record.lineno)
        seen[place] += 1
        return seen[place] == 1

    logger = logging.getLogger(name)
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.addFilter(is_first)
    before = logger.handlers, logger.propagate
    logger.handlers = [handler]
    logger.propagate = False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before
        if more := seen.total() - len(seen):
            print(
                f"{name} gave {counted(more, 'more warning')} of the same kinds",
                file=sys.stderr,
            )
