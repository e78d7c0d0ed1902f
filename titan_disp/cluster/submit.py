"""``titan-disp submit`` prints the plan of a run and submits it with sbatch."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_disp.cluster.plan import make_plan, render
from titan_disp.config.load import load_config
from titan_disp.errors import ConfigError

SCRIPT = "pretrain.sbatch"
# If one of these is set, the nodes have their own Python, from a container or an archive.
OTHER_PYTHON = ("TITAN_DISP_PYTHON", "TITAN_DISP_PREFIX", "TITAN_DISP_SRUN_ARGS", "TITAN_DISP_ENV_ARCHIVE")


def find_script(name: str = SCRIPT) -> Path:
    """Find a script of slurm/ in the checkout of this package, or in the current folder.

    Raises:
        ConfigError: The package is installed without its checkout, and the current folder is not one.
    """
    script = Path("slurm") / name
    for root in (Path(__file__).parents[2], Path.cwd()):
        if (root / script).is_file():
            return root / script
    raise ConfigError(f"{script} is not here: run this in a checkout of titan-disp, which holds the SLURM scripts")


def command(
    arguments: Sequence[str], nodes: int, gpus_per_node: int, site: str, options: Sequence[str], script: str = SCRIPT
) -> list[str]:
    """Build the sbatch command line.

    Args:
        arguments: arguments of the script.
        nodes: number of nodes.
        gpus_per_node: GPUs to request per node; 0 requests none.
        site: name of a file in slurm/sites without .sh, or a path.
        options: further options of sbatch without dashes, as NAME=VALUE or NAME.
        script: name of the script in slurm/.
    """
    given = [f"--{option.lstrip('-')}" for option in options]
    gpus = [f"--gpus-per-node={gpus_per_node}"] if gpus_per_node else []
    exported = ["ALL", f"TITAN_DISP_SITE={site}"]
    if not any(os.environ.get(name) for name in OTHER_PYTHON):
        exported.append(f"TITAN_DISP_PYTHON={sys.executable}")
    return [
        *("sbatch", f"--nodes={nodes}", *gpus, *given),
        *(f"--export={','.join(exported)}", str(find_script(script)), *arguments),
    ]


def send(line: Sequence[str], dry_run: bool) -> int:
    """Print an sbatch command, run it unless this is a dry run, and return its exit status.

    Raises:
        ConfigError: This machine has no sbatch.
    """
    print(f"\n{shlex.join(line)}", flush=True)
    if dry_run:
        return 0
    try:
        return subprocess.run(line, env=os.environ).returncode
    except FileNotFoundError as error:
        raise ConfigError("there is no sbatch on this machine: submit from a login node, or use --dry-run") from error


def submit(
    config: str,
    overrides: list[str],
    nodes: int,
    gpus_per_node: int,
    gpu: str,
    site: str,
    options: list[str],
    dry_run: bool,
) -> int:
    """Print the plan, submit the run, and return sbatch's exit status. ``titan-disp submit`` describes the arguments.

    Raises:
        ConfigError: The run would fail at its start, or this machine has no sbatch or no scripts.
    """
    job_config = load_config(["--job.config_file", config, *overrides])
    print(render(make_plan(job_config, nodes, max(1, gpus_per_node), gpu)), flush=True)
    return send(command([config, *overrides], nodes, gpus_per_node, site, options), dry_run)
