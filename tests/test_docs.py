"""README.md, docs/ and the other pages: commands are valid, links resolve, keys exist,
Python code runs, messages are known.
"""

import argparse
import ast
import dataclasses
import functools
import importlib.metadata
import importlib.util
import inspect
import itertools
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli
import torch
import tyro

from benchmarks.torchtitan_port import Imported, available, imported_by, modules_of
from tests.command_line import ROOT
from tests.oracle import oracle
from tests.pages import (
    PLACEHOLDERS,
    blocks,
    both_ways,
    can_start,
    commands,
    loaded,
    split,
    understood,
)
from titan_disp import cli
from titan_disp.cluster import plan as plans
from titan_disp.config.command_options import Machine
from titan_disp.data.stores import is_hub_name
from titan_disp.lab.evaluate import evaluation
from titan_disp.lab.inspection import command as condensation_command
from titan_disp.lab.inspection.targets import parse_id
from titan_disp.lab.sweeps.definition import points, read_sweep

README = ROOT / "README.md"
CHANGELOG = ROOT / "CHANGELOG.md"
PAGES = [
    README,
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / "train_configs").rglob("*.md"),
]
PAGES += [
    ROOT / "CONTRIBUTING.md",
    ROOT / "slurm" / "README.md",
    ROOT / "examples" / "README.md",
]
SCRIPTS = [
    *sorted((ROOT / "examples").glob("*.[pt]*")),
    *sorted((ROOT / "train_configs").rglob("*.toml")),
]
# Commands of the shell, of SLURM, of sites and of other projects, which are not
# checked.
OTHERS = {
    "git",
    "cd",
    "source",
    "module",
    "export",
    "tar",
    "tail",
    "tensorboard",
    "apptainer",
    "podman",
    "enroot",
}
# metrics.jsonl is no key
FILES = {"csv", "json", "jsonl", "toml", "safetensors", "py", "npz", "png"}
TYRO = tyro.cli  # tests replace tyro.cli
FOLDERS = "train_configs|benchmarks|slurm|docs|examples|tests|titan_disp"
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
VARIABLES = set(re.findall(r"\$\((\w+)\)", (ROOT / "Makefile").read_text()))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.M | re.S)


def check_titan_disp(words):
    subcommand, options = understood(words)
    if hasattr(options, "argv"):
        loaded(*options.argv[1:])
    if subcommand.startswith("sweep"):
        read_sweep(options.file)
    if subcommand == "data digest":
        assert options.phases


def parsed_only(parse):
    def stop(*args, **options):
        parse(*args, **options)  # exits with 2 if the arguments are wrong
        sys.exit(0)

    return stop


def parsed_by_tyro(target, **options):
    """Parse the arguments of a class, or of a function without calling it."""
    if inspect.isfunction(target):
        target = functools.wraps(target)(lambda *args, **options: None)
    TYRO(target, **options)


def check_script(script, arguments):
    """Run a script until it has read its arguments."""
    text = script.read_text()
    if "tyro.cli(" in text or "argparse" in text:
        with pytest.MonkeyPatch.context() as patch:
            # as Python does for a script: one imports another by its name
            patch.syspath_prepend(script.parent)
            patch.setattr("sys.argv", [script.name, *arguments])
            patch.setattr(tyro, "cli", parsed_only(parsed_by_tyro))
            patch.setattr(
                argparse.ArgumentParser,
                "parse_args",
                parsed_only(argparse.ArgumentParser.parse_args),
            )
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(str(script), run_name="__main__")
        assert ended.value.code == 0, (script, arguments)
    elif arguments or "sys.argv" in text:
        assert len(arguments) == len(set(re.findall(r"sys\.argv\[(\d)\]", text))) > 0, (
            script,
            arguments,
        )


def check_pytest(arguments):
    texts = " ".join(
        (ROOT / word).read_text() for word in arguments if word.endswith(".py")
    )
    names = (
        arguments[arguments.index("-k") + 1].split(" or ") if "-k" in arguments else []
    )
    assert texts, arguments
    assert all(name in texts for name in names), arguments


