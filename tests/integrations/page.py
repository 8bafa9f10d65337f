"""The code blocks of docs/integrations.md, by section."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
SECTIONS = {
    match["title"]: match["code"]
    for match in re.finditer(
        r"^## (?P<title>[^\n]+)\n(?:(?!^## ).)*?```python\n(?P<code>.*?)```",
        PAGE.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
}
