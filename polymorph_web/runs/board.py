"""A run's message board as people read it: threads by their latest post, filtered, a page at a time.

A thread is a post and all that was said in reply to it, at any depth. One that holds a post that matches is shown whole, since an
answer without its question says nothing. `static/js/board.js` matches posts that come live by the same rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple
from urllib.parse import urlencode

from polymorph_web.runs.models import Run
from polymorph_web.ui.words import POST_WORDS

PAGE = 40  # threads


@dataclass(frozen=True, slots=True)
class Filter:
    """What the address says: `kind` and `agent` exactly, every word of `q` in the text."""

    kind: str = ""
    agent: str = ""
    q: str = ""

    @classmethod
    def read(cls, query: Mapping[str, Any]) -> Filter:
        return cls(*(str(query.get(name, "")).strip() for name in ("kind", "agent", "q")))

    def takes(self, post: dict[str, Any]) -> bool:
        text = post["text"].lower()
        fits = (not self.kind or post["kind"] == self.kind) and (not self.agent or post["agent"] == self.agent)
        return fits and all(word in text for word in self.q.lower().split())

    @property
    def query(self) -> str:
        """As the end of an address, "" when nothing is filtered."""
        named = {name: value for name, value in asdict(self).items() if value}
        return f"?{urlencode(named)}" if named else ""


class Thread(NamedTuple):
    posts: list[dict[str, Any]]  # the first began it
    at: int  # number of its latest post on the board

    @property
    def last_id(self) -> str:
        return str(self.posts[-1]["id"])


@dataclass(frozen=True, slots=True)
class BoardPage:
    threads: list[Thread]  # oldest activity first
    earlier: str  # where the page before begins: the id of a post, "" when there is none
    shown: int  # threads that the filter takes, on all pages
    total: int
    whole: bool  # the latest page, as it stands when nobody asked for another
    chosen: Filter
    kinds: tuple[tuple[str, str], ...]  # key and word
    agents: list[str]


def board_page(run: Run, chosen: Filter, before: str = "", thread: str = "") -> BoardPage:
    """The latest threads, or those before post `before`, or the one that holds post `thread`."""
    posts = [r["payload"] for r in run.records.filter(kind="post").order_by("id").values("payload")]
    every = threads_of(posts)
    found = [t for t in every if any(chosen.takes(p) for p in t.posts)]
    number = next((i for i, p in enumerate(posts) if p["id"] == before), len(posts))
    older = [t for t in found if t.at < number]
    page = older[-PAGE:]
    if thread:
        page, older = [t for t in found if any(p["id"] == thread for p in t.posts)], []
    return BoardPage(
        threads=page,
        earlier=page[0].last_id if len(older) > len(page) else "",
        shown=len(found),
        total=len(every),
        whole=not before and not thread,
        chosen=chosen,
        kinds=tuple((key, word.word) for key, word in POST_WORDS.items()),
        agents=sorted({p["agent"] for p in posts}),
    )


def threads_of(posts: list[dict[str, Any]]) -> list[Thread]:
    """In the order of their latest posts. A reply to what is not there begins a thread of its own."""
    root: dict[str, str] = {}
    found: dict[str, Thread] = {}
    for number, post in enumerate(posts):
        first = root[post["id"]] = root.get(post["reply_to"], post["id"])
        held = found[first].posts if first in found else []
        found[first] = Thread([*held, post], number)
    return sorted(found.values(), key=lambda thread: thread.at)
