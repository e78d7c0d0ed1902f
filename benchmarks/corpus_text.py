"""Convert documentation to plain text: HTML, man pages, pod, reStructuredText and
dictd's dictionaries.

Only the standard library is used. The converters are short on purpose: they remove
markup, which a small model would otherwise mostly learn, and do not render tables,
images or mathematics.
"""

import base64
import gzip
import html
import json
import re
import unicodedata
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import PurePosixPath

# The suffixes of a dictd dictionary: its entries, and an index with their offsets
DICTIONARY = (".dict.dz", ".index")
# The number of characters in a document with entries of a dictionary, which are short
PAGE = 6000


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


class _HtmlText(HTMLParser):
    """Collects the text outside of scripts, navigation and tables of contents, with white
    space as in a browser.
    """

    BLOCKS = _names(
        "address article blockquote body caption center dd div dl dt figcaption "
        "figure footer form h1 h2 h3 h4 h5 h6 header hr li main ol p pre section "
        "table td th tr ul"
    )
    SKIPPED = _names("head nav noscript script style svg template")
    SKIPPED_CLASSES = _names("navheader navfooter toc related sphinxsidebar headerlink")
    VOID = _names("area base br col embed hr img input link meta source track wbr")

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        # The open elements inside an element that is left out, and this element itself
        self.skipped: list[str] = []
        self.preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = _names(dict(attrs).get("class") or "")
        is_skipped = self.skipped or tag in self.SKIPPED
        if tag not in self.VOID and (is_skipped or classes & self.SKIPPED_CLASSES):
            self.skipped.append(tag)
        elif tag == "br":
            self.parts.append("\n")
        elif tag in self.BLOCKS:
            self.parts.append("\n\n")
            self.preformatted += tag == "pre"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.VOID:  # <a id="x"/> is empty and has no end tag
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if self.skipped:
            # This also closes elements without an end tag, such as <p>.
            if tag in self.skipped:
                while self.skipped.pop() != tag:
                    pass
        elif tag in self.BLOCKS:
            self.parts.append("\n\n")
            self.preformatted -= tag == "pre" and self.preformatted > 0

    def handle_data(self, data: str) -> None:
        if self.skipped:
            return
        if not self.preformatted:
            data = re.sub(r"\s+", " ", data)
            if not self.parts or self.parts[-1].endswith(("\n", " ")):
                data = data.lstrip()
        if data:
            self.parts.append(data)


def from_html(source: str) -> str:
    """Return the text of an HTML page."""
    parser = _HtmlText()
    parser.feed(source)
    parser.close()
    return "".join(parser.parts)


_MAN_FONTS = _names("B I R BR RB BI IB RI IR SM SB")
_MAN_BREAKS = _names("PP P LP TP TQ IP HP sp br Vb Ve nf fi RS RE EX EE")
# Escape sequences and their text
_MAN_ESCAPES = dict(
    pair.split(":")
    for pair in _names(
        r"""
        \-:- \\:\ \':' \`:` \e:\ \(aq:' \(lq:" \(rq:" \(dq:" \(oq:' \(cq:'
        \(em:-- \(en:- \(hy:- \(bu:* \(mi:- \(ti:~ \(ha:^ \*(Aq:' \*(L":" \*(R":" \*(--:--
        """
    )
)
_MAN_ESCAPES |= dict.fromkeys(("\\ ", r"\~"), " ")
_MAN_ESCAPE = re.compile(
    r"""\\(?:f(?:\(..|\[[^]]*]|.)|s[-+]?\d|\*?\(..|\*?\[[^]]*]|\*.|.)"""
)


def _man_text(text: str) -> str:
    """Return a line without its comment, and with escape sequences replaced."""
    return _MAN_ESCAPE.sub(
        lambda match: _MAN_ESCAPES.get(match[0], ""), text.split('\\"')[0]
    )


def _man_arguments(text: str) -> list[str]:
    """Return the arguments of a macro."""
    return [
        quoted or plain
        for quoted, plain in re.findall(r'"([^"]*)"|(\S+)', text.replace('\\"', ""))
    ]


def from_man(source: str) -> str:
    """Return the text of a man page from its first section on.

    The lines before it are only macros, such as the hundred lines of Pod::Man.
    """
    lines: list[str] = []
    end = ""  # the end of a definition or a block that is left out
    begun = False
    for line in source.splitlines():
        if end:
            if end in line:
                end = ""
            continue
        matched = re.match(r"[.']\s*([A-Za-z]+|\\\")\s*(.*)", line)
        if matched is None:
            if begun and not line.startswith((".", "'\\")):
                lines.append(_man_text(line))
            continue
        macro, rest = matched.groups()
        if macro in ("de", "ig"):
            end = ".."
        elif macro in ("if", "ie", "el") and "\\{" in rest and "\\}" not in rest:
            end = "\\}"
        elif macro in ("SH", "SS"):
            begun = True
            lines += ["", _man_text(" ".join(_man_arguments(rest))), ""]
        elif macro in _MAN_FONTS:
            alternates = len(macro) == 2 and macro != "SM"  # without spaces
            separator = "" if alternates else " "
            lines.append(_man_text(separator.join(_man_arguments(rest))))
        elif macro in _MAN_BREAKS:
            lines.append("")
            if macro == "IP" and rest.strip():
                lines.append(_man_text(_man_arguments(rest)[0]))
    return "\n".join(lines)


