"""Prepare the pages for mkdocs (make docs): add those outside of docs/, and the
reference of the Python interface, and set the formula of the loss in MathML.

Links between pages stay. Links to other files go to the repository, if ``Repository``
in pyproject.toml has its address.
"""

import os
import re
from pathlib import Path
from typing import Any

import tomli
from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "slurm/README.md": "slurm.md",
    "examples/README.md": "examples.md",
    "train_configs/authors/README.md": "authors.md",
}
PAGES = {**OUTSIDE, "docs/README.md": "index.md"}
API = (
    "titan_disp.dispersion",
    "titan_disp.condensation.measure",
    "titan_disp.condensation.record",
    "titan_disp.run.reader",
)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?\)")


# The block of titan_disp/dispersion/formula.py, on pages.
FORMULA = re.compile(r"^    u_i = z_i .*\n(?:    .*\n)*    L = L_CE .*$", re.M)
LATEX = r"""
\begin{array}{ll}
u_i = \dfrac{z_i}{\lVert z_i \rVert + \varepsilon} & \varepsilon = 0.01 \\
c_{ij} = u_i \cdot u_j \\
\tilde{c}_{ij} = \mathrm{clamp}(c_{ij}, -1 + \kappa, 1 - \kappa) & \kappa = 0.25 \\
D_{ij} = \dfrac{\arccos(\tilde{c}_{ij})}{\pi} \\
L_{\mathrm{disp}} = \log \operatorname{mean}_{i \ne j} \exp(-D_{ij} / \tau) & \tau = 1 \\
L = L_{\mathrm{CE}} + \lambda \cdot \text{mean of } L_{\mathrm{disp}}
\text{ over layers and sequences} & \lambda = 0.1
\end{array}
"""

# On a narrow screen, the formula can be moved sideways.
FRAME = """<div style="overflow-x: auto">
<style>mtd {{ text-align: left !important; padding: 0.3em 0.6em }}</style>
{}
</div>"""


def _moved(markdown: str, folder: str) -> str:
    """Return a page of ``folder``, a path in the repository, with links that hold
    within the site.
    """
    address = (
        tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
        .get("urls", {})
        .get("Repository")
    )

    def link(found: re.Match[str]) -> str:
        image, text, target, anchor = found.groups()
        path = os.path.normpath(os.path.join(folder, target))
        if path in PAGES or path.startswith("docs/"):
            return f"{image}[{text}]({PAGES.get(path, path.removeprefix('docs/'))}{anchor or ''})"
        return (
            f"[{text}]({address}/blob/main/{path}{anchor or ''})"
            if address
            else f"{text} (`{path}`)"
        )

    blocks = re.split(r"(^```.*?^```)", markdown, flags=re.M | re.S)
    return "".join(
        block if block.startswith("```") else LINK.sub(link, block) for block in blocks
    )


def on_files(files: Any, config: Any) -> Any:
    for path, name in OUTSIDE.items():
        content = _moved((ROOT / path).read_text(), os.path.dirname(path))
        files.append(File.generated(config, name, content=content))
    content = "# Python\n\n" + "\n".join(f"::: {module}\n" for module in API)
    files.append(File.generated(config, "api.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **unused: Any) -> str:
    if page.file.src_uri not in {*OUTSIDE.values(), "api.md"}:
        markdown = _moved(markdown, "docs")
    formula = convert(LATEX.replace("\n", " "))
    return FORMULA.sub(lambda _: FRAME.format(formula), markdown)
