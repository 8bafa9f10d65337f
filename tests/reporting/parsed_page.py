"""An HTML page as a tree, parsed strictly: every element is closed where it must be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta", "link", "br"}


@dataclass
class Element:
    """An element, its attributes, and what is in it."""

    tag: str
    attributes: dict[str, str]
    inside: list[Element | str] = field(default_factory=list)

    def all(self, tag: str = "", **attributes: str) -> Iterator[Element]:
        """Yield every element inside with this tag and these attributes."""
        for each in self.inside:
            if isinstance(each, Element):
                if tag in {"", each.tag} and attributes.items() <= (
                    each.attributes.items()
                ):
                    yield each
                yield from each.all(tag, **attributes)

    def one(self, tag: str, **attributes: str) -> Element:
        (found,) = self.all(tag, **attributes)
        return found

    @property
    def text(self) -> str:
        return "".join(
            each if isinstance(each, str) else each.text for each in self.inside
        )


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        made = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].inside.append(made)
        if tag not in _VOID:
            self.open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        closed = self.open.pop()
        assert closed.tag == tag, f"</{tag}> closes <{closed.tag}>"

    def handle_data(self, data: str) -> None:
        self.open[-1].inside.append(data)


def parsed(page: str) -> Element:
    """Parse a page or a part of one."""
    parser = _Parser()
    parser.feed(page)
    parser.close()
    (root,) = parser.open
    return root
