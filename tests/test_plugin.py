"""What importing parts of titan_disp loads, registers and changes, and which part
imports which.
"""

import ast
import importlib
import math
import re
import shutil
import subprocess
import sys
from functools import partial
from graphlib import TopologicalSorter

import pytest
import tomli
import torch
import torchtitan.components.metrics as titan_metrics
import torchtitan.tools.profiling as titan_profiling
import torchtitan.tools.utils as titan_utils
from torchtitan.protocols import train_spec as titan

import titan_disp
from tests.command_line import ROOT, environment
from tests.semantic import copy
from tests.test_cli import ALL
from titan_disp import cli, cpu
from titan_disp.__main__ import main, required_packages
from titan_disp.models.registry import MODELS
from titan_disp.run import checkpoint, liveness, metrics


def fresh(script, folder=ROOT):
    how = {"capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment(), **how
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_version_is_in_one_place():
    metadata = tomli.loads((ROOT / "pyproject.toml").read_text())
    version = titan_disp.__version__
    assert metadata["project"]["dynamic"] == ["version"]
    assert metadata["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "titan_disp.__version__"
    }
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"**Status:** {version}; " in (ROOT / "README.md").read_text()


def test_the_package_the_help_and_the_reference_of_keys_load_no_torch():
    """Half a second rather than half a minute on a cluster's file system, for what one
    looks up while one types.
    """
    words = [[*words, "--help"] for words in ((), ("data",), ("sweep",), *ALL)] + [
        ["config"],
        ["config", "tau"],
    ]
    printed = fresh(f"""
import sys, time
import titan_disp
assert not any(name.startswith("titan_disp.") for name in sys.modules), "the package imports a module"
from titan_disp.cli import main
for words in {words!r}:
    sys.argv, start = ["titan-disp", *words], time.process_time()
    try:
        main()
    except SystemExit as exit:
        assert not exit.code
    heavy = {{"torch", "torchtitan", "numpy", "transformers", "datasets", "matplotlib", "scipy"}} & sys.modules.keys()
    assert not heavy, (words, heavy)
    assert time.process_time() - start < 3, words  # 0.2 s, on a fast machine
print("all of them")
""")
    assert printed.endswith("all of them\n")


# Run without the packages that titan-disp asks for, but for torch and what it imports
# itself.
TORCH_ALONE = """
import sys, time
start = time.process_time()
import torch
of_torch = time.process_time() - start
for name in OTHERS:
    sys.modules.setdefault(name, None)

start, before = time.process_time(), {*sys.modules, *sys.stdlib_module_names, "titan_disp", "torch", "sympy", "mpmath"}
from titan_disp.dispersion import dispersion_losses
assert not (others := {name for name in sys.modules if name.split(".")[0] not in before}), others
from titan_disp.dispersion.variants import VARIANTS
print((time.process_time() - start) / of_torch)
for variant in VARIANTS:
    z = torch.randn(2, 8, 4, requires_grad=True)
    dispersion_losses([z], variant=variant).sum().backward()
    assert z.grad.abs().sum() > 0

del sys.modules["scipy"], sys.modules["matplotlib"]
import titan_disp.condensation.measure, titan_disp.lab.plots
"""


def torch_alone():
    metadata = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = {
        re.match(r"[\w-]+", line)[0].replace("-", "_")
        for line in metadata["dependencies"]
    }
    return TORCH_ALONE.replace("OTHERS", str(packages - {"torch", "numpy", "jinja2"}))


def test_the_loss_needs_torch_alone():
    """It is imported in less time than torch.

    Measuring condensation needs scipy and matplotlib, too.
    """
    assert float(fresh(torch_alone())) < 1 or float(fresh(torch_alone())) < 1


# Run beside the unpacked wheel. Of the installed packages, Python finds torch and what
# torch requires. Each module is imported; then runs the command that pip would install.
TORCH_INSTALLED = """
import importlib, pkgutil, sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from importlib.metadata import distribution

INSTALLED = {"torch", "torchgen", "functorch", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx",
             "setuptools", "_distutils_hack", "sympy", "typing_extensions"}

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if path is None and name not in INSTALLED:
            path = [entry for entry in sys.path if not entry.endswith("-packages")]
        return super().find_spec(name, path, target)

sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Installed]

import torch
from titan_disp.dispersion import attach
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
handle = attach(model)
model(torch.randn(2, 5, 8))
handle.loss().backward()
assert all(layer.linear1.weight.grad.abs().sum() > 0 for layer in model.layers)

import titan_disp
(folder,) = titan_disp.__path__
print(folder)
for module in pkgutil.walk_packages([folder], "titan_disp."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        print(module.name, error.name)

(script,) = distribution("titan-disp").entry_points.select(group="console_scripts")
sys.stderr = sys.stdout
for words in (["--help"], ["train", "x.toml"]):
    sys.argv = [script.name, *words]
    try:
        script.load()()
    except SystemExit as exit:
        print("exit status", exit.code)
"""


@pytest.mark.slow  # and only in a clone: copies for ``make mutants`` have no git
def test_the_wheel_without_its_dependencies_has_the_loss(tmp_path):
    """What needs more names a package that is missing and that the wheel requires."""
    checkout = tmp_path / "checkout"
    site = tmp_path / "site"
    copy(ROOT, checkout)
    build = "from setuptools import build_meta; print(build_meta.build_{}('.'))"
    source = fresh(build.format("sdist"), checkout).split()[-1]
    shutil.unpack_archive(checkout / source, tmp_path)
    unpacked = tmp_path / source.removesuffix(".tar.gz")
    wheel = fresh(build.format("wheel"), unpacked).split()[-1]
    shutil.unpack_archive(unpacked / wheel, site, "zip")
    files = {path.relative_to(checkout) for path in checkout.glob("titan_disp/**/*")}
    assert files <= {path.relative_to(site) for path in site.rglob("*")}
    assert [*site.rglob("LICENSE")]

    folder, *missing, help_error, help_status, train_error, train_status = fresh(
        TORCH_INSTALLED, site
    ).splitlines()
    assert folder == f"{site}/titan_disp"
    missing_packages = dict(line.split() for line in missing)
    # This module is imported only where Triton is to compile it.
    assert missing_packages.pop("titan_disp.dispersion.triton_kernels") == "triton"
    assert {*missing_packages.values()} <= required_packages()
    assert missing_packages["titan_disp.plugin"] == "torchtitan"
    assert {"titan_disp.train", "titan_disp.config.load"} <= missing_packages.keys()
    assert not [name for name in missing_packages if ".dispersion" in name]
    assert help_error == train_error == one_line(missing_packages["titan_disp.cli"])
    assert help_status == train_status == "exit status 2"


def one_line(package, what="."):
    return f"titan-disp: error: titan-disp needs {package}, which is not installed: pip install {what} in a clone of titan-disp"


def test_only_required_packages_are_named_as_missing(monkeypatch, capsys):
    """Other errors of imports keep their traceback, such as those of an extra."""

    def start_without(module):
        monkeypatch.setattr(cli, "main", partial(importlib.import_module, module))
        main()

    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(SystemExit, match="2"):
        start_without("torchtitan")
    assert capsys.readouterr().err == one_line("torchtitan") + "\n"
    # The CPU build of torch does not bring it.
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(SystemExit, match="2"):
        start_without("triton")
    assert capsys.readouterr().err == one_line("triton", "'.[cpu]'") + "\n"
    for module in ("titan_disp.gone", "lm_eval"):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ModuleNotFoundError):
            start_without(module)


