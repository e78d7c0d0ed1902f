"""These tests run the commands of step 1 of slurm/README.md unchanged, in a fresh home folder."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest

from tests.command_line import ROOT


def commands(heading):
    """Return the shell blocks of a section of the page in order."""
    page = (ROOT / "slurm" / "README.md").read_text()
    section = re.split(r"^## ", page.split(heading, 1)[1], maxsplit=1, flags=re.M)[0]
    return [re.sub(r"^  ", "", block, flags=re.M) for block in re.findall(r"```bash\n(.*?)```", section, flags=re.S)]


@pytest.mark.slow
def test_an_environment_in_a_fresh_home(tmp_path):
    """The site has torch. Its packages replace downloads of pip, and the container lines have a test of their own."""
    home, local = tmp_path / "home", tmp_path / "local"
    for folder in (home, local):
        folder.mkdir()
    # A site's `module load` gives an interpreter with torch and the other packages of this one.
    packages = sysconfig.get_paths()["purelib"]
    environment = {
        "HOME": str(home),
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
        "TITAN_DISP_URL": str(ROOT),
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads 0 as "no isolation"
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    install, archive, *_ = commands("## 1. An environment")
    loaded = f"module() {{ echo module $*; export PYTHONPATH={packages}; }}\nset -e\n"
    shell = ["bash", "-c", loaded + install + archive + 'echo "archive: $TITAN_DISP_ENV_ARCHIVE"']
    done = subprocess.run(shell, env=environment, capture_output=True, text=True, cwd=home)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"archive: {home}/titan-disp-env.tar" in done.stdout
    import torch

    assert (home / "torch.txt").read_text() == f"torch=={torch.__version__}\n"
    assert not list(home.glob("titan-disp-env/lib/python3*/site-packages/torch"))
    assert (home / "titan-disp-env" / "bin" / "titan-disp").exists()
    assert not (home / "titan-disp" / "bin").exists()  # the checkout and the environment are different folders

    # A node unpacks the environment elsewhere, so the first one is moved away.
    subprocess.run(["cp", home / "titan-disp-env.tar", local / "titan-disp-7.tar"], check=True)
    (home / "titan-disp-env").rename(home / "gone")
    node = {**environment, "SLURM_JOB_ID": "7", "PYTHONPATH": packages}
    subprocess.run(["bash", ROOT / "slurm" / "unpack.sh", local / "titan-disp-7.tar"], check=True, env=node)
    python = local / "titan-disp-7" / "bin" / "python"
    code = "import sys, importlib.util; print(sys.prefix, importlib.util.find_spec('titan_disp').origin)"
    told = subprocess.run([python, "-c", code], env=node, capture_output=True, text=True, check=True, cwd="/").stdout
    prefix, origin = told.split()
    assert prefix == str(local / "titan-disp-7")
    assert origin.startswith(prefix)


def test_an_older_torch_is_never_joined_by_a_second(tmp_path):
    """With the page's constraint, pip stops if the site's torch is too old."""
    (tmp_path / "torch.txt").write_text("torch==2.4.0\n")
    project = tmp_path / "project"
    project.mkdir()
    dependencies = re.search(r'"torch[^"]*"', (ROOT / "pyproject.toml").read_text())[0]
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        f'[project]\nname = "p"\nversion = "1"\ndependencies = [{dependencies}]\n[tool.setuptools]\npackages = []\n'
    )
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-build-isolation", "--no-index", str(project)]
    done = subprocess.run([*command, "--constraint", str(tmp_path / "torch.txt")], capture_output=True, text=True)
    assert done.returncode != 0
    assert "constraint" in done.stdout + done.stderr
    assert "torch" in done.stdout + done.stderr


def copied_into_the_image(recipe):
    """Source and destination of each thing that a recipe copies from the checkout."""
    text = (ROOT / "slurm" / recipe).read_text()
    if recipe == "Containerfile":
        lines = [line.split()[1:] for line in text.splitlines() if line.startswith("COPY ")]
        return {(source, words[-1]) for words in lines for source in words[:-1]}
    section = re.search(r"^%files\n(.*?)^%", text, flags=re.M | re.S)[1]
    return {tuple(line.split()) for line in section.splitlines() if line.startswith(" ")}


def test_both_recipes_copy_the_same_files():
    files = copied_into_the_image("titan-disp.def")
    assert files == copied_into_the_image("Containerfile")
    assert all((ROOT / source).exists() for source, _ in files)


def test_the_copied_files_suffice_to_install(tmp_path, monkeypatch):
    """In a folder that has nothing but them; this Python's packages stand in for the image's and pip's."""
    for source, destination in copied_into_the_image("titan-disp.def"):
        target = tmp_path / destination.lstrip("/")
        target = target / os.path.basename(source) if destination.endswith("/") else target
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, target)
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for name, value in {"TARGET": tmp_path / "image", "NO_BUILD_ISOLATION": 0, "NO_DEPS": 1, "NO_INDEX": 1}.items():
        monkeypatch.setenv(f"PIP_{name}", str(value))  # pip reads NO_BUILD_ISOLATION=0 as "no isolation"
    done = subprocess.run(["sh", tmp_path / "opt/titan-disp/install_in_image.sh"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    package = ROOT / "titan_disp"
    for path in package.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert (tmp_path / "image" / "titan_disp" / path.relative_to(package)).is_file(), path


def test_the_container_commands(tmp_path):
    """With stand-ins for the engines: the recipes and their arguments exist, and the variables split as they should."""
    *_, apptainer, pyxis = commands("## 1. An environment")
    said = 'said() { printf "%s|" "$@" >>"$HOME/said"; echo >>"$HOME/said"; }\n'
    engines = "".join(f'{name}() {{ said {name} "$@"; }}\n' for name in ("apptainer", "podman", "enroot"))
    told = 'said prefix $TITAN_DISP_PREFIX\nsaid srun $TITAN_DISP_SRUN_ARGS\nsaid python "$TITAN_DISP_PYTHON"\n'
    script = f"set -eu\n{said}{engines}{apptainer}\n{pyxis}\n{told}"
    subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]}, check=True
    )
    lines = [line.rstrip("|").split("|") for line in (tmp_path / "said").read_text().splitlines()]
    images = [f"{tmp_path}/titan-disp.{ending}" for ending in ("sif", "sqsh")]
    assert lines == [
        ["apptainer", "build", "--build-arg", "base=IMAGE", images[0], "slurm/titan-disp.def"],
        ["podman", "build", "--build-arg", "BASE=IMAGE", "-t", "titan-disp", "-f", "slurm/Containerfile", "."],
        ["enroot", "import", "-o", images[1], "podman://titan-disp"],
        ["prefix", "apptainer", "exec", "--nv", "--bind", "/scratch", images[0]],
        [
            *("srun", f"--container-image={images[1]}", f"--container-mounts={tmp_path}:{tmp_path},/scratch:/scratch"),
            f"--container-workdir={ROOT}",
        ],
        ["python", "python3"],
    ]
    assert re.search(r"^ +base=", (ROOT / "slurm/titan-disp.def").read_text(), re.M)
    assert re.search(r"^ARG BASE=", (ROOT / "slurm/Containerfile").read_text(), re.M)
