"""A short writer of SVG: rectangles, lines, text; coordinates in pixels, y downwards."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

__all__ = ["Drawing"]


class Drawing:
    """A picture of ``width`` x ``height`` on white. What is drawn later lies above."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []
        self.rect(0, 0, width, height, fill="#ffffff")

    def rect(
        self, x: float, y: float, width: float, height: float, *, fill: str, note: str = ""
    ) -> None:
        """A rectangle; ``note`` shows under the mouse."""
        title = f"<title>{escape(note)}</title>" if note else ""
        size = f'width="{width:.1f}" height="{height:.1f}"'
        self._parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{fill}">{title}</rect>')

    def line(
        self,
        points: Sequence[tuple[float, float]],
        *,
        color: str,
        width: float = 1.0,
        dash: str = "",
    ) -> None:
        """A line through ``points``."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dashes}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 11,
        anchor: str = "start",
        color: str = "#222222",
    ) -> None:
        """``text`` with its baseline at y; ``anchor``: start, middle or end."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{color}">{escape(text)}</text>'
        )

    def write(self, path: Path) -> None:
        """The file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:.0f} {self.height:.0f}" '
            'font-family="system-ui, sans-serif">'
        )
        path.write_text("\n".join([head, *self._parts, "</svg>"]) + "\n")