def check_command(words):
    command, *rest = words
    if command == "titan-disp":
        check_titan_disp(rest)
    elif command == "make":
        assert {word for word in rest if "=" not in word} <= TARGETS, words
        assert {word.partition("=")[0] for word in rest if "=" in word} <= VARIABLES, (
            words
        )
    elif command == "pip":
        asked = {
            extra
            for word in rest
            for extra in "".join(re.findall(r"\[(.*)\]", word)).split(",")
            if extra
        }
        assert asked <= PROJECT["optional-dependencies"].keys(), words
    elif command == "python" and rest[:2] == ["-m", "pytest"]:
        check_pytest(rest[2:])
    elif command == "python" and rest[0] == "-m":
        spec = importlib.util.find_spec(rest[1])
        assert spec, words
        if rest[1].startswith("benchmarks."):
            check_script(Path(spec.origin), rest[2:])
    elif command == "python" and rest[0] != "-c":
        check_script(ROOT / rest[0], rest[1:])
    elif command == "hf":
        from huggingface_hub.cli.hf import app

        with pytest.raises(SystemExit) as ended:
            app([*rest, "--help"])
        assert not ended.value.code, words
    elif command == "sbatch":
        script = next(i for i, word in enumerate(rest) if word.endswith(".sbatch"))
        assert (ROOT / rest[script]).is_file(), words
        loaded(
            rest[script + 1],
            *itertools.dropwhile(
                lambda word: not re.match(r"--\w+\.", word), rest[script:]
            ),
        )
    elif command == "torchrun":
        from torch.distributed.run import get_args_parser

        module = rest.index("-m") + 1
        get_args_parser().parse_args(rest)  # exits with 2 if an option is unknown
        assert rest[module] in ("titan_disp.train", "torchtitan.train")
        assert rest[module + 1] == "--job.config_file"
        loaded(*rest[module + 2 :])
    else:
        assert command in OTHERS or command == "python", words


def check_span(span):
    config = loaded("train_configs/demo_cpu.toml")
    words = [word for word in span.split()[1:] if word != "--help"]
    if span.startswith("titan-disp ") and words:
        found = cli.COMMANDS[words[0]]
        if isinstance(found, dict):
            # sweep FILE is sweep run FILE
            found = found.get("".join(words[1:2]), found.get("run"))
        known = {field.name for field in dataclasses.fields(found[0])} if found else ()
        for option in re.findall(r"--([a-z-]+)(?![\w.-])", span):
            assert option == "help" or option.replace("-", "_") in known, span
    if re.match(r"(make|pip|python) \S", span) and "…" not in span:
        for words in split(span):
            check_command(words)
    if key := re.fullmatch(r"(?:--)?([a-z_]+)\.(?:no-)?(\w+)(?:[ =].*)?", span):
        section, field = key.groups()
        if hasattr(config, section) and field not in FILES:
            assert hasattr(getattr(config, section), field), span
    if path := re.match(rf"((?:{FOLDERS})/[\w./-]+)(?: |$)", span):
        assert (ROOT / path[1]).exists(), span


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


def links(page: Path) -> list[tuple[Path, str]]:
    targets = [
        target
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page))
        if "://" not in target
    ]
    parts = [target.partition("#") for target in targets]
    return [
        ((page.parent / path).resolve() if path else page, anchor)
        for path, _, anchor in parts
    ]


def check_toml(block, page, folder):
    block = block.replace("mine/config.toml", PLACEHOLDERS["mine/config.toml"])
    table = tomli.loads(block)
    (folder / "block.toml").write_text(block)
    if "sweep" in table:
        assert (
            f"`{points(read_sweep(folder / 'block.toml'))[0].name}`" in page.read_text()
        )
    else:
        loaded(folder / "block.toml")


def check_imports(block):
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), (
                ast.unparse(node)
            )


@pytest.mark.parametrize("page", [*PAGES, CHANGELOG, *SCRIPTS], ids=name)
def test_page(page, tmp_path):
    if page != CHANGELOG:  # which has names of the past
        for words in commands(page):
            check_command(words)
    if page.suffix != ".md":
        return
    for linked, anchor in links(page):
        assert linked.exists(), linked
        assert not anchor or anchor in anchors(linked), (linked, anchor)
    if page == CHANGELOG:
        return
    for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page)):
        check_span(span)
    for block in blocks(page.read_text(), "toml"):
        check_toml(block, page, tmp_path)
    for block in blocks(page.read_text(), "python"):
        check_imports(block)
    commands_elsewhere = re.findall(
        r"^ {4,}(?:\$ )?(?:titan-disp|python|make|sbatch|pip) .*",
        prose(page),
        flags=re.M,
    )
    assert commands_elsewhere == [], (
        "commands belong into blocks, which this test reads"
    )


def test_a_newcomer_finds_every_page():
    found = set()
    new = {README}
    while new:
        found |= new
        new = {
            linked
            for page in new
            for linked, _ in links(page)
            if linked.suffix == ".md"
        } - found
    assert {*PAGES, CHANGELOG} <= found
    index = ROOT / "docs" / "README.md"
    assert {*PAGES} - {index} <= {linked for linked, _ in links(index)}
    assert (
        len(README.read_text().splitlines()) <= 110,
        len(README.read_text().split()) <= 1000,
    ) == (True, True)


