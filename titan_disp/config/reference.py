"""``titan-disp config`` and ``docs/configuration.md`` list every key with its type,
default and description.

They are read from the source code of ``titan_disp/job_config.py`` and of TorchTitan's,
where the string below a field describes it. Importing the modules would take the many
seconds of PyTorch.
"""

import ast
import importlib.util
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from titan_disp.config.keys import SOURCES, TORCHTITAN, Facts, torchtitan_facts, written
from titan_disp.errors import ConfigError, did_you_mean
from titan_disp.job_config import key_hint

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
    facts: Facts | None  # the keys of [[stream.sources]] have none

    @property
    def full(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def source(self) -> str:
        return SOURCES.get(self.facts.source, "") if self.facts else ""


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
    facts = facts or Facts()
    alternatives = list(
        _modules(facts.modules) if facts.modules else _alternatives(node)
    )
    if alternatives[-1] in ("integer", "number") and facts.bounds:
        alternatives[-1] += f" {facts.range}"
        alternatives += map(json.dumps, facts.besides)
    elif alternatives == ["string"] and facts.choices:
        alternatives = [json.dumps(choice) for choice in facts.choices]
    *others, last = alternatives
    return f"{', '.join(others)} or {last}" if others else last


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
                facts = facts or torchtitan_facts().get(full)
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


def _used() -> Iterator[Section]:
    """Yield TorchTitan's sections with the most used keys only, and their meaning."""
    for section in torchtitan_sections():
        keys = [
            replace(key, text=key.facts.means)
            for key in section.keys
            if key.facts and key.facts.means
        ]
        if keys:
            yield Section(section.name, "", tuple(keys))


def limits(facts: Facts) -> Iterator[str]:
    """Yield what is checked of a key, or why nothing is, in phrases."""
    if facts.limited:
        yield facts.allowed
    for key, value in facts.when.items():
        yield f"if {key} = {written(value)}"
    for key, value in facts.unless.items():
        yield f"unless {key} = {written(value)}"
    for key, value in facts.needs.items():
        yield f"needs {key} = {written(value)}"
    for key, value in facts.only_with.items():
        yield f"no effect without {key} = {written(value)}"
    if facts.path:
        yield "a path, in which ~ and $VARIABLES are replaced"


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
        if keys:
            explained = tuple(_explained(key) for key in keys)
            yield Section(section.name, section.text if whole else "", explained)


def _explained(key: Key) -> Key:
    """Return one of TorchTitan's keys with its limits and its meaning in its text."""
    facts = key.facts
    if facts is None or facts.source != TORCHTITAN:
        return key
    text = f"{facts.means} TorchTitan: {key.text}" if facts.means else key.text
    phrases = [*limits(facts), *filter(None, [facts.reason.rstrip(".")])]
    return replace(key, text=f"{text} [{'; '.join(phrases)}.]".lstrip())


def _not_found(name: str) -> ConfigError:
    sections = [*own_sections(), *torchtitan_sections()]
    names = [key.full for section in sections for key in section.keys]
    hint = key_hint(name, names)
    if "." not in name:
        hint = did_you_mean(name, [section.name for section in sections], hint)
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
| `[dispersion]`, then `enabled = false` | `--dispersion.no-enabled` |
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

## What is checked of TorchTitan's keys

`plan`, `submit`, `preflight`, sweeps and every start refuse values that TorchTitan 0.2.2 would train with wrongly, or that
would end in an error later. This table has all of its keys. Without *expected*, every value of the key's type works, or the
key has no effect. An element of a list is expected to be one of the values.

The learning rate and λ of the whole run are computed as well, with TorchTitan's own function: a learning rate that is
negative or not finite is refused, and so is a λ that is not finite. `titan-disp plan` prints both, and warns of a rate that
rises again after its peak or never reaches `optimizer.lr`.

{limits}
"""


def markdown() -> str:
    """Return the content of ``docs/configuration.md``."""
    ours = "\n\n".join(_table(section, "default from") for section in own_sections())
    others = "\n\n".join(_table(section) for section in _used())
    return PAGE.format(ours=ours, others=others, limits="\n".join(_limits_table()))


def _limits_table() -> Iterator[str]:
    yield "| key | expected | because |"
    yield "|---|---|---|"
    for name, facts in torchtitan_facts().items():
        cells = [f"`{name}`", "; ".join(limits(facts)), facts.reason]
        yield f"| {' | '.join(cells)} |"


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
