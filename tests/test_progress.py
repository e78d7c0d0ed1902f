"""Progress bars: on a terminal, and nowhere else."""

import io
import sys

import pytest

from titan_disp.files import no_bars_in_logs, progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_bars_are_shown_on_terminals_alone(monkeypatch, kind):
    """Not even bars of libraries that are enabled explicitly, or of subclasses;
    afterwards they are as before.
    """
    import tqdm.auto

    stderr = kind()
    monkeypatch.setattr(sys, "stderr", stderr)
    for bar in (tqdm.tqdm, tqdm.auto.tqdm):
        with no_bars_in_logs():
            assert list(bar([1, 2], disable=False)) == [1, 2]
    assert list(progress("reading", "file", items=[1, 2, 3])) == [1, 2, 3]
    with progress("hashing", "B", total=4_000_000) as bar:
        bar.update(1_000_000)
        bar.refresh()
    shown = stderr.getvalue()
    assert [text in shown for text in ("2/2", "reading:   0%", "1.00M/4.00M")] == [
        kind is Terminal
    ] * 3
    # The line is cleared at the end
    assert not shown or shown.split("\r")[-2].strip() == ""
    assert bool(shown) is (kind is Terminal)
    list(tqdm.tqdm([1, 2], disable=False))
    assert "2/2" in stderr.getvalue()
