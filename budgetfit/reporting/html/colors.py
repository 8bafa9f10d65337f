"""Colours of the report, light and dark: figures name them by CSS variables."""

from typing import Final

# Name -> light, dark. The light ones are all different: an SVG drawn with them is
# rewritten to the variables. Text has 4.5:1 and more on its background, marks have 3:1.
COLORS: Final = {
    "paper": ("#fdfdfc", "#16191d"),
    "panel": ("#f3f4f2", "#1f242a"),
    "line": ("#d6d9d5", "#3a424b"),
    "ink": ("#1c2126", "#e8ebee"),
    "soft-ink": ("#555f69", "#a9b3bd"),
    "accent": ("#00695f", "#4fd1bd"),
    "limit": ("#b3261e", "#ff8a80"),
    "parameters": ("#3566a8", "#7fb0f0"),
    "optimizer-state": ("#7b559f", "#c0a0e6"),
    "gradients": ("#b9541a", "#f2a368"),
    "activations": ("#17806a", "#5acbac"),
    "temporaries": ("#92700f", "#dcbb52"),
    "workspace": ("#6b6f2a", "#bcc070"),
    "buffers": ("#3f7f94", "#86c5da"),
    "batch": ("#a83f72", "#ea90bb"),
    "cached": ("#7d8791", "#8a95a0"),
    "context": ("#4a5560", "#b9c3cc"),
}
# What a treatment of a block is shown in.
TREATMENTS: Final = {
    "keep": "activations",
    "selective": "temporaries",
    "recompute": "gradients",
    "offload": "parameters",
}


def color(name: str) -> str:
    """Return the colour to draw with."""
    return COLORS[name][0]


def css_variables(*, dark: bool) -> str:
    """Return the declarations of all variables."""
    return "".join(f"--{name}:{pair[dark]};" for name, pair in COLORS.items())


def as_variables(svg: str) -> str:
    """Return SVG text whose colours are the variables.

    >>> as_variables('<path style="fill: #1c2126"/>')
    '<path style="fill: var(--ink)"/>'
    """
    for name, (light, _) in COLORS.items():
        svg = svg.replace(light, f"var(--{name})")
    return svg
