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
    """Not even bars of libraries that are enabled explicitly, or of subclasses; afterwards they are as before."""
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
    if kind is Terminal:
        assert "2/2" in shown
        assert "reading:   0%" in shown
        assert "1.00M/4.00M" in shown
        assert shown.split("\r")[-2].strip() == ""  # the line is cleared at the end
    else:
        assert shown == ""
    list(tqdm.tqdm([1, 2], disable=False))
    assert "2/2" in stderr.getvalue()
