"""``titan-disp config`` and ``docs/configuration.md`` list every key with its type,
default and description.

The keys are read from the source code of ``titan_disp/job_config.py`` and TorchTitan's
``job_config.py``, where the string below a field describes it. Importing TorchTitan's
module would import PyTorch, which takes many seconds.
"""

import ast
import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, pairwise
from pathlib import Path

from titan_disp.config.keys import SOURCES, TORCHTITAN, Facts, torchtitan_facts, written
from titan_disp.errors import TYPE_NAMES, ConfigError
from titan_disp.job_config import all_facts, all_keys, key_hint

NAMES = {type_.__name__: name for type_, name in TYPE_NAMES.items()} | {
    "Overrides": "a table",
    "Options": "a table",
    "Losses": "tables",
}
# How pages word the attributes of ``Facts`` that refer to other keys.
PHRASES = {
    "when": "if {} = {}",
    "unless": "unless {} = {}",
    "needs": "needs {} = {}",
}
NO_LITERALS = {"dict": "{}", "list": "[]", "None": "unset"}
FIXED = " Fixed for the life of a run."


@dataclass(frozen=True)
class Key:
    full: str  # with dots: stream.sources.path
    type: str
    default: str
    text: str
    facts: Facts

    @property
    def name(self) -> str:
        return self.full.rpartition(".")[2]

    @property
    def source(self) -> str:
        return SOURCES[self.facts.source]


@dataclass(frozen=True)
class Section:
    name: str
    text: str
    keys: tuple[Key, ...]

    @property
    def title(self) -> str:
        """The TOML heading, such as "[stream]", or "[[stream.sources]]" for an array of
        tables.
        """
        if self.name == "stream.sources":
            return f"[[{self.name}]]"
        return f"[{self.name}]"


def _type(annotation: str, facts: Facts) -> str:
    """Return a key's type in words: "a string" for str | None, '"a" or "b"' for
    Literal["a", "b"], and "1 or more steps" for a number with a range.
    """
    alternatives = list(_alternatives(annotation))
    if facts.modules:
        alternatives = [*_modules(facts.modules), '"package.module:Class"']
    elif facts.limited and not facts.when and "list" not in annotation:
        return facts.allowed
    *leading, last = alternatives
    return " or ".join(filter(None, [", ".join(leading), last]))


def _modules(folder: str) -> list[str]:
    # The modules are read, not imported, because they import torch.
    files = (Path(__file__).parents[1] / folder).glob("*.py")
    texts = "".join(file.read_text() for file in files)
    return sorted(re.findall(r'name: ClassVar\[str\] = (".+")', texts))


def _alternatives(annotation: str) -> Iterator[str]:
    for part in annotation.split(" | "):
        outer, _, inner = part.rstrip("]").partition("[")
        if outer == "Literal":
            yield from map(json.dumps, ast.literal_eval(f"[{inner}]"))
        elif outer == "list":
            yield f"a list of {NAMES.get(inner, 'table').removeprefix('a ')}s"
        elif outer != "None":
            yield NAMES.get(outer, outer)


def _default(node: ast.expr | None) -> str:
    """Return a default as it is written in TOML."""
    if node is None:
        return "required"
    if isinstance(node, ast.Call):  # key(…) or field(default_factory=…)
        node = (node.args or [keyword.value for keyword in node.keywords])[0]
    if isinstance(node, ast.Lambda):
        node = node.body
    text = ast.unparse(node)
    if text in NO_LITERALS:
        return NO_LITERALS[text]
    return json.dumps(ast.literal_eval(text), ensure_ascii=False)


def _sections(source: Path) -> Iterator[Section]:
    """Yield all sections of the class JobConfig in a source file, in the file's order,
    including nested sections.
    """
    statements = ast.parse(source.read_text()).body
    classes = {c.name: c for c in statements if isinstance(c, ast.ClassDef)}
    yield from _of_class(classes["JobConfig"], "", classes)


