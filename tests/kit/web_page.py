"""Reading an HTML page in tests: its elements with their text, and what must never be in a self-contained page."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"img", "meta", "link", "line", "path", "br", "input"}
LOADING = {"src", "href", "srcset", "poster", "data", "action", "xlink:href", "background"}


@dataclass
class Element:
    """One element: its tag, attributes, ancestors' tags and all text inside it."""

    tag: str
    attributes: dict[str, str]
    inside: list[str]
    text: str = ""


@dataclass
class Page(HTMLParser):
    """All elements of a page in order; `unbalanced` lists tags closed out of order."""

    source: str
    elements: list[Element] = field(default_factory=list)
    unbalanced: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[Element] = []
        self.feed(self.source)
        self.close()
        self.unbalanced += [element.tag for element in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {key: value or "" for key, value in attrs}, [e.tag for e in self.open])
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, {key: value or "" for key, value in attrs}, [e.tag for e in self.open]))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1].tag != tag:
            self.unbalanced.append(tag)
        else:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data

    def all(self, tag: str, class_: str | None = None) -> list[Element]:
        """Elements of a tag, of a class if one is given."""
        wanted = [e for e in self.elements if e.tag == tag]
        return [e for e in wanted if class_ is None or class_ in e.attributes.get("class", "").split()]

    @property
    def text(self) -> str:
        """Everything a person can read (folded parts too)."""
        return " ".join(self.all("body")[0].text.split())


def outside_references(page: Page) -> list[str]:
    """Whatever would make a browser load something beside the file itself."""
    found = []
    for element in page.elements:
        for key, value in element.attributes.items():
            if key in LOADING and not value.startswith(("data:", "#")):
                found.append(f"<{element.tag} {key}={value[:80]}>")
            if key.startswith("on"):
                found.append(f"<{element.tag} {key}>")
        if element.tag in ("iframe", "object", "embed", "base", "form"):
            found.append(f"<{element.tag}>")
    styles = " ".join(e.text for e in page.all("style"))
    return found + re.findall(r"@import.*|url\([^)]*\)", styles)