def test_switches_have_one_spelling():
    """``--section.no-key``, as the parsers of TorchTitan and titan-disp understand."""
    files = (
        *PAGES,
        *SCRIPTS,
        ROOT / "titan_disp" / "config" / "command_options.py",
        *(ROOT / "titan_disp" / "lab").glob("init.py"),
    )
    text = "\n".join(file.read_text() for file in files)
    value = r"(?:=| +)[\"']?(?:true|false|yes|no|on|off)\b"
    assert re.findall(rf"--[a-z_]+\.[\w-]+{value}", text, flags=re.I) == []
    switches = sorted(set(re.findall(r"--[a-z_]+\.no-[\w-]+", text)))
    assert "--dispersion.no-enabled" in switches
    for config in both_ways("train_configs/demo_cpu.toml", *switches):
        for switch in switches:
            section, key = switch.removeprefix("--").split(".no-")
            assert getattr(getattr(config, section), key) is False, switch


def test_requirements():
    asked = {re.match(r"[\w-]+", line)[0]: line for line in PROJECT["dependencies"]}
    readme = README.read_text()
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert f"`{asked['torch']}`" in readme
    assert f"Python {PROJECT['requires-python'].replace('>=', '≥ ')}" in readme
    for wanted in (
        asked["torch"],
        asked["torchtitan"],
        asked["transformers"],
        f"python{PROJECT['requires-python']}",
    ):
        assert f"`{wanted}`" in page
    assert (
        importlib.metadata.version("torchtitan")
        == asked["torchtitan"].partition("==")[2]
    )


def test_the_way_through_a_run():
    """Each function of the list is where it says, in a class if there is one."""
    page = (ROOT / "docs" / "code.md").read_text()
    section = page.partition("## The way through a run\n")[2].partition("\n## ")[0]
    calls = re.findall(r"([\w/]+\.py):([\w.]+)", section)
    assert len(calls) > 20
    for file, function in calls:
        tree = ast.parse((ROOT / "titan_disp" / file).read_text())
        for word in function.split("."):
            (tree,) = [
                node for node in tree.body if getattr(node, "name", None) == word
            ]


def test_imports_from_torchtitan():
    """The port's script, by reading, against Python's own answer; and the page that it
    writes.
    """
    imports = imported_by(ROOT / "titan_disp")
    assert Imported("torchtitan.train", "Trainer") in imports
    assert Imported("torchtitan.protocols.train_spec", "register_train_spec") in imports
    installed = modules_of(
        Path(importlib.util.find_spec("torchtitan").origin).parent.parent
    )
    assert imports <= available(installed)
    for wanted in imports:
        assert hasattr(importlib.import_module(wanted.module), wanted.name), wanted
    text = (ROOT / "docs" / "port.md").read_text()
    counts = re.search(
        r"(\d+) names are in their place, and (\d+) have moved or are gone",
        text,
    ).groups()
    there, missing = map(int, counts)
    assert there + missing == len(imports)
    assert len(re.findall(r"^\| `torchtitan\.", text, flags=re.M)) == missing


def test_the_config_by_hand_can_start(tmp_path):
    block, *_ = blocks((ROOT / "docs" / "training.md").read_text(), "toml")
    (tmp_path / "first.toml").write_text(block)
    config = can_start(8, tmp_path / "first.toml")
    assert (
        config.model.flavor,
        config.dispersion.enabled,
        config.training.dataset,
    ) == ("0.6B", True, "text")


def test_the_loss_alone():
    """The README's loop against the paper's formula; the calls in docs/loss.md."""

    class Model(torch.nn.Sequential):
        def forward(self, z):
            return SimpleNamespace(loss=super().forward(z).mean())

    torch.manual_seed(0)
    model = Model(*(torch.nn.Linear(4, 4) for _ in range(3)))
    z = torch.randn(2, 6, 4)
    outputs = []
    names = {"model": model, "batch": {"z": z}}
    (block,) = blocks(README.read_text(), "python")
    exec(block, names)
    for layer in model:
        z = layer(z)
        outputs.append(z)
    dispersion = torch.stack(
        [oracle("angular", layer.detach()) for layer in outputs]
    ).mean()
    assert names["loss"].item() == pytest.approx(
        z.mean().item() + 0.1 * dispersion.item(), rel=1e-5
    )
    _, block = blocks((ROOT / "docs" / "loss.md").read_text(), "python")
    z = outputs[0]
    mask = torch.ones(2, 6, dtype=torch.int64)
    given = {
        "hidden_states": outputs,
        "z": z,
        "z_local": z,
        "attention_mask": mask,
        "g": None,
    }
    exec(block, given | {"cross_entropy": torch.tensor(1.0)})


