"""Find quoted Python code in a file, however either of them is formatted."""

import keyword
import re
from collections.abc import Sequence
from typing import NamedTuple

# Comments and white space between tokens are skipped. A number such as 1e-6 is three tokens, which does not matter here.
TOKEN = re.compile(
    r"""\#[^\n]*
    |(?P<token>
        [bfru]{0,2}(?:\"{3}(?:\\.|[^\\])*?\"{3}|\"(?:\\.|[^\\"\n])*\"|'(?:\\.|[^\\'\n])*')
        |\w+
        |\S
    )""",
    re.DOTALL | re.IGNORECASE | re.VERBOSE,
)
OPENING = "([{"
CLOSING = ")]}"


class Token(NamedTuple):
    text: str
    begin: int
    end: int


def code_tokens(code: str) -> list[Token]:
    """Return the tokens of Python code, or of a part of it, that do not depend on how the code is formatted.

    Left out are commas before a closing bracket, and parentheses that group one expression. Formatters add and remove
    both. Neighbouring string literals of one kind are one token.
    """
    tokens: list[Token] = []
    for match in TOKEN.finditer(code):
        token = Token(match["token"] or "", match.start(), match.end())
        if not token.text:
            continue
        if tokens and token.text in CLOSING and tokens[-1].text == ",":
            tokens.pop()
        if tokens and (joined := _joined(tokens[-1].text, token.text)):
            token = Token(joined, tokens.pop().begin, token.end)
        tokens.append(token)
    grouping = _grouping(tokens)
    return [token for i, token in enumerate(tokens) if i not in grouping]


def _joined(first: str, second: str) -> str | None:
    """Return two literals of one kind as one, or None if they are not that."""
    prefix = re.match(r"[bfru]*[\"']", first, re.IGNORECASE)
    if prefix is None or len(second) < 2 or not second.startswith(prefix[0]):
        return None
    return first[:-1] + second[len(prefix[0]) :]


def _grouping(tokens: Sequence[Token]) -> set[int]:
    """Return the indices of parentheses that hold one expression and are neither a call nor a definition."""
    grouping: set[int] = set()
    opened: list[int] = []
    with_comma: set[int] = set()
    for i, token in enumerate(tokens):
        if token.text in OPENING:
            opened.append(i)
        elif token.text == "," and opened:
            with_comma.add(opened[-1])
        elif token.text in CLOSING and opened:
            begin = opened.pop()
            before = tokens[begin - 1].text if begin else "="
            called = before[-1] in ")]}\"'" or (
                before.isidentifier() and not keyword.iskeyword(before)
            )
            if (
                token.text == ")"
                and i > begin + 1
                and begin not in with_comma
                and not called
            ):
                grouping |= {begin, i}
    return grouping


def places(code: str, old: str) -> list[slice]:
    """Return where ``old`` stands in Python code, however either of them is formatted."""
    tokens = code_tokens(code)
    wanted = [token.text for token in code_tokens(old)]
    texts = [token.text for token in tokens]
    begins = [
        i
        for i in range(len(texts) - len(wanted) + 1)
        if texts[i : i + len(wanted)] == wanted
    ]
    return [
        _balanced(code, slice(tokens[i].begin, tokens[i + len(wanted) - 1].end), old)
        for i in begins
    ]


def _balanced(code: str, place: slice, old: str) -> slice:
    """Return the place with the parentheses at its ends that were left out and have their other half in it."""
    begin = place.start
    end = place.stop
    surplus = _surplus(code[begin:end]) - _surplus(old)
    while surplus > 0 and (match := re.compile(r",?\s*\)").match(code, end)):
        end = match.end()
        surplus -= 1
    while surplus < 0 and (match := re.search(r"\(\s*\Z", code[:begin])):
        begin = match.start()
        surplus += 1
    return slice(begin, end)


def _surplus(code: str) -> int:
    """Return how many more brackets are opened than closed."""
    texts = [match["token"] or " " for match in TOKEN.finditer(code)]
    return sum(text in OPENING for text in texts) - sum(
        text in CLOSING for text in texts
    )
