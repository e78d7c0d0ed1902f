"""Step 1 of slurm/README.md in a fresh home: its commands as they stand there."""

import os
import re
import subprocess
import sys
import sysconfig

import pytest

from tests.cluster_of_one import ROOT


def commands(heading):
    """The shell blocks of a section of the page, in order."""
    page = (ROOT / "slurm" / "README.md").read_text()
    section = re.split(r"^## ", page.split(heading, 1)[1], maxsplit=1, flags=re.M)[0]
    return [re.sub(r"^  ", "", block, flags=re.M) for block in re.findall(r"```bash\n(.*?)```", section, flags=re.S)]


@pytest.mark.slow
def test_an_environment_in_a_fresh_home(tmp_path):
    """With a torch of the site's; its packages stand in for what pip would fetch, and the container lines need a cluster."""
    home, local = tmp_path / "home", tmp_path / "local"
    for folder in (home, local):
        folder.mkdir()
    # `module load` of a site: an interpreter that sees torch, and what else this one has.
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
    install, archive = commands("## 1. An environment")
    loaded = f"module() {{ echo module $*; export PYTHONPATH={packages}; }}\nset -e\n"
    shell = ["bash", "-c", loaded + install + archive + 'echo "archive: $TITAN_DISP_ENV_ARCHIVE"']
    done = subprocess.run(shell, env=environment, capture_output=True, text=True, cwd=home)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"archive: {home}/titan-disp-env.tar" in done.stdout
    import torch

    assert (home / "torch.txt").read_text() == f"torch=={torch.__version__}\n"
    assert not list(home.glob("titan-disp-env/lib/python3*/site-packages/torch"))
    assert (home / "titan-disp-env" / "bin" / "titan-disp").exists()
    assert not (home / "titan-disp" / "bin").exists()  # the checkout and the environment are two folders

    # On a node: unpacked elsewhere, with the first one out of the way.
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
    """pip stops where the site's torch does not do: the constraint of the page, with a torch that is too old."""
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