def test_a_measurement_in_python(tmp_path, monkeypatch, capsys):
    """The lines of docs/measurements.md, on a model that is not of this repository."""
    torch.manual_seed(0)
    (block,) = blocks((ROOT / "docs" / "measurements.md").read_text(), "python")
    monkeypatch.chdir(tmp_path)
    names = {"hidden_states": list(torch.randn(4, 2, 6, 8))}
    exec(block, names)
    unit = torch.nn.functional.normalize(names["hidden_states"][3], dim=-1)
    measured = names["measurement"]
    assert measured.mean_cosine[3] == pytest.approx((unit @ unit.mT).mean().item())
    assert (measured.tokens, measured.sequences, measured.last_block) == (6, 2, 2)
    assert "ρ 1.00 τ 1.00 (range 0.13)" in capsys.readouterr().out
    assert Path("heatmap.png").stat().st_size


def test_results_in_python(tmp_path, monkeypatch):
    """The lines of docs/export-evaluate.md, on a run with a measurement and a step that
    was repeated.
    """
    from tests.test_report import T0, faulty, write_run

    measured = {
        "step": 0,
        "time": T0,
        "seconds": 1.0,
        "condensation": {"cross_entropy": 8.5},
    }
    rows, events = faulty()
    write_run(
        tmp_path / "outputs" / "demo_cpu",
        [measured, *rows],
        events,
        optimizer={"lr": 0.008},
    )
    monkeypatch.chdir(tmp_path)
    names = {}
    (block,) = blocks((ROOT / "docs" / "export-evaluate.md").read_text(), "python")
    exec(block, names)
    assert names["rows"].index.tolist() == list(range(1, 101))
    assert names["rows"].ce[35] == names["smooth"][45] == 2.0
    assert (names["held_out"], names["lr"]) == ({0: 8.5}, 0.008)
    assert [event["step"] for event in names["ends"]] == [100]


# ---- docs/reproduce.md: its configs and sweeps can start, its models and runs have names, and its costs are the plan's

REPRODUCE = ROOT / "docs" / "reproduce.md"


class Searched(Exception):
    """Raised in place of a search for models, with their names."""


SWEEPS = {
    path.stem: path
    for path in (ROOT / "train_configs" / "sweeps" / "paper").glob("*.toml")
}


@pytest.fixture(scope="module")
def options():
    return [
        understood(words[1:])
        for words in commands(REPRODUCE)
        if words[0] == "titan-disp"
    ]


@pytest.fixture(scope="module")
def sweeps(options):
    return {
        str(one.file): read_sweep(ROOT / one.file)
        for name, one in options
        if name == "sweep run"
    }


def test_runs_can_start_and_data_sets_have_names(options):
    for name, one in options:
        if name == "train":
            can_start(one.nproc, one.config, *one.overrides)
        elif name == "submit":
            can_start(one.nodes * one.gpus_per_node, one.config, *one.overrides)
        elif name == "data fetch":
            assert one.dataset == "c4" or is_hub_name(one.dataset)


def models_in(words):
    """The models that a command's text has, in the order of the text."""
    options = [place for place, word in enumerate(words) if word[:2] == "--"]
    end = next((p for p in options if words[p] not in ("--family", "--pair")), None)
    listed = [word for word in words[:end] if word[:2] != "--"]
    return [model for word in listed for model in word.split("=")[-1].split(",")]


def calls_of(*subcommands):
    return [words[1:] for words in commands(REPRODUCE) if words[1] in subcommands]


MEASURING = calls_of("condensation", "evaluate")


def test_models_and_runs(options, sweeps):
    runs = {
        loaded(*one.argv[1:]).job.dump_folder
        for name, one in options
        if name in ("train", "submit")
    }
    runs |= {str(point.folder) for sweep in sweeps.values() for point in points(sweep)}
    calls = calls_of("condensation", "evaluate", "report")
    found = [model for words in calls for model in models_in(words[1:])]
    assert len(found) > 40
    for name in found:
        assert (
            name in runs
            or name == "assets/hf/gpt2"
            or not name.startswith("outputs/")
            and parse_id(name)
        ), name