def test_every_config_names_the_plugin():
    for config in {*(ROOT / "train_configs").rglob("*.toml")} - {
        *(ROOT / "train_configs" / "sweeps").rglob("*.toml")
    }:
        toml = tomli.loads(config.read_text())
        assert toml["job"]["custom_config_module"] == "titan_disp.job_config", config
        assert toml["experimental"]["custom_import"] == "titan_disp.plugin", config


def test_the_plugin_registers_once(monkeypatch):
    importlib.import_module("titan_disp.plugin")
    for name in MODELS:
        monkeypatch.delitem(titan._extra_train_specs, name)
    for name in ("titan_disp.plugin", "titan_disp.job_config"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ValueError, match="not registered"):
        titan.get_train_spec("qwen3_disp")
    # which is no error
    for again in (
        importlib.import_module,
        lambda name: importlib.reload(sys.modules[name]),
    ):
        again("titan_disp.plugin")
        assert {name: titan.get_train_spec(name).model_cls for name in MODELS} == {
            n: e.model_cls for n, e in MODELS.items()
        }


def test_the_device_type_reaches_modules_imported_before_the_plugin(monkeypatch):
    """TorchTitan's own trainer imports most of TorchTitan first, with the device type
    that it falls back to.
    """
    if not cpu.active():
        pytest.skip("TorchTitan knows the accelerator by itself")
    for module in (titan_utils, titan_metrics):
        monkeypatch.setattr(module, "device_type", "cuda")
    for module in (titan_utils, titan_metrics, titan_profiling):
        monkeypatch.setattr(module, "device_module", torch.cuda)
    monkeypatch.setattr(titan_utils, "get_peak_flops", lambda name: 312e12)
    importlib.reload(importlib.import_module("titan_disp.plugin"))
    assert {module.device_type for module in (titan_utils, titan_metrics)} == {"cpu"}
    modules = (titan_utils, titan_metrics, titan_profiling)
    assert {module.device_module.get_device_name() for module in modules} == {"CPU"}
    assert math.isnan(titan_utils.get_peak_flops("CPU"))  # no A100's
    # Ours take no copy: they may be imported before the plugin.
    assert not any(
        hasattr(module, "device_type") for module in (checkpoint, metrics, liveness)
    )


