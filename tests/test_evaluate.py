"""titan-disp evaluate against plain transformers on the same documents, and what it
refuses before a model is loaded.
"""

import json
import logging
import re
import shutil
import sys
import time
import weakref
from functools import cache, partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import stats

from tests.command_line import ROOT, typed
from tests.markdown import table
from tests.pages import blocks
from tests.saved_run import random_model, save_run
from titan_disp.config.command_options import EvaluateOptions
from titan_disp.errors import ConfigError
from titan_disp.lab.evaluate import harness
from titan_disp.lab.evaluate.compare import Scores
from titan_disp.lab.evaluate.evaluation import evaluate
from titan_disp.lab.evaluate.harness import (
    PROTOCOLS,
    Result,
    build_suite,
    warnings_once,
)

pytest.importorskip("lm_eval")
import datasets  # noqa: E402
import lm_eval.tasks  # noqa: E402
from huggingface_hub import constants  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

ACCURACY = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
PERPLEXITY = {
    "metric": "perplexity",
    "aggregation": "perplexity",
    "higher_is_better": False,
}


@cache
def load_plainly(folder: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(
        folder
    ).eval(), AutoTokenizer.from_pretrained(folder)


def log_probabilities(
    folder: Path, context: str, continuation: str
) -> tuple[float, bool]:
    """A continuation's log-likelihood by transformers alone, and whether each token, a
    byte, is the most likely one.
    """
    model, tokenizer = load_plainly(folder)
    tokens = torch.tensor(tokenizer(context + continuation)["input_ids"])
    n = len(tokenizer(continuation)["input_ids"])
    with torch.no_grad():
        log_p = model(tokens[None]).logits[0, -n - 1 : -1].double().log_softmax(-1)
    return log_p.gather(1, tokens[-n:, None]).sum().item(), bool(
        (log_p.argmax(-1) == tokens[-n:]).all()
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A Qwen3 as a/hf and a GPT-2 as b/hf.

    Their random weights are large: answers depend on the question.
    """
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    vocabulary = {
        token: i for i, token in enumerate([*sorted(ByteLevel.alphabet()), "<|end|>"])
    }
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    common = {"vocab_size": 257, "initializer_range": 0.5, "hidden_size": 16}
    common |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
    }
    qwen3 = Qwen3Config(
        **common,
        intermediate_size=32,
        num_key_value_heads=1,
        head_dim=8,
        trained_seq_len=9999,
    )
    # of 4096 positions; the Qwen3 names more than there are
    gpt2 = GPT2Config(**common, trained_seq_len=2048)
    root = tmp_path_factory.mktemp("models")
    for name, model in (("a", Qwen3ForCausalLM(qwen3)), ("b", GPT2LMHeadModel(gpt2))):
        model.save_pretrained(root / name / "hf")
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<|end|>"
        ).save_pretrained(root / name / "hf")
    return root / "a/hf", root / "b/hf"


@pytest.fixture(scope="module")
def own(tmp_path_factory, models):
    """Task files for local documents: "choice" among 4, "word" (like LAMBADA), and
    "both", their average.
    """
    folder = tmp_path_factory.mktemp("tasks")
    rng = np.random.default_rng(0)
    words = ["tree", "stone", "a river", "sky", "old house", "bread"]
    choice = [
        {
            "text": f"What is number {i}?",
            "choices": rng.permutation(words)[:4].tolist(),
            "last": int(rng.integers(4)),
        }
        for i in range(20)
    ]
    texts = [
        f"{rng.integers(1000)} {rng.permutation(words)[0]}"[:-1] for _ in range(12)
    ]
    # Every other document ends with the first model's answer, so that this model knows
    # some of them.
    likely = [
        next(
            (
                c
                for c in map(chr, range(32, 127))
                if log_probabilities(models[0], t, c)[1]
            ),
            "e",
        )
        for t in texts
    ]
    word = [
        {"text": text, "last": c if i % 2 else "e"}
        for i, (text, c) in enumerate(zip(texts, likely, strict=True))
    ]
    for name, documents in (("choice", choice), ("word", word)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, documents)))
    common = {
        "dataset_path": "json",
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{last}}",
    }
    of_choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}
    of_word = {"output_type": "loglikelihood"}
    for name, file, more, metrics in (
        ("choice", "choice", of_choice, [ACCURACY, ACCURACY | {"metric": "acc_norm"}]),
        ("word", "word", of_word, [PERPLEXITY, ACCURACY]),
        ("perplexity_alone", "word", of_word, [PERPLEXITY]),
        ("no_file", "nowhere", of_word, [ACCURACY]),
    ):
        data = {
            "dataset_kwargs": {"data_files": {"test": str(folder / f"{file}.jsonl")}}
        }
        (folder / f"{name}.yaml").write_text(
            json.dumps(common | more | data | {"task": name, "metric_list": metrics})
        )
    average = [{"metric": "acc", "weight_by_size": False}]
    group = {
        "group": "both",
        "task": ["choice", "word"],
        "aggregate_metric_list": average,
    }
    (folder / "both.yaml").write_text(json.dumps(group))
    return folder


TaskManager = lm_eval.tasks.TaskManager
TASKS = Path(lm_eval.tasks.__file__).parent


@pytest.fixture(scope="module")
def manager(own):
    some = [
        TASKS / name
        for name in ("anli", "arc", "mmlu", "openbookqa", "piqa", "truthfulqa")
    ]
    return TaskManager(include_path=[str(own), *map(str, some)], include_defaults=False)


@pytest.fixture(autouse=True)
def include_paths(manager, monkeypatch):
    asked = []
    monkeypatch.setattr(
        lm_eval.tasks,
        "TaskManager",
        lambda include_path: asked.append(include_path) or manager,
    )
    return asked


def documents(own, name):
    return [
        json.loads(line) for line in (own / f"{name}.jsonl").read_text().splitlines()
    ]


def by_hand(folder, own):
    choices = documents(own, "choice")
    likely = [
        [log_probabilities(folder, d["text"], f" {c}")[0] for c in d["choices"]]
        for d in choices
    ]
    per_letter = np.divide(likely, [[len(c) for c in d["choices"]] for d in choices])
    right = [d["last"] for d in choices]
    return {
        "choice": np.equal(np.argmax(likely, 1), right),
        "choice, normalised": np.equal(np.argmax(per_letter, 1), right),
        "word": np.array(
            [
                log_probabilities(folder, d["text"], d["last"])[1]
                for d in documents(own, "word")
            ]
        ),
    }


def samples_of(out, model):
    samples = [
        json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()
    ]
    return [sample for sample in samples if sample["model"] == model]


def test_the_task_of_the_page(models, tmp_path, monkeypatch):
    """docs/export-evaluate.md: its task, of a local file, is scored."""
    page = (ROOT / "docs" / "export-evaluate.md").read_text()
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "capitals.yaml").write_text(*blocks(page, "yaml"))
    (tmp_path / "capitals.jsonl").write_text(*blocks(page, "json"))
    monkeypatch.setattr(
        lm_eval.tasks, "TaskManager", partial(TaskManager, include_defaults=False)
    )
    monkeypatch.chdir(tmp_path)
    (task,) = evaluate(
        EvaluateOptions(
            models, ["capitals"], include_path=Path("tasks"), out=tmp_path / "out"
        )
    ).tasks
    assert (task.task, task.metric, task.documents) == ("capitals", "acc", 2)


def test_end_to_end_against_plain_transformers(
    models, own, tmp_path, include_paths, monkeypatch, capsys
):
    out = tmp_path / "new" / "folder"
    loaded = []
    load = harness.load_causal_lm

    def load_alone(*args):
        assert all(model() is None for model in loaded), (
            "a model is still in memory when the next is loaded"
        )
        model = load(*args)
        loaded.append(weakref.ref(model))
        return model

    lengths = []
    init = HFLM.__init__
    monkeypatch.setattr(
        HFLM,
        "__init__",
        lambda lm, **own: lengths.append(own["max_length"]) or init(lm, **own),
    )
    monkeypatch.setattr(harness, "load_causal_lm", load_alone)
    options = (
        "--tasks",
        "choice",
        "word",
        "--include-path",
        own,
        "--batch-size",
        "3",
        "--out",
        out,
    )
    assert typed(monkeypatch, "evaluate", *models, *options) == 0
    assert (len(loaded), include_paths, lengths) == (2, [str(own)], [4096, 2048])

    a, b = (by_hand(folder, own) for folder in models)
    # Otherwise the test would show nothing.
    assert 0 < a["choice"].mean() != b["choice"].mean()
    assert 0 < a["word"].mean() < 1
    found = json.loads((out / "results.json").read_text())
    comparison = found["comparison"]
    for name, expected in (("a-hf", a), ("b-hf", b)):
        results = found["models"][name]["harness"]["results"]
        assert (
            results["choice"]["acc_norm,none"] == expected["choice, normalised"].mean()
        )
        assert results["word"]["perplexity,none"] > 1
        for task in comparison["tasks"]:
            right = expected[task["task"]]
            assert (task["scores"][name], task["documents"]) == (
                right.mean(),
                len(right),
            )
            assert task["standard_errors"][name] == pytest.approx(stats.sem(right))
        assert comparison["mean"]["scores"][name] == pytest.approx(
            (expected["choice"].mean() + expected["word"].mean()) / 2
        )
    assert [s["acc"] for s in samples_of(out, "b-hf") if s["task"] == "choice"] == b[
        "choice"
    ].tolist()
    for task in comparison["tasks"]:
        test = stats.ttest_rel(b[task["task"]] * 1.0, a[task["task"]] * 1.0)
        assert task["differences"]["b-hf"]["p_value"] == pytest.approx(test.pvalue)

    assert found["settings"]["batch_size"] == 3
    assert found["versions"].keys() == {
        "titan-disp",
        "lm_eval",
        "transformers",
        "torch",
        "datasets",
    }
    markdown = (out / "table.md").read_text()
    assert markdown.strip() in capsys.readouterr().out
    assert table(markdown)[1][:6] == [
        "choice",
        "acc",
        "0",
        "20",
        *(f"{m['choice'].mean():.4f}" for m in (a, b)),
    ]
    with pytest.raises(ConfigError, match="already holds an evaluation"):
        evaluate(EvaluateOptions(models, ["word"], include_path=own, out=out))


@pytest.mark.slow
def test_group_whose_tasks_count_alike(models, own, tmp_path):
    a = by_hand(models[0], own)
    of_one = {"models": models[:1], "include_path": own}
    comparison = evaluate(
        EvaluateOptions(tasks=["both"], out=tmp_path / "all", **of_one)
    )
    (task,) = comparison.tasks
    expected = pytest.approx((a["choice"].mean() + a["word"].mean()) / 2)
    assert (task.task, task.documents, task.scores["hf"]) == ("both", 32, expected)
    assert comparison.mean.differences == {}
    assert "mean rank" not in (tmp_path / "all/table.md").read_text()
    (task,) = evaluate(
        EvaluateOptions(tasks=["choice"], limit=1, out=tmp_path / "one", **of_one)
    ).tasks
    assert (task.documents, task.standard_errors) == (1, {"hf": None})


CHOICES = {"text": ["red", "a green one"], "label": ["A", "B"]}
HUB = {
    "facebook/anli": {"premise": "It rains.", "hypothesis": "It is wet.", "label": 0},
    "EleutherAI/lambada_openai": {"text": "she said that she knew"},
    "allenai/openbookqa": {
        "question_stem": "Grass is",
        "choices": CHOICES,
        "answerKey": "B",
    },
    "baber/piqa": {
        "goal": "To eat",
        "sol1": "use a fork",
        "sol2": "use a rock",
        "label": 0,
    },
    "truthfulqa/truthful_qa": {
        "question": "Is it so?",
        "mc1_targets": {"choices": ["no", "yes"], "labels": [1, 0]},
        "mc2_targets": {"choices": ["no", "hardly", "yes"], "labels": [1, 1, 0]},
    },
    "allenai/winogrande": {
        "sentence": "The _ is big.",
        "option1": "cup",
        "option2": "house",
        "answer": "2",
    },
    "allenai/ai2_arc": {"question": "Ice is", "choices": CHOICES, "answerKey": "A"},
    "openlifescienceai/medmcqa": {
        "question": "Which?",
        "opa": "w",
        "opb": "x",
        "opc": "y",
        "opd": "z",
        "cop": 2,
    },
    "Rowan/hellaswag": {
        "ctx_a": "It",
        "ctx_b": "is",
        "endings": ["so", "not"],
        "activity_label": "x",
        "label": "1",
    },
    "cimec/lambada": {"text": "she said that she knew"},
    "regisss/math_qa": {
        "Problem": "1 + 1",
        "options": "a ) 1 , b ) 2 , c ) 3 , d ) 4 , e ) 5",
        "correct": "b",
    },
    "cais/mmlu": {
        "question": "How many?",
        "subject": "s",
        "choices": ["0", "1", "2", "3"],
        "answer": 3,
    },
}


# Without examples
PAPER = (
    "anli_r2",
    "lambada_openai",
    "openbookqa",
    "piqa",
    "truthfulqa_mc2",
    "winogrande",
)
PAPER += ("arc_easy", "arc_challenge", "medmcqa", "mmlu")
PRETRAIN = (
    "anli_r1",
    "anli_r2",
    "anli_r3",
    "hellaswag",
    "lambada_openai",
    "lambada_standard",
    *PAPER[2:6],
)
PRETRAIN += ("arc_challenge", "arc_easy", "mathqa", "mmlu", "medmcqa")


@cache
def small_hub(path, name=None, **_):
    splits = [
        "validation",
        *(
            part + of
            for part in ("train", "dev", "test")
            for of in ("", "_r1", "_r2", "_r3")
        ),
    ]
    return datasets.DatasetDict(
        dict.fromkeys(splits, datasets.Dataset.from_list([HUB[path]] * 6))
    )


@pytest.mark.night
@pytest.mark.parametrize(
    ("protocol", "tasks", "few"),
    [("paper", PAPER, 4), ("authors-pretrain", PRETRAIN, 5)],
)
def test_tasks_of_the_protocols(protocol, tasks, few, monkeypatch):
    """All are in the installed harness, with the numbers of examples of
    midtrain_qwen3.py or eval_hf.py, and its metrics.
    """
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets, "load_dataset", small_hub)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", TaskManager)
    suite = build_suite(["paper"], shots=PROTOCOLS[protocol].shots)
    assert [(row.name, row.metric) for row in suite.rows] == [
        (name, "acc") for name in tasks
    ]
    assert [len(row.tasks) for row in suite.rows] == [
        57 if name == "mmlu" else 1 for name in tasks
    ]
    tasks_of = [suite.manager.load(item)["tasks"].values() for item in suite.items]
    examples = [
        {task.get_config("num_fewshot") for task in of_item} for of_item in tasks_of
    ]
    assert examples == [{0}] * (len(tasks) - few) + [{5}] * few


def test_numbers_of_examples_and_protocols(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets, "load_dataset", small_hub)
    for options, expected in (
        ({}, [0, 5, 0]),
        ({"num_fewshot": 2}, [2, 2, 0]),
        ({"num_fewshot": 0}, [0, 0, 0]),
        ({"shots": PROTOCOLS["authors-qwen3"].shots}, [0, 5, 0]),
        ({"shots": PROTOCOLS["authors-gpt2"].shots}, [0, 1, 0]),
    ):
        items = build_suite(["anli_r2", "arc_easy", "truthfulqa_mc2"], **options).items
        assert [item.get_config("num_fewshot") for item in items] == expected


def test_without_internet_all_missing_data_are_named_at_once(
    models, tmp_path, monkeypatch
):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        harness,
        "run_model",
        lambda *_: pytest.fail("a model ran before its data were there"),
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    start = time.monotonic()
    with pytest.raises(ConfigError) as error:
        evaluate(
            EvaluateOptions(
                models, ["openbookqa", "mmlu", "piqa"], out=tmp_path / "out"
            )
        )
    # Repeated requests would take 24 s for each data set
    assert time.monotonic() - start < 40
    for word in (
        "allenai/openbookqa",
        "cais/mmlu",
        "baber/piqa",
        "HF_HOME",
        "HF_HUB_OFFLINE=1",
        "TaskManager",
    ):
        assert word in str(error.value)
    assert (constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE) == (False, False)


def test_tasks_are_refused(own, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for names, message in (
        (["arc_chalenge"], "no task 'arc_chalenge' \\(did you mean arc_challenge"),
        ([], "--tasks is empty"),
        (["papers"], "did you mean paper[ ?]"),
        (["no_file"], "nowhere.jsonl"),
        (["perplexity_alone"], "has no metric that is a mean over documents"),
        (["both", "choice"], "name only one of them: .*Duplicate task 'choice'"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            build_suite(names, own)
        assert "TaskManager" not in str(error.value), "a fetch does not help here"
    with pytest.raises(ConfigError, match="is not a folder"):
        build_suite(["word"], own / "no")


def test_arguments_and_models_are_refused(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    Path("file").touch()
    Path("empty").mkdir()
    a, b = models
    for changed, message in (
        ({"limit": 0}, "--limit is 0"),
        ({"num_fewshot": -1}, "--num-fewshot is -1"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"device": "gpu"}, "--device 'gpu' cannot be used"),
        ({"out": Path("file/inside")}, "is not a writable folder"),
        ({"models": []}, "no model is given"),
        ({"models": [a, "empty"]}, "'empty' is not a run's folder"),
        ({"models": [f"off={a}", f"on={a}"]}, "given twice"),
        ({"models": [f"off={a}", f"off={b}"]}, "two conditions have the same name"),
    ):
        with pytest.raises(ConfigError, match=message):
            evaluate(
                EvaluateOptions(
                    **{"models": models, "tasks": ["word"], "out": Path("out")}
                    | changed
                )
            )
    assert not Path("out").exists()
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", None)
    with pytest.raises(ConfigError, match=r"pip install lm-eval accelerate"):
        evaluate(EvaluateOptions(models))


# the documents answered rightly
RIGHT = {"a": [1.0, 0, 1, 0, 0], "b": [1.0, 1, 1, 0, 1], "c": [0.0, 1, 1, 0, 1]}


@pytest.fixture
def answers(monkeypatch):
    asked = []

    def run_model(folder, suite, settings):
        assert (folder / "config.json").is_file()
        asked.append(folder)
        values = np.array(RIGHT.get(folder.parent.name, RIGHT["a"]))
        samples = [{"task": "word", "acc": value} for value in values]
        dtype = "bfloat16" if folder.parent.name == "c" else "float32"
        return Result(
            {}, samples, {"word": Scores(values.mean(), None, 0, values)}, dtype
        )

    monkeypatch.setattr(harness, "run_model", run_model)
    return asked


def test_seeds_of_a_condition_against_one_model(models, own, answers, tmp_path, capsys):
    third = tmp_path / "c" / "hf"
    out = tmp_path / "out"
    shutil.copytree(models[1], third)
    given = [models[0], f"pair={models[1]},{third}"]
    (task,) = evaluate(
        EvaluateOptions(given, ["word"], include_path=own, out=out)
    ).tasks
    assert answers == [*models, third]
    found = json.loads((out / "results.json").read_text())
    assert found["conditions"] == {"a-hf": ["a-hf"], "pair": ["b-hf", "c-hf"]}
    assert [one["dtype"] for one in found["models"].values()] == [
        "float32",
        "float32",
        "bfloat16",
    ]
    assert [s["acc"] for s in samples_of(out, "c-hf")] == RIGHT["c"]
    assert task.scores == {"a-hf": 0.4, "pair": pytest.approx((0.8 + 0.6) / 2)}
    markdown = (out / "table.md").read_text()
    told = capsys.readouterr().err
    # a single seed has no uncertainty
    assert table(markdown)[0][4:] == ["a-hf", "pair (2 seeds)", "pair − a-hf"]
    assert (
        "dtypes of the models differ (a-hf float32, b-hf float32, c-hf bfloat16)"
        in markdown
    )
    assert "model 1 of 3: a-hf: " in told
    assert re.search(r"model 3 of 3, about \d+ s left: c-hf: ", told)


# an hour of one rank
RAN = {
    "step": 30,
    "time": 9.0,
    "tokens": 7200,
    "tps": 2.0,
    "ce": 5.0,
    "dispersion": -0.5,
}


def test_a_run_is_exported_for_its_evaluation(own, answers, sample, tmp_path):
    run = save_run(tmp_path / "run", random_model(), sample / "tokenizer")
    (run / "metrics.jsonl").write_text(json.dumps(RAN) + "\n")
    (run / "environment.json").write_text('{"accelerators": ["H100"]}')
    for one, out in ((run, "out"), (run / "30", "again")):
        found = evaluate(
            EvaluateOptions([one], ["word"], include_path=own, out=tmp_path / out)
        )
        assert list(found.tasks[0].scores) == ["run-step-30"]
        (run / "checkpoint/step-40").mkdir(exist_ok=True)
        (run / "checkpoint/step-40/.metadata").write_text(
            "a newer one, which is damaged"
        )
    assert [folder.name for folder in answers] == ["model"] * 2
    shown = re.sub(" +", " ", (tmp_path / "out/table.md").read_text())
    assert "| GPU-hours | run | 1 | the run's folder |" in shown
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert written == ["results.json", "samples.jsonl", "table.csv", "table.md"]


def test_runs_with_equal_seeds_are_pairs(own, answers, sample, tmp_path):
    def trained(name, seed):
        seeds = ("--debug.seed", str(seed), "--stream.seed", str(seed))
        tokenizer = sample / "tokenizer"
        return save_run(tmp_path / name, random_model(), tokenizer, *seeds)

    off = f"off={trained('off-1', 1)},{trained('off-2', 2)}"
    twins = f"twins={trained('x', 1)},{trained('y', 1)}"
    on = f"on={trained('on-1', 2)},{trained('on-2', 1)}"
    options = {"include_path": own, "out": tmp_path / "out", "latex": True}
    found = evaluate(EvaluateOptions([off, on, twins], ["word"], **options))
    pairs = {name: d.pairs for name, d in found.mean.over_seeds.items()}
    # One of the twins has the seed of no other run of its condition.
    assert pairs == {"on": 2, "twins": 1}
    assert "over 2 pairs of seeds" in (tmp_path / "out/table.md").read_text()
    assert r"\end{tabular}" in (tmp_path / "out/table.tex").read_text()


def test_a_tokenizer_replaces_each_models_own(models, own, sample, tmp_path):
    """The advice of a run whose tokenizer is missing."""
    gone = tmp_path / "gone"
    run = save_run(tmp_path / "run", random_model(), gone)
    one = {"tasks": ["word"], "include_path": own, "limit": 2}
    with pytest.raises(ConfigError, match="name the folder with --tokenizer DIR"):
        evaluate(EvaluateOptions([run], out=tmp_path / "out", **one))
    one["tokenizer"] = sample / "tokenizer"
    evaluate(EvaluateOptions([run], out=tmp_path / "out", **one))
    bare = shutil.copytree(models[0], tmp_path / "bare")
    for file in bare.glob("*token*"):
        file.unlink()
    one["tokenizer"] = models[0]
    (task,) = evaluate(EvaluateOptions([bare], out=tmp_path / "hf", **one)).tasks
    assert task.documents == 2


def test_warnings_of_the_harness_come_once(capsys):
    logger = logging.getLogger("lm_eval.some.module")
    before = logging.getLogger("lm_eval").handlers
    with warnings_once():
        for task in ("one", "two", "three"):
            logger.warning("no aggregation for %s", task)
            logger.info("about %s", task)
        logger.warning("another")
    *first, last = capsys.readouterr().err.splitlines()
    assert (first, "2 more warnings" in last) == (
        ["no aggregation for one", "another"],
        True,
    )
    assert logging.getLogger("lm_eval").handlers is before


def test_a_protocol_limits_the_documents(models, own, tmp_path, monkeypatch):
    given = []
    build = mock.Mock(wraps=build_suite)
    monkeypatch.setattr(harness, "build_suite", build)
    monkeypatch.setattr(
        harness,
        "run_model",
        lambda folder, suite, settings: given.append(settings) or 1 / 0,
    )
    pretrain = {"protocol": "authors-pretrain"}
    for more in (
        {"protocol": "authors-gpt2"},
        {"limit": 7} | pretrain,
        {"dtype": "float32"} | pretrain,
        {},
    ):
        with pytest.raises(ZeroDivisionError):
            evaluate(
                EvaluateOptions(
                    models[:1], ["word"], include_path=own, out=tmp_path / "out", **more
                )
            )
    assert [one.limit for one in given] == [500, 7, 200, None]
    assert [one.dtype for one in given] == ["auto", "float16", "float32", "auto"]
    shots = [
        PROTOCOLS[name].shots
        for name in ("authors-gpt2", *["authors-pretrain"] * 2, "paper")
    ]
    assert [call.args[3] for call in build.call_args_list] == shots


def test_a_model_that_fails_leaves_the_results_of_those_before(models, own, tmp_path):
    broken = shutil.copytree(models[1], tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"n_layer": 3}))
    # transformers would initialize them randomly
    with pytest.raises(ConfigError, match="it lacks 12 weights"):
        evaluate(
            EvaluateOptions(
                [models[0], broken], ["word"], include_path=own, out=tmp_path / "out"
            )
        )
    assert list(json.loads((tmp_path / "out/results.json").read_text())["models"]) == [
        "hf"
    ]