@pytest.mark.parametrize("words", MEASURING, ids=lambda words: words[-1])
def test_commands_measure_all_of_their_models(words, monkeypatch):
    """The command line once kept only the last --family and the last --pair."""

    def search(names, *_, **__):
        raise Searched(names)

    for module in (condensation_command.targets, evaluation):
        monkeypatch.setattr(module, "find_targets", search)
        monkeypatch.setattr(module, "find_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr("sys.argv", ["titan-disp", *words])
    with pytest.raises(Searched) as searched:
        cli.main()
    (names,) = searched.value.args
    assert sorted(names) == sorted(set(models_in(words[1:])))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SWEEPS.keys() - {"qwen3_methods"}))
def test_sweeps_at_the_papers_size(name):
    """The last condition of each listed point can start on one GPU."""
    sweep = read_sweep(SWEEPS[name])
    conditions = {point.condition: point for point in points(sweep)}
    assert sweep.against in conditions
    for point in {
        condition.partition("_")[0]: point for condition, point in conditions.items()
    }.values():
        config = can_start(1, *point.argv())
        # 20 %, as in the authors' scripts
        assert config.lr_scheduler.warmup_steps == -(-config.training.steps // 5)


def test_the_sweeps_of_both_models_are_the_same(sweeps):
    """But for κ, of which Qwen3's recipe has the default."""
    gpt2, qwen3 = (
        sweeps[str(SWEEPS[f"{model}_methods"].relative_to(ROOT))]
        for model in ("gpt2", "qwen3")
    )
    without = [
        (one.name, tuple(o for o in one.overrides if "clamp" not in o), one.axes)
        for one in gpt2.listed
    ]
    assert without == [(one.name, one.overrides, one.axes) for one in qwen3.listed]
    assert (gpt2.axes, gpt2.overrides, gpt2.against) == (
        qwen3.axes,
        qwen3.overrides,
        qwen3.against,
    )


def test_costs(monkeypatch):
    monkeypatch.setattr(plans, "MAX_NODES", 1)  # else it tries a thousand
    section = REPRODUCE.read_text().split("## Cost\n")[1].split("\n## ")[0]
    row = r"^\| `(train_configs/.*?)`.*? \| \d+ \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$"
    rows = re.findall(row, section, flags=re.M)
    assert len(rows) == 4
    for words, *numbers in rows:
        steps, gigabytes, on_eight, on_one = (
            float(number.replace(",", "")) for number in numbers
        )
        config = loaded(*words.split())
        eight, one = (plans.make_plan(config, Machine(1, gpus)) for gpus in (8, 1))
        assert eight.batch.steps == one.batch.steps == steps
        assert eight.memory.total / 1e9 == pytest.approx(gigabytes, abs=0.05)
        assert eight.time.days * 1440 == pytest.approx(on_eight, rel=0.06)
        assert one.time.days * 1440 == pytest.approx(on_one, rel=0.01)


# ---- docs/troubleshooting.md against the messages in the source code, both ways

TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
SOURCES = [
    *sorted((ROOT / "titan_disp").rglob("*.py")),
    ROOT / "slurm" / "supervise.py",
]
ERRORS = {
    "ConfigError",
    "RanksError",
    "RefusedError",
    "DataError",
    "InUseError",
    "NonFiniteError",
    "CheckpointError",
}


def text(node):
    """A message as the page writes it: literals joined, and … for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else "…"
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text(node.left) + text(node.right)
    return "…"


def literals(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            yield text(node)


def raised(path):
    for node in ast.walk(ast.parse(path.read_text())):
        call = node.exc if isinstance(node, ast.Raise) else None
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id in ERRORS
            and call.args
        ):
            message = text(call.args[0])
            if len(re.findall(r"\w\w+", message)) > 2:
                yield node.lineno, message


def fragments():
    rows = [
        line
        for line in TROUBLESHOOTING.partition("## Config")[2].splitlines()
        if line.startswith("| ")
    ]
    return [
        fragment
        for row in rows
        for fragment in re.findall(r"`([^`]+)`", row.split(" | ")[0])
    ]


def test_fragments_are_of_messages():
    """A fragment of placeholders and colons would be found in every message."""
    known = "\n".join(literal for path in SOURCES for literal in literals(path))
    known += (ROOT / "slurm" / "node.sh").read_text()
    found = fragments()
    assert [fragment for fragment in found if fragment not in known] == []
    assert [
        fragment for fragment in found if len(re.findall("[A-Za-z]", fragment)) < 8
    ] == []
    assert len(found) == len(set(found))


def test_every_message_is_found_by_a_fragment():
    """Where this fails, add a piece of the message to the row of its subject."""
    found = fragments()
    messages = [(path.name, *one) for path in SOURCES[:-1] for one in raised(path)]
    assert len(messages) > 150
    assert [
        one for one in messages if not any(fragment in one[2] for fragment in found)
    ] == []
