"""The commands of step 1 of slurm/README.md, unchanged, in a fresh home folder."""

import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest

from tests.command_line import ROOT
from tests.pages import blocks

# A site has torch. Its packages replace downloads of pip, which reads
# NO_BUILD_ISOLATION=0 as "no isolation".
OFFLINE = {
    "PIP_NO_BUILD_ISOLATION": "0",
    "PIP_NO_DEPS": "1",
    "PIP_NO_INDEX": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}
PATH = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
PYCACHE = shutil.ignore_patterns("__pycache__")


def commands(heading):
    page = (ROOT / "slurm" / "README.md").read_text()
    return blocks(page.split(heading, 1)[1].split("\n## ")[0], "bash")


@pytest.mark.slow
def test_an_environment_in_a_fresh_home(tmp_path):
    home = tmp_path / "home"
    local = tmp_path / "local"
    home.mkdir()
    local.mkdir()
    # A site's `module load` gives an interpreter with torch and the other packages of
    # this one.
    packages = sysconfig.get_paths()["purelib"]
    environment = {"HOME": str(home), "PATH": PATH, **OFFLINE}
    install, archive, *_ = commands("## 1. An environment")
    site = f"module() {{ echo module $*; export PYTHONPATH={packages}; }}\nset -e\n"
    site += f"git clone --quiet {ROOT} titan-disp && cd titan-disp\n"
    shell = [
        "bash",
        "-c",
        site + install + archive + 'echo "archive: $TITAN_DISP_ENV_ARCHIVE"',
    ]
    done = subprocess.run(
        shell, env=environment, capture_output=True, text=True, cwd=home
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"archive: {home}/titan-disp-env.tar" in done.stdout
    import torch

    assert (home / "torch.txt").read_text() == f"torch=={torch.__version__}\n"
    assert not list(home.glob("titan-disp-env/lib/python3*/site-packages/torch"))
    assert (home / "titan-disp-env" / "bin" / "titan-disp").exists()
    # the checkout and the environment are different folders
    assert not (home / "titan-disp" / "bin").exists()

    # A node unpacks the environment elsewhere, so the first one is moved away.
    shutil.copy(home / "titan-disp-env.tar", local / "titan-disp-7.tar")
    (home / "titan-disp-env").rename(home / "gone")
    node = {**environment, "SLURM_JOB_ID": "7", "PYTHONPATH": packages}
    subprocess.run(
        ["bash", ROOT / "slurm" / "unpack.sh", local / "titan-disp-7.tar"],
        check=True,
        env=node,
    )
    code = "import sys, importlib.util; print(sys.prefix, importlib.util.find_spec('titan_disp').origin)"
    command = [local / "titan-disp-7" / "bin" / "python", "-c", code]
    prefix, origin = subprocess.check_output(
        command, env=node, text=True, cwd="/"
    ).split()
    assert prefix == str(local / "titan-disp-7")
    assert origin.startswith(prefix)


def copied_into_the_image(recipe):
    text = (ROOT / "slurm" / recipe).read_text()
    if recipe == "Containerfile":
        lines = [
            line.split()[1:] for line in text.splitlines() if line.startswith("COPY ")
        ]
        return {(source, words[-1]) for words in lines for source in words[:-1]}
    section = re.search(r"^%files\n(.*?)^%", text, flags=re.M | re.S)[1]
    return {
        tuple(line.split()) for line in section.splitlines() if line.startswith(" ")
    }


@pytest.mark.slow
def test_the_copied_files_suffice_to_install(tmp_path, monkeypatch):
    """In a folder that has nothing but them; this Python's packages stand in for the
    image's and pip's.
    """
    files = copied_into_the_image("titan-disp.def")
    assert files == copied_into_the_image("Containerfile")
    for source, destination in files:
        target = tmp_path / destination.lstrip("/")
        target = (
            target / os.path.basename(source) if destination.endswith("/") else target
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = (
            functools.partial(shutil.copytree, ignore=PYCACHE)
            if (ROOT / source).is_dir()
            else shutil.copy
        )
        copy(ROOT / source, target)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for name, value in {
        **OFFLINE,
        "PATH": PATH,
        "PIP_TARGET": str(tmp_path / "image"),
    }.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(
        ["sh", tmp_path / "opt/titan-disp/install_in_image.sh"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    package = ROOT / "titan_disp"  # whose folder of scripts is a link
    files = [
        path
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    for path in (*files, package / "cluster" / "slurm" / "sites" / "generic.sh"):
        assert (
            tmp_path / "image" / "titan_disp" / path.relative_to(package)
        ).is_file(), path


def test_the_container_commands(tmp_path):
    """With stand-ins for the engines: the recipes and their arguments exist, and the
    variables split as they should.
    """
    *_, apptainer, pyxis = commands("## 1. An environment")
    said = 'said() { printf "%s|" "$@" >>"$HOME/said"; echo >>"$HOME/said"; }\n'
    engines = "".join(
        f'{name}() {{ said {name} "$@"; }}\n'
        for name in ("apptainer", "podman", "enroot")
    )
    told = 'said prefix $TITAN_DISP_PREFIX\nsaid srun $TITAN_DISP_SRUN_ARGS\nsaid python "$TITAN_DISP_PYTHON"\n'
    script = f"set -eu\n{said}{engines}{apptainer}\n{pyxis}\n{told}"
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment, check=True)
    image = f"{tmp_path}/titan-disp"
    mounts = f"--container-mounts={tmp_path}:{tmp_path},/scratch:/scratch|--container-workdir={ROOT}|"
    assert (tmp_path / "said").read_text().splitlines() == [
        f"apptainer|build|--build-arg|base=IMAGE|{image}.sif|slurm/titan-disp.def|",
        "podman|build|--build-arg|BASE=IMAGE|-t|titan-disp|-f|slurm/Containerfile|.|",
        f"enroot|import|-o|{image}.sqsh|podman://titan-disp|",
        f"prefix|apptainer|exec|--nv|--bind|/scratch|{image}.sif|",
        f"srun|--container-image={image}.sqsh|{mounts}",
        "python|python3|",
    ]
    assert re.search(r"^ +base=", (ROOT / "slurm/titan-disp.def").read_text(), re.M)
    assert re.search(r"^ARG BASE=", (ROOT / "slurm/Containerfile").read_text(), re.M)
