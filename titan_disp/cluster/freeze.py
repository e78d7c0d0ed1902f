"""A launch folder, RUN/launch/NAME, has copies of the files that a job uses, so that
edits do not change a queued run (docs/run_folder.md).
"""

import argparse
import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_disp.config.load import expanded, load_config
from titan_disp.config.types import JobConfig
from titan_disp.errors import ConfigError, one_line_at_the_end
from titan_disp.run.folder import versions, writing

# Begins the line that has the launch folder as JSON (slurm/supervise.py reads it)
LAUNCH = "titan-disp-launch: "
PACKAGE = Path(__file__).parents[1]
# in a checkout, this is a link to its folder slurm
SCRIPTS = Path(__file__).with_name("slurm").resolve()


def code_hash() -> str:
    """Return a hash of the source code of titan_disp."""
    digest = hashlib.sha256()
    # The scripts are left out, because only an installed package has them as files. In
    # a checkout, they are behind a link that rglob does not follow.
    for file in sorted(
        f for f in PACKAGE.rglob("*.py") if "slurm" not in f.relative_to(PACKAGE).parts
    ):
        digest.update(f"{file.relative_to(PACKAGE)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def freeze(
    job_config: JobConfig,
    argv: Sequence[str],
    name: str,
    sbatch: Sequence[str] = (),
    site: Path | None = None,
) -> Path:
    """Write the launch folder ``name`` of a run, and return it.

    ``argv``: "--job.config_file", the config and the overrides. ``sbatch``: the options
    of sbatch, if known. ``site``: the file with the site's settings. If it is None,
    slurm/supervise.py copies the file that it was started with. Only the owner may read
    or change the launch folder, whatever the umask. Raises ConfigError if the run folder
    is not writable, or if a requeue of the job would be refused.
    """
    c = job_config.checkpoint
    if c.enable and c.load_step != -1 and not c.load_only:
        raise ConfigError(
            f"checkpoint.load_step is {c.load_step}, expected -1 in a job: it would "
            "be refused at the first requeue, because there are newer checkpoints. Copy "
            f"RUN/checkpoint/step-{c.load_step} into a new run folder, and leave "
            "load_step out"
        )
    if c.enable and "train_state" in c.exclude_from_loading and not c.load_only:
        raise ConfigError(
            "checkpoint.exclude_from_loading has 'train_state' in a job: it would be "
            "refused at the first requeue, which would begin at step 1 again. Leave it "
            "out, or set checkpoint.load_only = true"
        )
    run = Path(job_config.job.dump_folder).absolute()
    folder = run / "launch" / name
    partial = folder.with_name(f"{name}.partial-{os.getpid()}")
    with writing(run):
        folder.parent.mkdir(parents=True, exist_ok=True)
        warn_of_writers(run)
        partial.mkdir(mode=0o700)
        # a site's file may include another site's file
        (partial / "slurm" / "sites").mkdir(parents=True)
        for file in (*SCRIPTS.glob("*.*"), *SCRIPTS.glob("sites/*.sh")):
            # The mode is not copied, because an installation may be read-only.
            if file.suffix in (".py", ".sh", ".sbatch"):
                shutil.copyfile(file, partial / "slurm" / file.relative_to(SCRIPTS))
        if site is not None:
            shutil.copyfile(site, partial / "slurm" / "site.sh")
        shutil.copyfile(expanded("job.config_file", argv[1]), partial / "config.toml")
        (partial / "resolved.json").write_text(
            json.dumps(job_config.to_dict(), indent=2)
        )
        launch = {
            "run": os.fspath(run),
            # The last --job.dump_folder counts. It is absolute, because the job may run
            # in another folder (sbatch --chdir).
            "argv": [
                os.fspath(folder / "config.toml"),
                *argv[2:],
                "--job.dump_folder",
                os.fspath(run),
            ],
            "given": argv[1],
            "sbatch": list(sbatch),
            **installed(),
        }
        text = json.dumps(launch, indent=2, ensure_ascii=False)
        # A path may have any bytes.
        (partial / "launch.json").write_bytes(text.encode(errors="surrogateescape"))
        partial.rename(folder)
    return folder


def warn_of_writers(run: Path) -> None:
    """Print a warning if every user of the machine may change a run's files."""
    mode = run.stat().st_mode
    if mode & stat.S_IWOTH:
        print(
            f"titan-disp: warning: every user may change the files in {run} (its mode "
            f"is {stat.S_IMODE(mode):o}), and so what the run continues from. To keep "
            f"others out: chmod o-w {run}",
            file=sys.stderr,
            flush=True,
        )


def earlier(run: Path, name: str) -> Path | None:
    """Return the newest launch folder of this job, or None if the start ``name``
    (JOB.RESTARTS.ID) is the job's first.

    Folders of other users, who may share the run folder, do not count.
    """
    job, restarts, _ = name.split(".")
    files = [
        file
        for file in run.glob(f"launch/{job}.*.*/launch.json")
        if ".partial-" not in file.parent.name
        and file.parent.lstat().st_uid == os.geteuid()
    ]
    if not files or restarts == "0":
        return None
    return max(files, key=lambda file: file.stat().st_mtime).parent


def installed() -> dict[str, Any]:
    return {"code": code_hash(), "packages": versions()}


def installation_changes(config: str | Path) -> list[str]:
    """Return what was changed since the launch folder of a config was written: a text
    for each changed package, and a text if the code changed. Return [] if the config is
    in no launch folder.
    """
    file = Path(config).with_name("launch.json")
    if not file.is_file():
        return []
    launch = json.loads(file.read_text(errors="surrogateescape"))
    current = installed()
    changed = [
        f"{name} {launch['packages'].get(name)} then, {version} now"
        for name, version in current["packages"].items()
        if launch["packages"].get(name) != version
    ]
    if launch["code"] != current["code"]:
        changed.append("the code of titan_disp")
    return changed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    args, rest = parser.parse_known_args()
    with one_line_at_the_end():
        job_config = load_config(rest)
        run = Path(job_config.job.dump_folder).absolute()
        folder = earlier(run, args.name) or freeze(job_config, rest, args.name)
    # Letters such as é are not escaped as \u00e9. In Python 3.6 with the locale C,
    # slurm/supervise.py can print the bytes of such letters, but not decoded letters.
    sys.stdout.buffer.write(
        f"{LAUNCH}{json.dumps(os.fspath(folder), ensure_ascii=False)}\n".encode(
            errors="surrogateescape"
        )
    )


if __name__ == "__main__":
    main()
