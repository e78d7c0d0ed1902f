"""README.md, docs/ and the other pages: what they show is what the software takes.

Commands are parsed by the real command line up to where they would begin to work, links resolve, keys exist, Python code runs.
"""

import ast
import dataclasses
import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomli
import torch
import tyro
from torch.distributed.run import get_args_parser

from tests.command_line import ROOT
from tests.pages import blocks, can_start, commands, loaded, split, subcommand, understood
from titan_disp import cli
from titan_disp.lab.sweeps.definition import points, read_sweep

README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, *DOCS, ROOT / "CONTRIBUTING.md", ROOT / "slurm" / "README.md", *(ROOT / "train_configs").rglob("*.md")]
PAGES += [ROOT / "examples" / "README.md"]
SCRIPTS = [*sorted((ROOT / "examples").glob("*.[pt]*")), *sorted((ROOT / "train_configs").rglob("*.toml"))]
# Of the shell, of SLURM, of sites and of other projects; titan-disp, make, pip, python, sbatch and torchrun are looked at below.
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
FILES = {"csv", "json", "jsonl", "toml", "safetensors", "py", "npz", "png"}  # metrics.jsonl is no key
EXTRAS = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
VARIABLES = set(re.findall(r"\$\((\w+)\)", (ROOT / "Makefile").read_text()))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """Without fenced blocks, whose comments look like headings."""
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.M | re.S)


def code_spans(page: Path) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(page))


def overrides(words: list[str]) -> list[str]:
    """TorchTitan's options after a config; a word that is no option belongs to the option before it."""
    first = next((i for i, word in enumerate(words) if re.match(r"--\w+\.", word)), len(words))
    return words[first:]


def check_titan_disp(words, monkeypatch):
    args, _ = understood(monkeypatch, words)
    if subcommand(words) in ("train", "submit", "preflight"):
        loaded(*args[0].argv[1:])


def check_script(script, arguments):
    """Parse the arguments as the script does: with tyro, or by their number."""
    text = script.read_text()
    if parsed := re.search(r"tyro\.cli\((\w+)", text):
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(script.parent)  # as Python does for a script: one imports another by its name
            module = importlib.import_module(f"benchmarks.{script.stem}")
        tyro.cli(getattr(module, parsed[1]), args=arguments)  # exits with 2 if they are wrong
    elif "argparse" in text:
        spec = importlib.util.spec_from_file_location(script.stem, script)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", [script.name, *arguments])
            for name in ("train", "build_trainer"):  # what the example does with the arguments
                if hasattr(module, name):
                    patch.setattr(module, name, lambda *args, **options: sys.exit(0))
            with pytest.raises(SystemExit) as ended:
                module.main()
        assert ended.value.code == 0, (script, arguments)
    elif number := re.search(r"len\(sys\.argv\) != (\d+)", text):
        assert len(arguments) == int(number[1]) - 1, (script, arguments)
    else:
        assert len(arguments) == len(set(re.findall(r"sys\.argv\[(\d)\]", text))) > 0, (script, arguments)


def check_pytest(arguments):
    """The files exist, and have tests of these names."""
    files = [ROOT / word for word in arguments if word.endswith(".py")]
    texts = " ".join(file.read_text() for file in files)
    if "-k" in arguments:
        for name in arguments[arguments.index("-k") + 1].split(" or "):
            assert name in texts, arguments
    assert files, arguments


@functools.cache
def options_of_hf(subcommand):
    call = "import sys; from huggingface_hub.cli.hf import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", call, subcommand, "--help"], capture_output=True, text=True)


def check_hf(rest):
    shown = options_of_hf(rest[0])
    assert shown.returncode == 0, rest
    for option in rest[1:]:
        assert not option.startswith("--") or re.search(rf"{option}\b", shown.stdout), rest


def check_other(words):
    command, *rest = words
    if command == "make":
        assert {word for word in rest if "=" not in word} <= TARGETS, words
        assert {word.partition("=")[0] for word in rest if "=" in word} <= VARIABLES, words
    elif command == "pip":
        asked = {extra for word in rest for extra in "".join(re.findall(r"\[(.*)\]", word)).split(",") if extra}
        assert asked <= EXTRAS.keys(), words
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
        check_hf(rest)
    elif command == "sbatch":
        script = next(i for i, word in enumerate(rest) if word.endswith(".sbatch"))
        assert (ROOT / rest[script]).is_file(), words
        loaded(rest[script + 1], *overrides(rest[script:]))
    elif command == "torchrun":
        module = rest.index("-m") + 1
        get_args_parser().parse_args(rest)  # exits with 2 if an option is unknown
        assert rest[module] in ("titan_disp.train", "torchtitan.train")
        assert rest[module + 1] == "--job.config_file"
        loaded(*rest[module + 2 :])
    else:
        assert command in OTHERS or command == "python", words


@pytest.mark.parametrize("page", [*PAGES, *SCRIPTS], ids=name)
def test_commands(page, monkeypatch):
    """Subcommands, options and values are known; configs, scripts, extras and targets of the Makefile exist."""
    monkeypatch.chdir(ROOT)
    for words in commands(page):
        if words[0] == "titan-disp":
            check_titan_disp(words[1:], monkeypatch)
        else:
            check_other(words)