def _of_class(
    section: ast.ClassDef, name: str, classes: dict[str, ast.ClassDef]
) -> Iterator[Section]:
    """Yield a section, unless it has no keys, and then the sections nested in it."""
    keys: list[Key] = []
    nested: dict[str, ast.ClassDef] = {}
    for field, below in pairwise([*section.body, ast.Pass()]):
        if not isinstance(field, ast.AnnAssign):
            continue
        full = f"{name}.{ast.unparse(field.target)}".lstrip(".")
        annotation = ast.unparse(field.annotation)
        inner = classes.get(annotation.removeprefix("list[").rstrip("]"))
        if inner is not None:
            nested[full] = inner
        if annotation not in classes:  # a list of tables is both a key and a section
            facts = all_facts().get(full, Facts())
            keys.append(
                Key(
                    full=full,
                    type=_type(annotation, facts),
                    default=_default(field.value),
                    text=_text(ast.Module([below], [])) + FIXED * bool(facts.fixes),
                    facts=facts,
                )
            )
    if keys:
        yield Section(name, _text(section), tuple(keys))
    for full, inner in nested.items():
        yield from _of_class(inner, full, classes)


def _text(node: ast.ClassDef | ast.Module) -> str:
    """Return the docstring of a class or a module as one line, or an empty text."""
    return " ".join((ast.get_docstring(node) or "").split())


def own_sections() -> list[Section]:
    """Return titan-disp's sections, including the keys that it adds to TorchTitan's
    sections.
    """
    return list(_sections(Path(__file__).parents[1] / "job_config.py"))


def torchtitan_sections() -> list[Section]:
    """Return TorchTitan's sections, without the keys that titan-disp declares again
    with other defaults.
    """
    spec = find_spec("torchtitan")  # finds the package without importing it
    assert spec
    assert spec.origin
    ours = all_keys()
    return [
        replace(section, keys=tuple(k for k in section.keys if k.full not in ours))
        for section in _sections(Path(spec.origin).parent / "config" / "job_config.py")
    ]


def types() -> dict[str, str]:
    """Return each key's type in words, by the key's full name."""
    sections = (*own_sections(), *torchtitan_sections())
    keys = chain.from_iterable(section.keys for section in sections)
    return {key.full: key.type for key in keys}


def _used() -> Iterator[Section]:
    """Yield TorchTitan's sections with only their most used keys, which ``Facts.means``
    describes.
    """
    for section in torchtitan_sections():
        used = [key for key in section.keys if key.facts.means]
        if used:
            keys = tuple(replace(key, text=key.facts.means) for key in used)
            yield Section(section.name, "", keys)


def limits(facts: Facts) -> Iterator[str]:
    """Yield the limits of a key's value, in words."""
    if facts.limited:
        yield facts.allowed
    for name, phrase in PHRASES.items():
        for key, value in getattr(facts, name).items():
            yield phrase.format(key, written(value))
    if facts.path:
        yield "a path, in which ~ and $VARIABLES are replaced"


def _indented(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)


def _lines(section: Section) -> Iterator[str]:
    yield section.title
    yield from _indented(section.text, 100, "# ")
    for key in section.keys:
        yield f"{key.name} = {key.default}    # {key.type}; default: {key.source}"
        yield from _indented(key.text, 96, "    ")
    yield ""


def _find(name: str) -> Iterator[Section]:
    """Yield the section ``name`` (titan-disp's keys first), or the sections of all keys
    whose full name or last part is ``name``, with only these keys.
    """
    for section in (*own_sections(), *torchtitan_sections()):
        keys = section.keys
        if not f"{section.name}.".startswith(f"{name}."):
            keys = tuple(key for key in keys if name in (key.full, key.name))
        if keys:
            text = section.text * (keys == section.keys)
            yield Section(section.name, text, tuple(map(_explained, keys)))


def _explained(key: Key) -> Key:
    """Return a key. If the key is TorchTitan's, its meaning and limits are added to its
    text.
    """
    facts = key.facts
    if facts.source != TORCHTITAN:
        return key
    text = key.text
    if facts.means:
        text = f"{facts.means} TorchTitan: {text}"
    phrases = [*limits(facts), facts.reason.rstrip(".")]
    return replace(key, text=f"{text} [{'; '.join(filter(None, phrases))}.]".lstrip())


