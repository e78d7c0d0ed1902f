"""This module is the command line ``titan-disp …``.

Each subcommand calls one function of another module.
"""

import codecs
import dataclasses
import inspect
import io
import locale
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from json import dumps
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_origin, get_type_hints

import docstring_parser
import tyro

from titan_disp.config import command_options as opts
from titan_disp.errors import EXIT_CODE, ConfigError, UserError, counted, did_you_mean
from titan_disp.job_config import check_dashes, unknown_option


def sample_data(options: opts.SampleOptions) -> str:
    from titan_disp.lab.sample import is_complete, write_sample

    folder = options.folder
    vocab_size = options.vocab_size
    if is_complete(folder):
        return f"{folder} already holds the sample corpus"
    counts = write_sample(folder, vocab_size)
    return (
        f"{folder}: {counts['train']} train and {counts['validation']} validation "
        f"documents, {counts['characters'] / 1e6:.1f} M characters, tokenizer of "
        f"{vocab_size} pieces in {folder / 'tokenizer'}"
    )


def data_index(options: opts.IndexOptions) -> None:
    from titan_disp.config.load import load_config
    from titan_disp.lab.indexing import index_data

    opts.check_least(options, workers=1)
    for line in index_data(load_config(options.argv), options.out, options.workers):
        print(line)


def data_check(options: opts.CheckOptions) -> int:
    from titan_disp.config.load import load_config
    from titan_disp.lab.data_check import check_data

    opts.check_least(options, ranks=1)
    checked = check_data(load_config(options.argv), options.ranks)
    print(dumps(dataclasses.asdict(checked)) if options.json else checked.page())
    return int(bool(checked.refused))


def data_fetch(options: opts.FetchOptions) -> str:
    from titan_disp.lab.fetch import fetch

    if left := fetch(options):
        print("\n".join(left), file=sys.stderr)
        raise ConfigError(
            f"{counted(len(left), 'file')} could not be fetched; run the same command "
            "again"
        )
    path = str(options.folder)
    return (
        f"{path} is complete: training.dataset = {options.dataset!r}, "
        f"training.dataset_path = {path!r}"
    )


def config(options: opts.ReferenceOptions) -> None:
    from titan_disp.config import reference

    if options.markdown and options.name is not None:
        raise ConfigError("--markdown prints the whole page: leave out the name")
    text = (
        reference.markdown()
        if options.markdown
        else reference.reference(options.name) + "\n"
    )
    print(text, end="", flush=True)


def plan(options: opts.PlanOptions) -> None:
    from titan_disp.cluster.plan import make_plan, render
    from titan_disp.config.load import load_config

    job_config = load_config(options.argv)
    made = make_plan(job_config, options, options.strict)
    found = []
    if options.suggest:
        from titan_disp.cluster.suggest import suggest

        found = suggest(job_config, options)
    if options.json:
        others = (
            {"suggestions": [dataclasses.asdict(one) for one in found]}
            if options.suggest
            else {}
        )
        print(dumps(dataclasses.asdict(made) | others))
        return
    print(render(made))
    for i, one in enumerate(found):
        print(f"{'suggested' if i else 'now':<15} {one.line()}")
    if len(found) == 1:
        print(
            f"{'suggested':<15} nothing: no other batch, mesh or checkpointing that "
            "was tried fits and is accepted"
        )


def preflight(options: opts.PreflightOptions) -> str:
    from titan_disp.cluster.preflight import preflight as run

    return "\n".join(run(options).lines())


def report(options: opts.ReportOptions) -> str:
    from titan_disp.lab.report.page import write_report
    from titan_disp.text import byte_size

    page = write_report(options.runs, options.out, options.evaluation)
    return f"{options.out}: {byte_size(page.stat().st_size, 3)}"


def export(options: opts.ExportOptions) -> str:
    from titan_disp.lab.export.export import export as run

    saved = run(options)
    dest = options.dest
    return (
        f"{saved.name} is in {dest}: load it with "
        f"AutoModelForCausalLM.from_pretrained({str(dest)!r})"
    )


def checkpoint(options: opts.CheckpointOptions) -> int:
    from titan_disp.lab.export.inventory import inventory

    damaged = False
    for found in inventory(options.run, options.step):
        print(found.line(), flush=True)
        damaged |= found.damaged
    return int(damaged)


