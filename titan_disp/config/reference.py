"""``titan-disp config`` and ``docs/configuration.md`` list every key with its type,
default and description.

They are read from the source code of ``titan_disp/job_config.py`` and of TorchTitan's,
where the string below a field describes it. Importing the modules would take the many
seconds of PyTorch.
"""

import ast
import functools
import importlib.util
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import tomli

from titan_disp.config.keys import SOURCES, Facts
from titan_disp.errors import ConfigError, did_you_mean

NAMES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "Overrides": "table",
    "Options": "table",
    "Losses": "tables",
}


@dataclass(frozen=True)
class Key:
    section: str  # with dots if it is nested: stream.sources
    name: str
    type: str
    default: str
    text: str
    facts: Facts | None  # of titan-disp's keys

    @property
    def full(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def source(self) -> str:
        return SOURCES[self.facts.source] if self.facts else ""


@dataclass(frozen=True)
class Section:
    name: str
    text: str
    keys: tuple[Key, ...]

    @property
    def title(self) -> str:
        """The TOML heading. [[stream.sources]] is an array of tables; the keys of
        [stream] are not in it.
        """
        return f"[[{self.name}]]" if self.name == "stream.sources" else f"[{self.name}]"


def _type(node: ast.expr, facts: Facts | None) -> str:
    # str | None → string; Literal["a", "b"] → "a" or "b"; a number also has its range
    alternatives = list(
        _modules(facts.modules) if facts and facts.modules else _alternatives(node)
    )
    last = alternatives[-1] + (
        f" {facts.range}" if facts and alternatives[-1] in ("integer", "number") else ""
    )
    return " or ".join(
        [", ".join(alternatives[:-1]), last] if len(alternatives) > 1 else [last]
    ).rstrip()


def _modules(folder: str) -> Iterator[str]:
    # The modules are read, not imported, because they import torch.
    names: list[str] = []
    for path in (Path(__file__).parents[1] / folder).glob("*.py"):
        names += re.findall(r'name: ClassVar\[str\] = (".+")', path.read_text())
    yield from sorted(names)
    yield '"package.module:Class"'


def _alternatives(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.BinOp):
        yield from _alternatives(node.left)
        yield from _alternatives(node.right)
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
        values = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        yield from (json.dumps(ast.literal_eval(value)) for value in values)
    elif isinstance(node, ast.Subscript):
        yield f"list of {NAMES.get(ast.unparse(node.slice), 'table')}s"
    elif ast.unparse(node) != "None":
        yield NAMES.get(ast.unparse(node), ast.unparse(node))


def _declared(node: ast.expr | None) -> tuple[str, Facts | None]:
    """Return a default as it is written in TOML, and the facts of a key()."""
    if node is None:
        return "required", None
    if isinstance(node, ast.Call) and node.args:
        default, *source = node.args
        named = {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg}
        return _declared(default)[0], Facts(*map(ast.literal_eval, source), **named)
    if isinstance(node, ast.Call):  # field(default_factory=…)
        node = node.keywords[0].value
    if isinstance(node, ast.Lambda):
        return ast.unparse(node.body).replace("'", '"'), None
    if isinstance(node, ast.Name):
        return {"dict": "{}", "list": "[]"}[node.id], None
    value = ast.literal_eval(node)
    return "unset" if value is None else json.dumps(value, ensure_ascii=False), None


def _sections(source: Path) -> dict[str, Section]:
    """Return all sections of the file's class JobConfig in its order, including nested
    ones.
    """
    classes = {
        node.name: node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    found: dict[str, Section] = {}

    def read(cls: ast.ClassDef, name: str) -> None:
        keys = []
        nested = []
        for field, below in zip(cls.body, [*cls.body[1:], None], strict=True):
            if not (
                isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            ):
                continue
            full = f"{name}.{field.target.id}".lstrip(".")
            item = (
                field.annotation.slice
                if isinstance(field.annotation, ast.Subscript)
                else field.annotation
            )
            inner = classes.get(ast.unparse(item))
            if inner is not None:
                nested.append((inner, full))
            # a list of tables is both a key and a section
            if inner is None or item is not field.annotation:
                default, facts = _declared(field.value)
                text = _text(below) + (
                    " Fixed for the life of a run." if facts and facts.fixes else ""
                )
                keys.append(
                    Key(
                        name,
                        field.target.id,
                        _type(field.annotation, facts),
                        default,
                        text,
                        facts,
                    )
                )
        if name and keys:
            found[name] = Section(
                name, " ".join((ast.get_docstring(cls) or "").split()), tuple(keys)
            )
        for inner, full in nested:
            read(inner, full)

    read(classes["JobConfig"], "")
    return found


def _text(below: ast.stmt | None) -> str:
    """Return the string below a field in one line, or an empty text."""
    value = (
        below.value.value
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        else None
    )
    return " ".join(value.split()) if isinstance(value, str) else ""


def own_sections() -> list[Section]:
    """Return titan-disp's sections, including the keys that it adds to TorchTitan's
    sections.
    """
    return list(_sections(Path(__file__).parents[1] / "job_config.py").values())


def torchtitan_sections() -> list[Section]:
    """Return TorchTitan's sections without the keys for which titan-disp has other
    defaults.
    """
    # Finds the package without importing it
    spec = importlib.util.find_spec("torchtitan")
    assert spec is not None
    assert spec.submodule_search_locations
    ours = {key.full for section in own_sections() for key in section.keys}
    sections = _sections(
        Path(spec.submodule_search_locations[0]) / "config" / "job_config.py"
    )
    return [
        replace(s, keys=tuple(key for key in s.keys if key.full not in ours))
        for s in sections.values()
    ]


@functools.cache
def used_keys() -> dict[str, dict[str, str]]:
    """Return the most used of TorchTitan's keys, by section, with their meaning."""
    file = Path(__file__).with_name("torchtitan_keys.toml")
    return tomli.loads(file.read_text(encoding="utf-8"))


def _meaning(key: Key) -> str | None:
    return used_keys().get(key.section, {}).get(key.name)


def _used() -> Iterator[Section]:
    for section in torchtitan_sections():
        keys = tuple(
            replace(key, text=meaning)
            for key in section.keys
            if (meaning := _meaning(key)) is not None
        )
        if keys:
            yield Section(section.name, "", keys)


def _lines(section: Section) -> Iterator[str]:
    yield section.title
    if section.text:
        yield from textwrap.wrap(
            section.text, 100, initial_indent="# ", subsequent_indent="# "
        )
    for key in section.keys:
        yield f"{key.name} = {key.default}    # {key.type}{f'; default: {key.source}' if key.source else ''}"
        yield from textwrap.wrap(
            key.text, 96, initial_indent="    ", subsequent_indent="    "
        )
    yield ""


def _find(name: str) -> Iterator[Section]:
    """Yield a section (titan-disp's keys first), one key, or all keys with this last
    part in any section.
    """
    for section in (*own_sections(), *torchtitan_sections()):
        whole = name == section.name or section.name.startswith(f"{name}.")
        keys = [key for key in section.keys if whole or name in (key.full, key.name)]
        for i, key in enumerate(keys):
            if meaning := _meaning(key):
                keys[i] = replace(key, text=f"{meaning} TorchTitan: {key.text}")
        if keys:
            yield Section(section.name, section.text if whole else "", tuple(keys))


def _not_found(name: str) -> ConfigError:
    sections = [*own_sections(), *torchtitan_sections()]
    keys = [key for section in sections for key in section.keys]
    known = {s.name for s in sections} | {
        name for key in keys for name in (key.full, key.name)
    }
    others: dict[str, str] = {}
    for key in keys:
        for other in key.facts.also if key.facts else ():
            others |= {other: key.full, f"{key.section}.{other}": key.full}
    hint = did_you_mean(
        name, sorted(known), otherwise="; titan-disp config lists them", instead=others
    )
    return ConfigError(f"{name!r} is neither a section nor a key of the config{hint}")


def reference(name: str | None) -> str:
    """Return titan-disp's keys and the most used ones of TorchTitan, or one section or
    key in full.
    """
    if name is not None:
        name = name.lstrip("-").replace("-", "_").strip("[]")
        lines = [line for section in _find(name) for line in _lines(section)]
        if not lines:
            raise _not_found(name)
    else:
        others = ", ".join(section.name for section in torchtitan_sections())
        more = f"# titan-disp config SECTION or KEY shows more; TorchTitan's sections are {others}."
        lines = ["# titan-disp's keys, with their defaults.", ""]
        lines += [line for section in own_sections() for line in _lines(section)]
        lines += ["# TorchTitan's keys that the files in train_configs set.", ""]
        lines += [line for section in _used() for line in _lines(section)]
        lines += textwrap.wrap(more, 110, subsequent_indent="# ")
    return "\n".join(lines).rstrip()


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
| `[dispersion]`, then `enabled = false` | `--dispersion.no-enabled`, or `--dispersion.enabled false` |
| `[dispersion]`, then `layers = [1, 2]` | `--dispersion.layers 1 2` |
| `[compile]`, then `components = ["model", "loss"]` | `--compile.components model,loss` |
| `[model.overrides]`, then `hidden_dim = 16` | `--model.overrides.hidden_dim 16` |
| `[[stream.sources]]`, then `path = "/data/web"` and `weight = 1.0` | `--stream.sources.0.path /data/web` (of one in the file) |

Unknown keys, values of the wrong type and numbers that are out of range are refused before anything starts.

## titan-disp's keys

The column *default from* says whose a default is; [loss.md](loss.md#where-the-defaults-come-from) says more. A key that is
*fixed for the life of a run* decides which model it trains, or on which data. A resume with another value is refused (or,
if it concerns the data and `stream.on_mismatch` is "restart", begins a new epoch of them).

{ours}

## TorchTitan's keys

The defaults are TorchTitan's. Keys whose defaults titan-disp changes are listed above.

{others}
"""


def markdown() -> str:
    """Return the content of ``docs/configuration.md``."""
    ours = "\n\n".join(_table(section, "default from") for section in own_sections())
    others = "\n\n".join(_table(section) for section in _used())
    return PAGE.format(ours=ours, others=others)


def _table(section: Section, *source: str) -> str:
    columns = ["key", "type", "default", *source, "what it does"]
    lines = [f"### {section.title}", "", *([section.text, ""] if section.text else [])]
    lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for key in section.keys:
        cells = [
            f"`{key.name}`",
            key.type,
            f"`{key.default}`",
            *([key.source] if source else []),
        ]
        lines.append(
            f"| {' | '.join([*cells, key.text.replace('|', chr(92) + '|')])} |"
        )
    return "\n".join(lines)
