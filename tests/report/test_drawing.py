"""Pictures whose names are in letters that no font here has."""

import warnings
from pathlib import Path

from matplotlib.figure import Figure

from adloco.report.drawing import save_figure


def test_letters_that_the_font_lacks_are_no_warning(tmp_path: Path) -> None:
    """matplotlib's warning shows them to the terminal, escape characters among them."""
    figure = Figure()
    figure.subplots().set_title("\u6f22 \x1b[31m \x07")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_figure(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