# ---- imports run one way: the picture of the packages in docs/code.md, held against every import

PACKAGE = ROOT / "titan_disp"
ABOVE_BOTH = "cli"  # the table of commands
TEXT = (ROOT / "docs" / "code.md").read_text()
PICTURE = re.search(
    r"## Code layout\n.*?\n\n((?:    [^\n]*\n)+)", TEXT, flags=re.DOTALL
)[1].splitlines()
# Package or module → its line in the picture, from the top.
LAYERS = {}
for depth, line in enumerate(line for line in PICTURE if "│" not in line):
    _, *names = re.split(" {2,}", line.strip())
    LAYERS |= dict.fromkeys(names, depth)


def place(module):
    """Return the longest name in the picture that a module without ``titan_disp.`` has
    or is inside of, or its own name.
    """
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in LAYERS), module)


def modules():
    """Every module but the empty packages, without ``titan_disp.``."""
    paths = {}
    for path in PACKAGE.rglob("*.py"):
        file = path.with_suffix("")
        if path.name == "__init__.py":
            file = path.parent
        paths[".".join(file.relative_to(PACKAGE).parts)] = path
    return {name: path for name, path in paths.items() if name not in ("", "lab")}


def imported(path):
    """Yield what a module imports of titan_disp, anywhere in it, without
    ``titan_disp.``.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.ImportFrom) and node.level), (
            f"{path}: a relative import"
        )
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "titan_disp"
        ):
            base = str(node.module).removeprefix("titan_disp").lstrip(".")
            packages = (PACKAGE / base.replace(".", "/")).is_dir()
            yield from (
                (f"{base}.{a.name}".lstrip(".") for a in node.names)
                if packages
                else (base,)
            )
        elif isinstance(node, ast.Import):
            yield from (
                a.name.removeprefix("titan_disp.")
                for a in node.names
                if a.name.startswith("titan_disp.")
            )


def test_imports_run_one_way():
    """Downwards in the picture, which has every module; and nothing but the commands
    imports the lab.
    """
    assert {place(module) for module in modules()} == LAYERS.keys()
    pairs = [
        (module, other)
        for module, path in modules().items()
        for other in imported(path)
    ]
    assert len(pairs) > 300
    assert [
        pair for pair in pairs if LAYERS[place(pair[1])] > LAYERS[place(pair[0])]
    ] == []
    lab = [module for module, other in pairs if other.split(".")[0] == "lab"]
    assert {module.split(".")[0] for module in lab} == {"lab", ABOVE_BOTH}


def test_nothing_imports_in_a_circle():
    """Neither packages of the picture, even on one line of it, nor modules of one
    package.
    """
    by_place = {}
    by_module = {}
    paths = modules()
    for module, path in paths.items():
        imports = {
            name if name in paths else name.rpartition(".")[0]
            for name in imported(path)
        }
        by_place.setdefault(place(module), set()).update(
            {place(name) for name in imports} - {place(module)}
        )
        by_module[module] = imports - {module}
    TopologicalSorter(by_place).prepare()  # raises CycleError
    TopologicalSorter(by_module).prepare()
