"""Fixtures that several test files share."""

import hashlib
import logging
import os
import re
import signal
import sys
from pathlib import Path

# The models are small: with several ranks on the same cores, threads cost more than
# they gain. This module imports neither torch nor titan_disp, which take seconds that
# tests of pages need not spend.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The tests expect a CPU, also on a machine with GPUs. make gpu shows the GPUs
# to those that can use them.
if "TESTS_ON_GPU" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest  # noqa: E402

# The longest files, longest first. `make test` gives whole files to its workers in this
# order (--no-loadscope-reorder), so that no worker begins one of them when the others
# have nothing left to do.
LONGEST = (
    "meshes",
    "tutorial",
    "training",
    "run_ends",
    "stream",
    "supervise",
    "sweeps",
    "evaluate",
    "assembly",
    "head",
    "seen",
    "docs",
    "data_index",
    "condensation_command",
    "memory",
    "sharded_loss",
)


def pytest_report_header():
    part = os.environ.get("NIGHT_PART")
    return part and f"night: part {part} of the tests with parameters, and all others"


def of_other_parts(items, part):
    """Return the night tests with parameters that ``part`` leaves out: "2/3" keeps the
    second of every three of them, and "" all.

    Raises UsageError if it is no such part.
    """
    matched = re.fullmatch(r"([1-9])/([1-9])", part or "1/1")
    if matched is None or matched[1] > matched[2]:
        raise pytest.UsageError(f"NIGHT_PART is {part!r}, expected a part such as 1/3")
    kept, parts = map(int, matched.groups())
    kinds = [
        item
        for item in items
        if item.get_closest_marker("night") and hasattr(item, "callspec")
    ]
    return [item for i, item in enumerate(kinds, start=1) if (i - kept) % parts]


def pytest_collection_modifyitems(config, items):
    left_out = {*of_other_parts(items, os.environ.get("NIGHT_PART", ""))}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]
    order = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONGEST)))
    for item in items:
        if item.get_closest_marker("night") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))  # on a slow machine


def stream_handlers():
    loggers = [
        logging.root,
        *(
            x
            for x in logging.root.manager.loggerDict.values()
            if isinstance(x, logging.Logger)
        ),
    ]
    return {
        (logger, handler)
        for logger in loggers
        for handler in logger.handlers
        if type(handler) is logging.StreamHandler
    }


@pytest.fixture(autouse=True)
def _no_handler_outlives_its_test():
    """Removes handlers that a test added: pytest closes the stream that they write to,
    and the next message would fail.
    """
    before = stream_handlers()
    yield
    for logger, handler in stream_handlers() - before:
        logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def _same_draws():
    """What a test draws does not depend on the tests before it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _runs_keep_their_promises(request):
    """Checks every run folder that a trainer has left in the test's ``tmp_path``: an
    environment and events.
    """
    folder = (
        request.getfixturevalue("tmp_path")
        if "tmp_path" in request.fixturenames
        else None
    )
    yield
    if folder is None or request.node.get_closest_marker("changes_runs"):
        return
    for environment in folder.rglob("environment.json"):
        # stand-ins of a run have no variables
        real = "variables" in environment.read_text(errors="replace")
        if real and (environment.parent / "events.jsonl").exists():
            from tests.run_invariants import check_run

            check_run(environment.parent)


@pytest.fixture
def heard():
    """Handle SIGINT, SIGTERM and SIGHUP as in a terminal.

    Shells ignore SIGINT for background jobs, and nohup ignores SIGHUP.
    """
    handlers = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.SIG_DFL)
    handlers[signal.SIGINT] = signal.default_int_handler
    before = {
        number: signal.signal(number, handler) for number, handler in handlers.items()
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def one_rank():
    """A process group of this process only, so that collective calls need no second
    process.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def sample():
    """The sample corpus with its tokenizer, kept in build/.

    SAMPLE may name a folder that already holds them.
    """
    if written := os.environ.get("SAMPLE"):
        return Path(written)
    from filelock import FileLock  # which huggingface_hub needs

    from titan_disp.lab import sample

    # its text is that of Python's library
    made_of = f"{sys.version} {Path(sample.__file__).read_text()}"
    folder = (
        Path(__file__).parents[1]
        / "build"
        / f"sample-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
    )
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not sample.is_complete(folder):
            sample.write_sample(folder)
    return folder


@pytest.fixture(scope="session")
def text(sample, tmp_path_factory):
    """A file of plain text: the last 60 documents of the sample's validation split."""
    from tests.streams import VALIDATION_FILE, texts_of

    path = tmp_path_factory.mktemp("text") / "plain.txt"
    path.write_text("\n".join(texts_of(sample / VALIDATION_FILE)[-60:]))
    return path


@pytest.fixture(scope="session")
def hf_tokenizer(sample, tmp_path_factory):
    """The folder of a Hugging Face tokenizer of 2048 tokens, trained on the sample's
    texts.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from tests.streams import texts_of

    texts = texts_of(min((sample / "en").glob("c4-train*")))[:500]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


@pytest.fixture
def start(one_rank, tmp_path):
    """start(name="run", **checkpoint) begins a run of one weight, or starts it again:
    tests/test_checkpoint.py.
    """
    from tests.test_checkpoint import Run

    runs = []

    def start(name="run", **config):
        runs.append(Run(tmp_path / name, **config))
        return runs[-1]

    yield start
    for run in runs:
        run.manager.close()