def sweep_run(options: opts.SweepOptions) -> int:
    from titan_disp.lab.sweeps.definition import read_sweep

    sweep = read_sweep(options.file)
    if options.submit:
        from titan_disp.lab.sweeps.preparation import submit

        return submit(sweep, options)
    if options.dry_run:
        from titan_disp.lab.sweeps.preparation import preview

        print("\n".join(preview(sweep, options.nproc)))
        return 0
    from titan_disp.lab.sweeps.runner import run, summary

    results = run(sweep, options.jobs, options.nproc)
    print("\n".join(summary(results)))
    return int(any(result.outcome != "finished" for result in results))


def sweep_table(options: opts.SweepTableOptions) -> None:
    from titan_disp.lab.sweeps.comparison import write_table
    from titan_disp.lab.sweeps.definition import read_sweep

    print(
        write_table(
            read_sweep(options.file), options.out, options.metric, options.against
        ),
        end="",
    )


# the class of its options, and a function of them or where it is
Command = tuple[Any, Callable[[Any], Any] | str]
Commands = Mapping[str, Command | Mapping[str, Command]]
# The functions above import what they need, and the others are imported when they are
# called: help appears at once.
COMMANDS: Commands = {
    "init": (opts.InitOptions, "lab.init:init"),
    "sample-data": (opts.SampleOptions, sample_data),
    "data": {
        "check": (opts.CheckOptions, data_check),
        "digest": (opts.DigestOptions, "lab.digest:data_digest"),
        "fetch": (opts.FetchOptions, data_fetch),
        "index": (opts.IndexOptions, data_index),
    },
    "train": (opts.TrainOptions, "cluster.launch:launch"),
    "config": (opts.ReferenceOptions, config),
    "plan": (opts.PlanOptions, plan),
    "preflight": (opts.PreflightOptions, preflight),
    "selftest": (opts.SelftestOptions, "lab.selftest:selftest"),
    "submit": (opts.SubmitOptions, "cluster.launch:submit"),
    "condensation": (opts.CondensationOptions, "lab.inspection.command:condensation"),
    "report": (opts.ReportOptions, report),
    "export": (opts.ExportOptions, export),
    "checkpoint": (opts.CheckpointOptions, checkpoint),
    "generate": (opts.GenerateOptions, "lab.export.generate:generate"),
    "evaluate": (opts.EvaluateOptions, "lab.evaluate.evaluation:evaluate"),
    "sweep": {
        "run": (opts.SweepOptions, sweep_run),
        "table": (opts.SweepTableOptions, sweep_table),
    },
}
GROUPS = {
    "data": "Check, download or index a data set, or fingerprint the batches of a run, to see that two runs read the same.",
    "sweep": "Train or submit the runs of a sweep, or compare them.",
}


# tyro prints the boxes of help from the docstrings of options and their fields. It
# keeps the line breaks inside a field's description and then wraps the lines once more,
# so that lines end early. It does not wrap a subcommand's description at all. Both are
# settled here before tyro sees the text.


def description(options: type) -> str:
    return (inspect.getdoc(options) or "").partition("\n\nArgs:")[0]


def _join_lines(options: type) -> None:
    """Write the fields' descriptions, one line each, into the docstring of the class,
    which tyro prefers to theirs.
    """
    texts: dict[str, str] = {}
    for base in reversed(options.__mro__[:-1]):
        texts |= {
            one.arg_name: one.description or ""
            for one in docstring_parser.parse_from_object(base).params
        }
    fields = [f"    {name}: {' '.join(text.split())}" for name, text in texts.items()]
    options.__doc__ = "\n".join([f"{description(options)}\n\nArgs:", *fields])


def _wrapped(text: str) -> str:
    """Wrap paragraphs to the terminal, as one. tyro joins lines again unless they begin
    with a blank.
    """
    wrapper = textwrap.TextWrapper(
        shutil.get_terminal_size().columns - 4, break_on_hyphens=False
    )
    return textwrap.indent(wrapper.fill(" ".join(text.split())), "  ")


def _find(commands: Commands, args: Sequence[str], prog: str) -> Command | None:
    """Return the subcommand that ``args`` names, or None if they only lead to a list of
    subcommands.
    """
    if not args or args[0].startswith("-"):
        return None
    found = commands.get(args[0])
    if found is None:
        files = ["a TOML file"] if commands is COMMANDS["sweep"] else []
        hint = did_you_mean(args[0], commands)
        expected = ", ".join([*files, *commands])
        # tyro would call the word an unrecognized option
        raise ConfigError(
            f"{args[0]!r} is not a subcommand of {prog}{hint}; expected {expected}"
        )
    return (
        _find(found, args[1:], f"{prog} {args[0]}")
        if isinstance(found, Mapping)
        else found
    )


