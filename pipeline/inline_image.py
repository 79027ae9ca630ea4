"""Figures inside of an HTML page, which then loads nothing from elsewhere."""

import base64
import io
from html import escape

from matplotlib.figure import Figure


def inline_image(figure: Figure, *, description: str, dpi: int) -> str:
    """An `<img>` element with the figure in it as a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    data = base64.b64encode(buffer.getvalue()).decode("ascii")
    return f'<img alt="{escape(description)}" src="data:image/png;base64,{data}">'
