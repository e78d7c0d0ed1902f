"""This module is the way to lm-evaluation-harness: it builds tasks, loads their data,
runs one model, and thins warnings.

The tasks are built before a model is loaded, so that a wrong name or missing data costs
nothing.
"""

import gc
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from titan_disp.errors import ConfigError, counted, did_you_mean, reported
from titan_disp.lab.evaluate.compare import Row, Scores, scaled_values
from titan_disp.lab.export.saved import load_causal_lm, longest_sequence

# the harness searches for the largest batch until memory runs out, which kills the
# process on a CPU
CPU_BATCH = 8
SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")


@dataclass(frozen=True)
class Protocol:
    shots: Mapping[str, int]  # examples in the prompt of each task
    limit: int | None  # first documents per task; None means all
    # The type of the weights; "auto" means the saved one.
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
(github.com/ChenLiu-1996/LM-Dispersion). Its mid-training of Qwen3 decides which tasks
have examples, and that they have five (with GPT-2, they have one). TruthfulQA is MC2
(the probability of the true answers). The metric is ``acc`` for all ten; results.json
also has ``acc_norm`` if the harness has it. The authors' code scores 200 documents per
task (Qwen3) or 500 (GPT-2). Scoring all documents is our choice.
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
"""The tasks by which the authors' fork of TorchTitan evaluates a run of 156 B tokens
(eval/eval_hf.py at e894b93).

Its ``anli`` and ``lambada`` are tags, written out here. Its ``paloma_wikitext_103`` is
left out: it has only perplexities, which cannot be compared document by document, and
its data set (allenai/paloma) asks for an agreement on the hub.
"""

PROTOCOLS = {
    "paper": Protocol(PAPER, limit=None),
    "authors-qwen3": Protocol(PAPER, limit=200),
    "authors-gpt2": Protocol(
        {task: min(shots, 1) for task, shots in PAPER.items()}, limit=500
    ),
    "authors-pretrain": Protocol(PRETRAIN, limit=200, dtype="float16"),
}
"""By name.

Those of the authors follow their scripts (train_configs/authors/README.md).
"""


@dataclass(frozen=True)
class Suite:
    """The tasks of one evaluation.

    All models use the same objects, and so the same documents and prompts.
    """

    rows: tuple[Row, ...]
    items: list[Any]  # the harness's Task and Group objects
    manager: Any


def build_suite(
    names: Sequence[str],
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    shots: Mapping[str, int] = PAPER,
) -> Suite:
    """Find the tasks and load their data sets.

    If the Hugging Face hub does not answer, only its cache is used.

    The names are those of the harness's tasks, groups or tags. ``paper`` stands for the
    tasks in ``shots``. A prompt has ``num_fewshot`` examples, or else the number in
    ``shots`` or the task's own, unless the task fixes their number. Raises ConfigError
    if a task or its data do not exist, tasks overlap, or a task has no metric that can
    be compared.
    """
    from lm_eval.tasks import TaskManager

    if not names:
        raise ConfigError("--tasks is empty; expected paper, or names of tasks")
    if include_path is not None and not include_path.is_dir():
        raise ConfigError(
            f"--include-path {str(include_path)!r} is not a folder; expected one with "
            "*.yaml files"
        )
    manager = TaskManager(
        include_path=None if include_path is None else str(include_path)
    )
    wanted: dict[str, None] = {}
    for name in names:
        wanted |= dict.fromkeys(shots if name == "paper" else [name])
    for name in wanted:
        if name not in manager.all_tasks:
            known = ["paper", *manager.all_tasks]
            hint = did_you_mean(
                name, known, otherwise="; lm-eval ls tasks lists them", most=5
            )
            raise ConfigError(f"lm-evaluation-harness has no task {name!r}{hint}")
    with _offline_if_unreachable() as reachable:
        built = _load(manager, list(wanted), reachable, include_path)
    items: dict[str, Any] = {}
    for loaded in built:  # without the members of groups
        inside = set().union(*(g.child_names for g in loaded["groups"].values()))
        items |= {
            name: item
            for name, item in (loaded["groups"] | loaded["tasks"]).items()
            if name not in inside
        }
    with reported("--tasks: name only one of them", ValueError):
        manager.load(list(items.values()))
    for name, item in items.items():
        examples = shots.get(name) if num_fewshot is None else num_fewshot
        for task in manager.load(item)["tasks"].values():
            # A task with 0 fixes the number: TruthfulQA's prompt has its own examples.
            if examples is not None and task.get_config("num_fewshot") != 0:
                task.set_config("num_fewshot", examples)
    rows = {row.name: row for item in items.values() for row in _rows(item)}
    return Suite(tuple(rows.values()), list(items.values()), manager)