def _app(commands: Commands, listed: bool) -> tyro.extras.SubcommandApp:
    app = tyro.extras.SubcommandApp()
    for name, member in commands.items():
        if isinstance(member, Mapping):
            app.command(_app(member, listed), name=name, help=_wrapped(GROUPS[name]))
        else:
            text = description(member[0])
            summary = " ".join(text.partition("\n\n")[0].split())  # the first paragraph
            app.command(
                member[0], name=name, help=summary if listed else _wrapped(text)
            )
    return app


def run(args: Sequence[str], prog: str) -> None:
    """Call the function that ``args`` names with its options.

    It may return a text, or its exit status.
    """
    command = _find(COMMANDS, args, prog)
    if command is not None:
        _join_lines(command[0])
        args = _collected(args, command[0])
        if issubclass(command[0], opts.ConfigOptions):
            args = _split_overrides(args, command[0])
    about = _wrapped(
        "Pre-train language models with the dispersion loss, and measure their "
        "condensation. titan-disp --version prints the version."
    )
    # Without pairs, help shows --json, and not "--json, --no-json"
    config = (tyro.conf.FlagCreatePairsOff,)
    options = _app(COMMANDS, listed=command is None).cli(
        prog=prog, description=about, args=args, config=config
    )
    assert command is not None  # otherwise, tyro has printed help or an error
    function = command[1]
    result = (
        resolve_name(f"titan_disp.{function}")
        if isinstance(function, str)
        else function
    )(options)
    if isinstance(result, str):
        print(result)
    elif isinstance(result, int):
        raise SystemExit(result)


def _collected(argv: Sequence[str], options: type) -> list[str]:
    """Return the words of a command line. An option of several values that is repeated
    has all of them where it stands first, because tyro would keep the last ones only.

    Raises ConfigError if another option of the class ``options`` is repeated. Options
    for keys of the config have a dot, and are passed on.
    """
    types = get_type_hints(options)
    groups: list[list[str]] = [[]]  # an option with its values each
    group_of: dict[str, list[str]] = {}
    for word in argv:
        option, equals, value = word.partition("=")
        name = option[2:].replace("-", "_")
        if not word.startswith("--") or word == "--":
            groups[-1].append(word)
        elif name not in group_of or name not in types:
            group_of[name] = [word]
            groups.append(group_of[name])
        elif get_origin(types[name]) is tuple:
            # The words that follow are further values of the first group.
            groups.append(group_of[name])
            groups[-1].extend([value] if equals else [])
        else:
            raise ConfigError(f"{option} stands there twice, expected once")
    merged = {id(group): group for group in groups}
    return [word for group in merged.values() for word in group]


def _split_overrides(argv: Sequence[str], options: type) -> list[str]:
    """Move options for keys of the config, which have a dot, behind ``--``, so that
    tyro passes them on unchanged.

    Raises ConfigError for another option that the class ``options`` does not have.
    """
    names = {field.name for field in dataclasses.fields(options)} | {"help"}
    own: list[str] = []
    theirs: list[str] = []
    # a word that is not an option (``0.5``, ``-1``) belongs to the previous one
    current = own
    for word in argv:
        check_dashes(word)
        if word.startswith("--"):
            name, _, _ = word[2:].replace("-", "_").partition("=")
            current = theirs if "." in name else own
            if current is own and name not in names:
                raise unknown_option(name, names)
        current.append(word)
    return [*own, *(["--", *theirs] if theirs else [])]


def _begins_with_a_file(words: Sequence[str]) -> bool:
    """Return whether the words after ``sweep`` are those of ``sweep run``: a file, or
    options before it.
    """
    if not words or words[0] in ("run", "table", "-h", "--help"):
        return False
    # A word with a dot or a slash means a file even if there is none, for the sake of
    # the message.
    return (
        words[0].startswith("-")
        or bool(set("./") & set(words[0]))
        or Path(words[0]).is_file()
    )


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Help and tables have characters that a terminal may not have.
        sys.stdout.reconfigure(errors="replace")
    argv = sys.argv[1:]
    if argv[:1] == ["sweep"] and _begins_with_a_file(argv[1:]):
        argv.insert(1, "run")
    try:
        encoding = locale.getpreferredencoding(False)
        if codecs.lookup(encoding).name != "utf-8":  # torch fails while it is imported
            raise ConfigError(
                f"Python reads and writes files as {encoding} here, expected UTF-8: "
                "set PYTHONUTF8=1, or LC_ALL=C.UTF-8"
            )
        run(argv, prog="titan-disp")
    except UserError as error:
        print(f"titan-disp: error: {error}", file=sys.stderr)
        sys.exit(EXIT_CODE)
    except BrokenPipeError:
        # In `titan-disp config | head`, head stops reading. Python would print an error
        # when it closes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
