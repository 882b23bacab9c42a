"""Parts of pictures, as SVG that takes the colours of the page around it, in light and dark themes."""

from __future__ import annotations

from html import escape

LINE = 17
"""Distance of two lines of text."""

_STYLE = """
.wu text { font: 14px system-ui, sans-serif; fill: currentColor; }
.wu .title { font-weight: 600; }
.wu .small { font-size: 12.5px; }
.wu .middle { text-anchor: middle; }
.wu .box { fill: var(--color-background-secondary, none); stroke: currentColor; stroke-opacity: .45; }
.wu .group { fill: none; stroke: currentColor; stroke-opacity: .3; stroke-dasharray: 5 4; }
.wu .main { stroke: var(--color-brand-primary, #2a5adf); stroke-opacity: 1; stroke-width: 1.6; }
.wu .arrow { fill: none; stroke: currentColor; stroke-opacity: .75; stroke-width: 1.3; }
.wu .weights { stroke: var(--color-brand-primary, #2a5adf); stroke-opacity: 1; stroke-width: 2.6; }
.wu .answer { stroke-dasharray: 5 4; }
.wu .lane { stroke: currentColor; stroke-opacity: .3; }
.wu .back { fill: var(--color-background-primary, none); stroke: none; }
.wu .head { fill: currentColor; fill-opacity: .75; stroke: none; }
.wu .weights-head { fill: var(--color-brand-primary, #2a5adf); fill-opacity: 1; }
"""


class Drawing:
    """A picture that grows by its methods; ``svg()`` returns it."""

    def __init__(self, name: str, width: int, height: int, description: str) -> None:
        self._name, self._size, self._description = name, (width, height), description
        self._parts: list[str] = []

    def box(
        self, x: int, y: int, width: int, height: int, *lines: str, kind: str = "", title: bool = True
    ) -> None:
        """Draw a box with lines of text in its middle; the first is a title."""
        self._parts.append(
            f'<rect class="box {kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="7"/>'
        )
        top = y + height / 2 - (len(lines) - 1) * LINE / 2 + 5
        for number, line in enumerate(lines):
            style = "title middle" if title and not number else "small middle"
            self.text(x + width / 2, top + number * LINE, line, style)

    def group(self, x: int, y: int, width: int, height: int, title: str) -> None:
        """Draw a frame around other parts."""
        self._parts.append(f'<rect class="group" x="{x}" y="{y}" width="{width}" height="{height}" rx="11"/>')
        self.text(x + width / 2, y + 22, title, "title middle")

    def text(self, x: float, y: float, text: str, style: str = "small") -> None:
        """Write a line of text."""
        self._parts.append(f'<text class="{style}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def label(self, x: float, y: float, *lines: str) -> None:
        """Write lines of text around a point, on the colour of the page."""
        width = max(map(len, lines)) * 6.5 + 8
        top = y - len(lines) * LINE / 2
        self._parts.append(
            f'<rect class="back" x="{x - width / 2:g}" y="{top:g}" width="{width:g}" '
            f'height="{len(lines) * LINE}"/>'
        )
        for number, line in enumerate(lines):
            self.text(x, top + number * LINE + 13, line, "small middle")

    def arrow(self, *points: tuple[int, int], kind: str = "") -> None:
        """Draw an arrow along points; the kinds are "weights" and "answer"."""
        path = " L".join(f"{x} {y}" for x, y in points)
        head = "weights" if kind == "weights" else "head"
        self._parts.append(f'<path class="arrow {kind}" d="M{path}" marker-end="url(#{self._name}-{head})"/>')

    def line(self, x: int, top: int, bottom: int) -> None:
        """Draw the vertical line of a lane."""
        self._parts.append(f'<path class="lane" d="M{x} {top} V{bottom}"/>')

    def svg(self) -> str:
        """Return the picture as the text of a file."""
        width, height = self._size
        marker = (
            '<marker id="{}-{}" viewBox="0 0 10 10" refX="9" refY="5" markerUnits="userSpaceOnUse" '
            'markerWidth="10" markerHeight="10" orient="auto"><path class="head {}" d="M0 0 L10 5 L0 10z"/>'
            "</marker>"
        )
        heads = marker.format(self._name, "head", "") + marker.format(self._name, "weights", "weights-head")
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" class="wu" viewBox="0 0 {width} {height}" '
                f'role="img" aria-label="{escape(self._description)}">',
                f"<style>{_STYLE}</style>",
                f"<defs>{heads}</defs>",
                *self._parts,
                "</svg>\n",
            ]
        )
