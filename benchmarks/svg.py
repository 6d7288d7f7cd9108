"""A short writer of SVG: rectangles, lines, text; coordinates in pixels, y downwards."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

__all__ = ["Drawing"]

DARK = {
    "rect #ffffff": "#17181a",
    "rect #f4f4f4": "#26282c",
    "text #222222": "#dddddd",
    "rect #222222": "#dddddd",
    "text #777777": "#9a9a9a",
    "polyline #999999": "#777777",
    "polyline #888888": "#8a8a8a",
    "polyline #bbbbbb": "#5a5a5a",
    "polyline #e0e0e0": "#3a3a3a",
    "polyline #555555": "#aaaaaa",
    "text #555555": "#aaaaaa",
    "polyline #c0392b": "#ff6f61",
    "text #c0392b": "#ff6f61",
}
"""Element and colour -> the colour it has where the reader prefers dark pages."""


class Drawing:
    """A picture of ``width`` x ``height``, for light and dark pages. What is drawn later lies above."""

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

    def circle(self, x: float, y: float, radius: float, *, fill: str) -> None:
        """A disc."""
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{fill}"/>')

    def _style(self) -> str:
        """The dark colours: rules for attributes, which win over the attributes."""
        rules = []
        for what, color in DARK.items():
            element, light = what.split()
            name = "stroke" if element == "polyline" else "fill"
            rules.append(f'{element}[{name}="{light}"]{{{name}:{color}}}')
        return f"<style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"

    def write(self, path: Path) -> None:
        """The file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:.0f} {self.height:.0f}" '
            'font-family="system-ui, sans-serif">'
        )
        path.write_text("\n".join([head, self._style(), *self._parts, "</svg>"]) + "\n")
