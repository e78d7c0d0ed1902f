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
from itertools import chain
from json import dumps
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_origin, get_type_hints

import docstring_parser
import tyro

from titan_disp.config import command_options as opts
from titan_disp.errors import EXIT_CODE, ConfigError, UserError, counted, did_you_mean
from titan_disp.job_config import check_dashes, check_expansion, unknown_option


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
    if options.json:
        print(dumps(dataclasses.asdict(checked)))
    else:
        print(checked.page())
    return int(bool(checked.refused))


def data_fetch(options: opts.FetchOptions) -> str:
    from titan_disp.lab.fetch import fetch

    if problems := fetch(options):
        print("\n".join(problems), file=sys.stderr)
        raise ConfigError(
            f"{counted(len(problems), 'file')} could not be fetched; run the same "
            "command again"
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
    if options.markdown:
        print(reference.markdown(), end="", flush=True)
    else:
        print(reference.reference(options.name), flush=True)


def plan(options: opts.PlanOptions) -> None:
    from titan_disp.cluster.plan import make_plan, render
    from titan_disp.config.load import load_config

    job_config = load_config(options.argv)
    run_plan = make_plan(job_config, options, options.strict)
    settings = []
    if options.suggest:
        from titan_disp.cluster.suggest import suggest

        settings = suggest(job_config, options)
    if options.json:
        fields = dataclasses.asdict(run_plan)
        if options.suggest:
            fields["suggestions"] = list(map(dataclasses.asdict, settings))
        print(dumps(fields))
        return
    print(render(run_plan))
    for i, setting in enumerate(settings):
        print(f"{'suggested' if i else 'now':<15} {setting.line()}")
    if len(settings) > 1:
        print(
            f"{'':<15} (These steps include what activation checkpointing computes "
            "again, unlike the plan's step. The estimate does not know that some "
            "kernels are slow for small batches.)"
        )
    if len(settings) == 1:
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
    for saved in inventory(options.run, options.step):
        print(saved.line(), flush=True)
        damaged |= saved.damaged
    return int(damaged)


def sweep_run(options: opts.SweepOptions) -> int:
    from titan_disp.lab.sweeps.definition import read_sweep

    sweep = read_sweep(options.file)
    if options.submit:
        from titan_disp.lab.sweeps.preparation import submit

        return submit(sweep, options)
    from titan_disp.lab.sweeps.runner import dry_run, run, summary

    if options.dry_run:
        return dry_run(sweep, options.nproc)
    results = run(sweep, options.jobs, options.nproc)
    print("\n".join(summary(results)))
    return int(any(result.outcome != "finished" for result in results))


def sweep_table(options: opts.SweepTableOptions) -> None:
    from titan_disp.lab.sweeps.comparison import write_table
    from titan_disp.lab.sweeps.definition import read_sweep

    print(write_table(read_sweep(options.file), options), end="")


# (class of the options, function that takes them). The function may be a string: its
# module, without "titan_disp.", and its name.
Command = tuple[Any, Callable[[Any], Any] | str]
Commands = Mapping[str, Command | Mapping[str, Command]]
# The functions above import what they need when they are called, and functions that are
# named by a string are imported only then. Help therefore appears at once.
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


# tyro prints help from the docstrings of option classes and their fields. It keeps the
# line breaks inside a field's description and wraps the lines again, so that some lines
# are short. It does not wrap a subcommand's description at all. _join_lines and _wrapped
# prepare the texts for tyro.


def description(options: type) -> str:
    return (inspect.getdoc(options) or "").partition("\n\nArgs:")[0]


def _join_lines(options: type) -> None:
    """Write the description of each field as one line into the docstring of the class.

    tyro prefers these descriptions to the docstrings of the fields.
    """
    texts: dict[str, str] = {}
    for base in reversed(options.__mro__[:-1]):
        texts |= {
            field.arg_name: field.description or ""
            for field in docstring_parser.parse_from_object(base).params
        }
    fields = [f"    {name}: {' '.join(text.split())}" for name, text in texts.items()]
    options.__doc__ = "\n".join([f"{description(options)}\n\nArgs:", *fields])


def _wrapped(text: str) -> str:
    """Return ``text`` as one paragraph, wrapped to the terminal's width.

    Each line begins with blanks; otherwise tyro would join the lines again.
    """
    wrapper = textwrap.TextWrapper(
        shutil.get_terminal_size().columns - 4, break_on_hyphens=False
    )
    return textwrap.indent(wrapper.fill(" ".join(text.split())), "  ")


def _find(commands: Commands, args: Sequence[str], prog: str) -> Command | None:
    """Return the subcommand that ``args`` names, or None if ``args`` names none, so that
    tyro prints help.

    Raises ConfigError if the first word is not a subcommand.
    """
    if not args or args[0].startswith("-"):
        return None
    member = commands.get(args[0])
    if member is None:
        hint = did_you_mean(args[0], commands)
        expected = ", ".join(commands)
        if commands is COMMANDS["sweep"]:
            expected = f"a TOML file, {expected}"
        # tyro would call the word an unrecognized option
        raise ConfigError(
            f"{args[0]!r} is not a subcommand of {prog}{hint}; expected {expected}"
        )
    if isinstance(member, Mapping):
        return _find(member, args[1:], f"{prog} {args[0]}")
    return member


def _app(commands: Commands, listed: bool) -> tyro.extras.SubcommandApp:
    """Return the parser of ``commands``.

    If ``listed``, its help is a list of subcommands, with the first paragraph of each
    description. Otherwise, its help has the whole description.
    """
    app = tyro.extras.SubcommandApp()
    for name, member in commands.items():
        if isinstance(member, Mapping):
            app.command(_app(member, listed), name=name, help=_wrapped(GROUPS[name]))
        else:
            text = description(member[0])
            if listed:
                first_paragraph = text.partition("\n\n")[0]
                text = " ".join(first_paragraph.split())
            else:
                text = _wrapped(text)
            app.command(member[0], name=name, help=text)
    return app


def run(args: Sequence[str], prog: str) -> None:
    """Call the function of the subcommand that ``args`` names.

    Print the text that the function returns, or exit with the status that it returns.
    """
    command = _find(COMMANDS, args, prog)
    if command is not None:
        _join_lines(command[0])
        args = _collected(args, command[0])
        if issubclass(command[0], opts.SlurmOptions):
            _check_sbatch_words(args, command[0])
        if issubclass(command[0], opts.ConfigOptions):
            args = _split_overrides(args, command[0])
    about = _wrapped(
        "Pre-train language models with the dispersion loss, and measure their "
        "condensation. titan-disp --version prints the version."
    )
    # With this marker, help shows --json instead of "--json, --no-json".
    config = (tyro.conf.FlagCreatePairsOff,)
    try:
        options = _app(COMMANDS, listed=command is None).cli(
            prog=prog, description=about, args=args, config=config
        )
    except SystemExit as end:
        if end.code:  # tyro has printed the words that it did not expect
            check_expansion(args)
        raise
    assert command is not None  # without a command, tyro exits
    function = command[1]
    if isinstance(function, str):
        function = resolve_name(f"titan_disp.{function}")
    result = function(options)
    if isinstance(result, str):
        print(result)
    elif isinstance(result, int):
        raise SystemExit(result)


def _collected(argv: Sequence[str], options: type) -> list[str]:
    """Return the words of a command line, with all values of a repeated option at its
    first place.

    tyro would keep only the values of the last place. Options for keys of the config,
    which have a dot, are passed on unchanged.

    Raises ConfigError if an option of the class ``options`` that takes a single value is
    repeated.
    """
    types = get_type_hints(options)
    groups: list[list[str]] = [[]]  # each group is an option with its values
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
            if equals:
                groups[-1].append(value)
        else:
            raise ConfigError(f"{option} is repeated; expected it once")
    merged = {id(group): group for group in groups}
    return list(chain.from_iterable(merged.values()))


def _is_sbatch_option(name: str) -> bool:
    from titan_disp.cluster.launch import SBATCH_OPTIONS

    return name in SBATCH_OPTIONS.split()


def _check_sbatch_words(argv: Sequence[str], options: type) -> None:
    """Raise ConfigError for an option of sbatch that is not a value of --sbatch, or a
    value of --sbatch that is a file or a short option.
    """
    fields = {field.name.replace("_", "-") for field in dataclasses.fields(options)}
    fields.add("help")
    option = ""
    for word in argv:
        if word.startswith("--"):
            option, _, value = word.partition("=")
            name = option[2:]
            if "." not in name and name not in fields and _is_sbatch_option(name):
                setting = f"{name}={value or 'VALUE'}"
                raise ConfigError(
                    f"{option} is an option of sbatch: write --sbatch {setting}"
                )
        elif option == "--sbatch" and word.startswith("-"):
            raise ConfigError(
                f"--sbatch {word} is a short option: write its long name, such as "
                "--sbatch partition=gpu account=abc"
            )
        elif option == "--sbatch" and word.endswith(".toml") and "=" not in word:
            raise ConfigError(
                f"--sbatch takes all words up to the next option, also {word}: write "
                "this file before the options"
            )


def _split_overrides(argv: Sequence[str], options: type) -> list[str]:
    """Return ``argv`` with the options for keys of the config moved behind ``--``, so
    that tyro passes them on unchanged.

    Names of keys have a dot. Raises ConfigError for an option without a dot that is not
    a field of the class ``options``.
    """
    names = {field.name for field in dataclasses.fields(options)} | {"help"}
    command_words: list[str] = []
    overrides: list[str] = []
    # A word that is not an option (``0.5``, ``-1``) is a value of the previous option.
    current = command_words
    for word in argv:
        check_dashes(word)
        if word.startswith("--"):
            name, _, _ = word[2:].replace("-", "_").partition("=")
            if "." in name:
                current = overrides
            elif name in names:
                current = command_words
            else:
                raise unknown_option(name, names)
        current.append(word)
    if overrides:
        return [*command_words, "--", *overrides]
    return command_words


def _begins_with_a_file(words: Sequence[str]) -> bool:
    """Return whether ``run`` is missing after ``sweep``, so that the next word is a
    file or an option.
    """
    if not words or words[0] in ("run", "table", "-h", "--help"):
        return False
    # A word with a dot or a slash is taken as a file even if there is none, so that the
    # message says that the file does not exist.
    return (
        words[0].startswith("-")
        or bool(set("./") & set(words[0]))
        or Path(words[0]).is_file()
    )


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Help and tables have characters that a terminal may not be able to show.
        sys.stdout.reconfigure(errors="replace")
    argv = sys.argv[1:]
    if argv[:1] == ["sweep"] and _begins_with_a_file(argv[1:]):
        argv.insert(1, "run")
    try:
        encoding = locale.getpreferredencoding(False)
        if codecs.lookup(encoding).name != "utf-8":  # importing torch would fail
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