def _rows(item: Any) -> Iterator[Row]:
    """Yield the rows of a task or a group.

    A group without an average has a row for each member.
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
                    f"its tasks instead: {', '.join(item.child_names)}"
                )
        yield Row(
            item.name,
            averaged.metric,
            tuple(t.task_name for t in tasks),
            bool(averaged.weight_by_size),
        )


def _metrics(task: Any) -> list[str]:
    """Return the metrics that are means over documents, the higher the better: only
    these can be compared.
    """
    from lm_eval.api.metrics import mean

    better = task.higher_is_better()
    found = [
        name
        for name, aggregate in task.aggregation().items()
        if aggregate is mean and better[name]
    ]
    if not found:
        raise ConfigError(
            f"the task {task.task_name!r} has no metric that is a mean over documents "
            f"and better when it is higher (it has {', '.join(better)}), so it cannot "
            "compare models document by document; leave it out of --tasks"
        )
    return found


def _load(
    manager: Any, names: Sequence[str], reachable: bool, include_path: Path | None
) -> list[Any]:
    """Load each name.

    The message lists all failures at once, so that one download can fetch all data.
    """
    loaded = []
    failed = {}
    for name in names:
        try:
            loaded.append(manager.load(name))
        # datasets, its file readers, jinja2 and yaml each raise their own
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
        where = "" if include_path is None else f"include_path={str(include_path)!r}"
        message += (
            "\nThe Hugging Face hub does not answer here, and the data are not in its cache. On a machine with "
            "internet access, download them to a folder that this machine sees:\n  HF_HOME=DIR python -c "
            f'"from lm_eval.tasks import TaskManager; TaskManager({where}).load({missing})"\n'
            "Then set HF_HOME=DIR and HF_HUB_OFFLINE=1 here"
        )
    raise ConfigError(message)


@contextmanager
def _offline_if_unreachable() -> Iterator[bool]:
    """Ask the hub once, and go offline if it does not answer.

    Otherwise each data set would wait 24 s for it.
    """
    import datasets
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    reachable = False
    if not any(before):
        # The error is that of requests, httpx or httpx2, by huggingface_hub's version.
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

    limit: int | None  # first documents per task; None means all
    # "auto" means the largest that fits on a GPU, or CPU_BATCH
    batch_size: int | Literal["auto"]
    device: str
    # The type of the weights; "auto" means the saved one.
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    seed: int  # for the choice of examples, and for everything else that is random
    tokenizer: str | None = None  # folder that replaces the model's own


@dataclass(frozen=True)
class Result:
    """The harness's results for one model."""

    # all numbers, task configs and versions as JSON values, without documents
    harness: dict[str, Any]
    # task, doc_id, hashes of document and prompt, filter, metrics of each document
    samples: list[dict[str, Any]]
    scores: dict[str, Scores]  # by row of the table
    dtype: str  # of the weights


def run_model(folder: Path, suite: Suite, settings: Settings) -> Result:
    """Load a Hugging Face causal language model, run all tasks, and free it.

    Raises ConfigError as ``load_causal_lm``.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import handle_non_serializable
    from transformers import AutoTokenizer

    on_cpu = torch.device(settings.device).type == "cpu"
    batch_size = (
        CPU_BATCH if on_cpu and settings.batch_size == "auto" else settings.batch_size
    )
    with reported("--tokenizer: transformers cannot load it", OSError, ValueError):
        tokenizer = AutoTokenizer.from_pretrained(
            settings.tokenizer or folder, local_files_only=True
        )
    loaded = load_causal_lm(folder, settings.dtype).to(settings.device)
    model = HFLM(
        # This is the model rather than its name, because the harness does not report
        # missing weights of a named model.
        pretrained=loaded,
        # the harness would use all positions, trained or not
        max_length=longest_sequence(loaded.config),
        tokenizer=tokenizer,
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
            # for LAMBADA's perplexity; accuracies have closed forms
            bootstrap_iters=1000,
            **dict.fromkeys(SEEDS, settings.seed),
        )
    finally:
        del model, loaded
        gc.collect()
        torch.cuda.empty_cache()
    found = json.loads(json.dumps(found, default=handle_non_serializable))
    by_task = found.pop("samples")
    kept = ("doc_id", "doc_hash", "prompt_hash", "filter")
    samples = []
    for task, of_task in by_task.items():
        for sample in of_task:
            names = (*kept, *sample["metrics"])
            samples.append({"task": task, **{name: sample[name] for name in names}})
    return Result(
        found,
        samples,
        {row.name: _scores(row, found, by_task) for row in suite.rows},
        dtype,
    )


def _scores(
    row: Row, found: dict[str, Any], by_task: dict[str, list[dict[str, Any]]]
) -> Scores:
    """Collect the scores of a row.

    If a task has several filters for a model's answer, the first one counts.
    """
    first = by_task[row.tasks[0]][0]["filter"]
    values = [
        np.array([s[row.metric] for s in by_task[task] if s["filter"] == first], float)
        for task in row.tasks
    ]
    result = found["results"][row.name]
    error = result.get(f"{row.metric}_stderr,{first}")
    shots = {found["n-shot"][task] for task in row.tasks}
    return Scores(
        score=result[f"{row.metric},{first}"],
        # "N/A" for a single document
        standard_error=error if isinstance(error, float) else None,
        num_fewshot=shots.pop() if len(shots) == 1 else "mixed",
        values=scaled_values(values, row.weight_by_size),
    )


@contextmanager
def warnings_once(name: str = "lm_eval") -> Iterator[None]:
    """Print the first warning of each line of code on stderr, and at the end the number
    of others.

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