def from_pod(source: str) -> str:
    """Return the text of a .pod file, Perl's documentation."""
    lines: list[str] = []
    skipped = False
    for line in source.splitlines():
        if matched := re.match(r"=(\w+)\s*(.*)", line):
            command, rest = matched.groups()
            skipped = command == "begin" or (skipped and command != "end")
            if not skipped and (command.startswith("head") or command == "item"):
                lines.append(rest)
        elif not skipped:
            lines.append(line)
    text = "\n".join(lines)
    for n in (4, 3, 2):  # C<< a > b >>
        text = re.sub(rf"([A-Z])<{{{n}}}\s(.*?)\s>{{{n}}}", _pod_code, text, flags=re.S)
    before = None
    while before != text:  # from the inside out: B<I<x>>
        before = text
        text = re.sub(r"([A-Z])<([^<>]*)>", _pod_code, text)
    return text


# ``clean`` restores the brackets.
_POD_CHARACTERS = {"lt": "\0lt", "gt": "\0gt", "verbar": "|", "sol": "/"}


def _pod_code(match: re.Match[str]) -> str:
    """Return the text of a formatting code, such as B<text>."""
    code, content = match.groups()
    if code in "XZ":
        return ""
    if code == "E":
        if content.isdigit():
            return chr(int(content))
        return _POD_CHARACTERS.get(content) or html.unescape(f"&{content};")
    if code == "L":
        return content.split("|")[0]
    return content.replace("<", "\0lt").replace(">", "\0gt")


_RST_KEPT = _names(
    "note warning caution important tip hint attention code code-block parsed-literal"
)


def from_rst(source: str) -> str:
    """Return reStructuredText without comments, labels, tables of contents, underlines and
    roles.
    """
    lines: list[str] = []
    skipped = False  # the indented block below a comment or a directive
    for line in source.splitlines():
        if skipped and (not line.strip() or line[0].isspace()):
            continue
        skipped = False
        if matched := re.match(r"\s*\.\.(?:\s+(.*))?$", line):
            directive = re.match(r"([\w-]+)::\s*(.*)", matched.group(1) or "")
            if directive is None or directive.group(1) not in _RST_KEPT:
                skipped = True
            elif not directive.group(1).startswith(("code", "parsed")):
                lines.append(directive.group(2))
        elif not re.match(
            r"\s*([-=~^\"'`#*+.:_])\1{2,}\s*$|\s*[-=+| ]{4,}$|\s+:[\w-]+:(\s|$)", line
        ):
            lines.append(line)
    text = re.sub(r":[\w:+-]+:`([^`<]*?)\s*(?:<[^`>]*>)?`", r"\1", "\n".join(lines))
    text = re.sub(r"(?<!`)`([^`<]+?)\s*(?:<[^`>]*>)?`__?", r"\1", text)
    text = re.sub(r"``(.+?)``", r"\1", text)
    text = re.sub(r"(?<![\w*])\*\*?(?=\S)([^*\n]+?)(?<=\S)\*\*?(?![\w*])", r"\1", text)
    return re.sub(r"::$", ":", text, flags=re.M)


def dictionary_pages(entries: bytes, index: str) -> Iterator[tuple[str, str]]:
    """Yield (first headword, text) of each page, which has consecutive entries of a dictd
    dictionary.

    Args:
        entries: the unpacked .dict file.
        index: lines with a headword, an offset and a length. Numbers are in base 64.
    """

    def number(text: str) -> int:
        return int.from_bytes(base64.b64decode(text.rjust(8, "A")), "big")

    places: dict[tuple[int, int], str] = {}
    for line in index.splitlines():
        word, offset, length = line.split("\t")[:3]
        if not word.startswith(("00-database", "00database")):
            places.setdefault((number(offset), number(length)), word)
    name = ""
    page = ""
    for (offset, length), word in sorted(places.items()):
        name = name or word
        entry = entries[offset : offset + length].decode("utf-8", "replace").strip()
        # Without the lines that name the source of an entry
        page += re.sub(r"\n *\[[^]\n]*]$", "", entry, flags=re.M) + "\n\n"
        if len(page) >= PAGE:
            yield name, page
            name = ""
            page = ""
    if page:
        yield name, page


_CONTROL = re.compile(
    "[\0-\x09\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\ufeff\ufffd]"
)


def clean(text: str) -> str:
    """Return a text in Unicode's normal form, without control characters, white space at
    line ends and repeated blank lines.
    """
    text = unicodedata.normalize(
        "NFC", text.replace("\0lt", "<").replace("\0gt", ">").replace("\xa0", " ")
    )
    text = re.sub(r"[^\S\n]+$", "", text.expandtabs(8).replace("\r", ""), flags=re.M)
    text = _CONTROL.sub("", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n ")


def _decode(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


_CONVERTERS = {
    ".pod": from_pod,
    ".rst": from_rst,
    **dict.fromkeys((".html", ".htm", ".xhtml"), from_html),
}


def documents_of(name: str, data: bytes) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the documents in a file: one document, or one per line of JSON
    lines. Files of unknown formats have none.

    The path of the file determines the format. ``.gz`` files are unpacked.
    """
    if name.endswith(".gz"):
        name = name.removesuffix(".gz")
        data = gzip.decompress(data)
    suffix = PurePosixPath(name).suffix
    if suffix in (".json", ".jsonl"):
        for i, line in enumerate(data.splitlines()):
            record = json.loads(line)
            yield record.get("url", f"{name}:{i + 1}"), clean(record["text"])
    elif suffix in _CONVERTERS:
        yield name, clean(_CONVERTERS[suffix](_decode(data)))
    elif re.search(r"/man\d\w*/[^/]+$", name):
        yield name, clean(from_man(_decode(data)))
    elif (suffix in (".txt", ".md", "") or "/ABI/" in name) and b"\0" not in data:
        yield name, clean(_decode(data))
