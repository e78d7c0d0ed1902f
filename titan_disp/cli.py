"""``titan-disp …``: thin; each subcommand calls one function of a room."""

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
    """Everything dotted is TorchTitan's: moved behind ``--`` so that tyro takes it as it stands.

    A word that is no option (``0.5``, ``-1``) belongs to the option before it.
    """
    own: list[str] = []
    theirs: list[str] = []
    current = own
    for arg in argv:
        if arg.startswith("--"):
            current = theirs if "." in arg.partition("=")[0] else own
        current.append(arg)
    return [*own, *(["--", *theirs] if theirs else [])]


def main() -> None:
    argv = sys.argv[1:]
    if argv[:1] == ["train"]:
        argv = _split_overrides(argv)
    try:
        app.cli(prog="titan-disp", args=argv)
    except ConfigError as error:
        print(f"titan-disp: error: {error}", file=sys.stderr)
        sys.exit(EXIT_CODE)


if __name__ == "__main__":
    main()