@pytest.mark.parametrize(
    "command",
    [
        "python -m pytest tests/no_such.py -k zzz",
        "python -m pytest tests/test_files.py -k zzz",
        "python -m benchmarks.corpus data/evidence --nosuch",
        "python benchmarks/step.py --nosuch 1",
        "python examples/wikitext.py data",
        "hf dowload openai-community/gpt2",
        "hf download openai-community/gpt2 --nosuch x",
        "make test WROKERS=3",
        "make tset",
        "torchrun --nosuch -m titan_disp.train --job.config_file train_configs/demo_cpu.toml",
    ],
)
def test_wrong_commands_are_found(command):
    """These are commands of other programs than titan-disp, with a mistake in each."""
    with pytest.raises((AssertionError, FileNotFoundError, SystemExit)):
        check_other(command.split())


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_are_in_blocks_that_are_tested(page):
    assert re.findall(r"^ {4,}(?:\$ )?(?:titan-disp|python|make|sbatch|pip) .*", prose(page), flags=re.M) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_names_in_the_text(page):
    """Subcommands and their options, keys of the config, files and targets that the text mentions exist."""
    config = loaded("train_configs/demo_cpu.toml")
    for span in code_spans(page):
        if span.startswith("titan-disp "):
            words = [word for word in span.split()[1:] if word != "--help"]
            if not words:
                continue
            found = cli.COMMANDS[words[0]]
            if isinstance(found, dict):
                found = found.get(words[1] if len(words) > 1 else "", found.get("run"))  # sweep FILE is sweep run FILE
            known = {field.name for field in dataclasses.fields(cli.options_of(found))} if found else ()
            for option in re.findall(r"--([a-z-]+)(?![\w.-])", span):
                assert option == "help" or option.replace("-", "_") in known, span
        if re.match(r"(make|pip|python) \S", span) and "…" not in span:
            for words in split(span):
                check_other(words)
        if key := re.fullmatch(r"(?:--)?([a-z_]+)\.(?:no-)?(\w+)(?:[ =].*)?", span):
            section, field = key.groups()
            if hasattr(config, section) and field not in FILES:
                assert hasattr(getattr(config, section), field), span
        if path := re.match(
            r"((?:train_configs|benchmarks|slurm|docs|examples|tests|titan_disp)/[\w./-]+)(?: |$)", span
        ):
            assert (ROOT / path[1]).exists(), span


def test_the_index_has_every_page():
    index = ROOT / "docs" / "README.md"
    here = {(index.parent / link.partition("#")[0]).resolve() for link in links(index)}
    assert {page.resolve() for page in PAGES} - {index} <= here


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in target]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name)
def test_links(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_a_newcomer_finds_every_page():
    """By the README's links, and those of the pages that they lead to."""
    found, new = set(), {README}
    while new:
        found |= new
        linked = {(page.parent / target.partition("#")[0]).resolve() for page in new for target in links(page)}
        new = {page for page in linked if page.suffix == ".md"} - found
    assert {*PAGES, ROOT / "CHANGELOG.md"} <= found
    assert len(README.read_text().splitlines()) <= 150
    assert len(README.read_text().split()) <= 1300


def test_requirements():
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch_range,) = [line for line in project["dependencies"] if re.match(r"torch\b", line)]
    assert f"`{torch_range}`" in README.read_text()
    assert f"Python {project['requires-python'].replace('>=', '≥ ')}" in README.read_text()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_toml(page, tmp_path):
    """Keys are known, and values have the types of the defaults; an example of a sweep is one."""
    config = loaded("train_configs/demo_cpu.toml")
    for block in blocks(page.read_text(), "toml"):
        table = tomli.loads(block)
        if "sweep" in table:
            (tmp_path / "sweep.toml").write_text(block)
            sweep = read_sweep(tmp_path / "sweep.toml")
            assert f"`{[p.name for p in points(sweep)][0]}`" in page.read_text()
            continue
        for section, keys in table.items():
            known = {field.name for field in dataclasses.fields(getattr(config, section))}
            assert keys.keys() <= known, section


def test_the_smallest_config_can_start(tmp_path):
    (block,) = blocks(README.read_text(), "toml")
    (tmp_path / "first.toml").write_text(block)
    config = can_start(8, str(tmp_path / "first.toml"))
    assert (config.model.flavor, config.dispersion.enabled, config.training.dataset) == ("0.6B", True, "text")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python(page):
    """What a page imports is there."""
    for block in blocks(page.read_text(), "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def plain_dispersion(z):
    """The README's formula for [B, N, F], with κ = 0.25 and ε = 1e-2."""
    u = z / (z.norm(dim=-1, keepdim=True) + 1e-2)
    angles = (u @ u.mT).clamp(-0.75, 0.75).arccos() / torch.pi
    others = ~torch.eye(z.shape[1], dtype=torch.bool)
    return torch.stack([one[others].neg().exp().mean().log() for one in angles])


def test_the_loss_alone():
    """The README's loop against its formula; the calls in docs/loss.md."""
    torch.manual_seed(0)
    z = [torch.randn(2, 6, 4, requires_grad=True) for _ in range(3)]
    logits, labels = torch.randn(2, 6, 5), torch.randint(5, (2, 6))
    names = {"torch": torch, "model": lambda tokens: (logits, z), "tokens": None, "labels": labels}
    (block,) = blocks(README.read_text(), "python")
    exec(block, names)
    cross_entropy = -logits.log_softmax(-1).gather(-1, labels[..., None]).mean()
    dispersion = torch.stack([plain_dispersion(layer.detach().double()) for layer in z]).mean()
    assert names["loss"].item() == pytest.approx(cross_entropy.item() + 0.1 * dispersion.item(), rel=1e-5)
    (block,) = blocks((ROOT / "docs" / "loss.md").read_text(), "python")
    given = {"hidden_states": z, "cross_entropy": cross_entropy, "z": z[0], "z_local": z[0], "g": None}
    exec(block, given | {"attention_mask": torch.ones(2, 6, dtype=torch.int64)})