def reference(name: str | None) -> str:
    """Return the text about titan-disp's keys and the most used keys of TorchTitan, or
    about the section or key ``name``.
    """
    ours = own_sections()
    if name is not None:
        name = name.strip("[]-").replace("-", "_")
        lines = _all_lines(_find(name))
        if not lines:
            hint = key_hint(name, names=[section.name for section in ours])
            raise ConfigError(f"{name!r} is neither a section nor a key{hint}")
    else:
        lines = [
            "# titan-disp's keys, with their defaults.",
            "",
            *_all_lines(ours),
            "# TorchTitan's keys that the files in train_configs set.",
            "",
            *_all_lines(_used()),
            "# titan-disp config SECTION or KEY shows more. docs/configuration.md lists all.",
        ]
    return "\n".join(lines).rstrip()


def _all_lines(sections: Iterable[Section]) -> list[str]:
    return [line for section in sections for line in _lines(section)]


PAGE = """# Configuration

This page lists the keys that titan-disp adds to TorchTitan's, and TorchTitan's keys that the files in
[train_configs](../train_configs) set. It is generated from the fields of
[job_config.py](../titan_disp/job_config.py), and a test checks that it is up to date:

```bash
titan-disp config --markdown > docs/configuration.md
```

`titan-disp config` prints the same in a terminal, `titan-disp config dispersion` prints one section, and
`titan-disp config training.seq_len` prints one key. The last two know every section and key of TorchTitan 0.2.2.

## How to set a key

A key is set in the TOML file, under its section, or on the command line, which takes precedence:

| in the file | on the command line |
|---|---|
| `[dispersion]`, then `coeff = 0.2` | `--dispersion.coeff 0.2` |
| `[dispersion]`, then `enabled = true` | `--dispersion.enabled` |
| `[dispersion]`, then `enabled = false` | `--dispersion.no-enabled` |
| `[dispersion]`, then `layers = [1, 2]` | `--dispersion.layers 1 2` |
| `[compile]`, then `components = ["model", "loss"]` | `--compile.components model,loss` |
| `[model.overrides]`, then `hidden_dim = 16` | `--model.overrides.hidden_dim 16` |
| `[[stream.sources]]`, then `path = "/data/web"` and `weight = 1.0` | `--stream.sources.0.path /data/web` (of one in the file) |

Unknown keys, values of the wrong type and numbers that are out of range are refused before anything starts.

## titan-disp's keys

The column *default from* says where a default comes from; [loss.md](loss.md#where-the-defaults-come-from) says more. A key
that is *fixed for the life of a run* decides which model the run trains, or on which data. A resume with another value is
refused. If the key concerns the data and `stream.on_mismatch` is "restart", the resume begins a new epoch instead.

{ours}

## TorchTitan's keys

The defaults are TorchTitan's. Keys whose defaults titan-disp changes are listed above.

{torchtitan}

## What is checked of TorchTitan's keys

`plan`, `submit`, `preflight`, sweeps and every start refuse values that TorchTitan 0.2.2 would train with wrongly, or that
would end in an error later. This table has all keys of TorchTitan. If *expected* is empty, every value of the key's type
works, or the key has no effect. For a list, *expected* applies to each element.

The learning rate and λ of the whole run are computed as well, with TorchTitan's own function: a learning rate that is
negative or not finite is refused, and so is a λ that is not finite. `titan-disp plan` prints both, and warns of a rate that
rises again after its peak or never reaches `optimizer.lr`.

{limits}
"""


def markdown() -> str:
    """Return the content of ``docs/configuration.md``."""
    ours = "\n\n".join(map(_table, own_sections()))
    torchtitan = "\n\n".join(map(_table, _used()))
    return PAGE.format(
        ours=ours, torchtitan=torchtitan, limits="\n".join(_limits_table())
    )


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _limits_table() -> Iterator[str]:
    yield _row("key", "expected", "because")
    yield "|---|---|---|"
    for name, facts in torchtitan_facts().items():
        yield _row(f"`{name}`", "; ".join(limits(facts)), facts.reason)


def _table(section: Section) -> str:
    columns = ["key", "type", "default", "default from", "what it does"]
    lines = [_row(*columns), "|" + "---|" * len(columns)]
    for key in section.keys:
        cells = [f"`{key.name}`", key.type, f"`{key.default}`", key.source]
        lines.append(_row(*cells, key.text.replace("|", r"\|")))
    intro = filter(None, [f"### {section.title}", section.text])
    return "\n\n".join([*intro, "\n".join(lines)])
