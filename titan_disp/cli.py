"""``titan-disp …``: thin; each subcommand calls one function of a room."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from titan_disp.errors import EXIT_CODE, ConfigError

app = tyro.extras.SubcommandApp()


@app.command(name="sample-data")
def sample_data(folder: Annotated[Path, tyro.conf.Positional], vocab_size: int = 2048) -> None:
    """Write a C4-shaped sample corpus and a SentencePiece tokenizer from the texts of this Python installation.

    Args:
        folder: where to write; an earlier sample there is kept as it is.
        vocab_size: pieces of the tokenizer.
    """
    from titan_disp.data.sample import is_complete, write_sample

    if is_complete(folder):
        print(f"{folder} holds the sample corpus already")
        return
    try:
        counts = write_sample(folder, vocab_size)
    except FileExistsError as error:
        raise ConfigError(str(error)) from error
    print(
        f"{folder}: {counts['train']} train and {counts['validation']} validation documents, "
        f"{counts['characters'] / 1e6:.1f} M characters, tokenizer of {vocab_size} pieces in {folder / 'tokenizer'}"
    )


@app.command
def train(
    config: Annotated[str, tyro.conf.Positional],
    overrides: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    nproc: int | None = None,
) -> None:
    """Train on this machine: torchrun around ``-m titan_disp.train``.

    Args:
        config: TOML file.
        overrides: TorchTitan's options, such as --training.steps 20 --dispersion.no-enabled.
        nproc: ranks; default: one per GPU, or 1 without.
    """
    from titan_disp.launch import launch

    raise SystemExit(launch(config, list(overrides), nproc))


def _split_overrides(argv: Sequence[str]) -> list[str]:
    """Everything dotted is TorchTitan's: moved behind ``--`` so that tyro takes it as it stands."""
    own: list[str] = []
    theirs: list[str] = []
    rest = iter(argv)
    for arg in rest:
        if arg.startswith("--") and "." in arg.partition("=")[0]:
            theirs.append(arg)
            in_override = True
        elif arg.startswith("-"):
            own.append(arg)
            in_override = False
        else:
            # A bare word belongs to the option before it.
            (theirs if theirs and in_override else own).append(arg)
    return [*own, *(["--", *theirs] if theirs else [])]


def main() -> None:
    argv = sys.argv[1:]
    if argv[:1] == ["train"]:
        argv = _split_overrides(argv)
    os.environ.setdefault("TQDM_MININTERVAL", "1")
    try:
        app.cli(prog="titan-disp", args=argv)
    except ConfigError as error:
        print(f"titan-disp: error: {error}", file=sys.stderr)
        sys.exit(EXIT_CODE)


if __name__ == "__main__":
    main()
