"""The board of a run as people read it: threads, filters in the address, pages, and who may read it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from optimizer.ledger import Ledger
from optimizer.records import Post
from polymorph_web.accounts.models import User
from polymorph_web.endpoints.models import Endpoint
from polymorph_web.runs.board import PAGE, Filter, threads_of
from polymorph_web.runs.models import Run
from tests.web import runs

As = Callable[[str], Client]
TALK = (
    Post("q1", "attention", "question", "fusion, is <paged> in yours?", at=1.0),
    Post("c1", "cache", "claim", "joint_kv", at=2.0),
    Post("a1", "fusion", "answer", "It has room for it.", reply_to="q1", at=3.0),
    Post("d1", "cache", "dead_end", "joint_kv failed: it crashed", reply_to="c1", at=4.0),
    Post("c2", "attention", "claim", "packed + paged", reply_to="a1", at=5.0),
)


@pytest.fixture
def ledger(endpoint: Endpoint, people: dict[str, User]) -> Ledger:
    """Of a run whose agents said TALK."""
    found, _, _ = runs.searched(runs.queued_run(endpoint, people["member"]))
    for post in TALK:
        found.post(post)
    return found


@pytest.fixture
def talked(ledger: Ledger) -> Run:
    return Run.objects.get(id=ledger.config.run_id)


def read(client: Client, run: Run, **query: str) -> list[str]:
    """Ids of the posts in the order shown."""
    response = client.get(reverse("run_board", args=[run.id]), query)
    assert response.status_code == 200
    return ids(response.content.decode())


def ids(html: str) -> list[str]:
    return re.findall(r'<article class="[^"]*" id="post-([^"]+)"', html)


def test_replies_stand_under_what_they_reply_to_and_the_latest_thread_last(talked: Run, as_: As) -> None:
    assert read(as_("viewer"), talked) == ["post1", "c1", "d1", "q1", "a1", "c2"]
    html = as_("viewer").get(reverse("run", args=[talked.id])).content.decode()
    assert ids(html.split("<template", 1)[0]) == ["post1", "c1", "d1", "q1", "a1", "c2"]
    assert html.count('<div class="thread">') == 3
    assert "is &lt;paged&gt; in yours?" in html and "<paged>" not in html


def test_a_post_says_who_when_and_what_with_an_icon_and_a_word(talked: Run, as_: As) -> None:
    html = as_("viewer").get(reverse("run_board", args=[talked.id])).content.decode()
    post = html.split('id="post-d1"')[1].split("</article>")[0]
    assert '<b data-f="agent">cache</b>' in post and "#x-circle" in post and "Dead end" in post
    assert 'datetime="1970-01-01T00:00:04+00:00"' in post and 'href="#post-d1"' in post
    assert "style=" not in html and "<script" not in html


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"kind": "question"}, ["q1", "a1", "c2"]),
        ({"kind": "dead_end"}, ["c1", "d1"]),
        ({"agent": "fusion"}, ["q1", "a1", "c2"]),
        ({"q": "CRASHED joint"}, ["c1", "d1"]),
        ({"kind": "answer", "agent": "fusion", "q": "room"}, ["q1", "a1", "c2"]),
        ({"kind": "answer", "agent": "cache"}, []),
        ({"q": "50% \\ ' <b>"}, []),
        ({"kind": "gossip"}, []),
    ],
)
def test_a_filter_shows_the_threads_that_hold_what_matches(
    query: dict[str, str], expected: list[str], talked: Run, as_: As
) -> None:
    assert read(as_("viewer"), talked, **query) == expected
    html = as_("viewer").get(reverse("run", args=[talked.id]), query).content.decode()
    assert ids(html.split("<template", 1)[0]) == expected, "a shared address shows the same"
    assert ("No post matches." in html) and ('id="board-empty" hidden' in html) == bool(expected)


def test_the_address_of_the_page_follows_the_filter(talked: Run, as_: As) -> None:
    get = as_("viewer").get
    url, page = reverse("run_board", args=[talked.id]), reverse("run", args=[talked.id])
    assert get(url, {"kind": "answer", "q": "a&b", "agent": ""})["HX-Replace-Url"] == f"{page}?kind=answer&q=a%26b"
    assert get(url)["HX-Replace-Url"] == page
    assert "HX-Replace-Url" not in get(url, {"thread": "a1"})
    html = get(page, {"kind": "answer", "q": '"x'}).content.decode()
    assert '<option value="answer" selected>' in html and 'value="&quot;x"' in html


def test_one_thread_is_found_by_any_of_its_posts(talked: Run, as_: As) -> None:
    assert read(as_("viewer"), talked, thread="a1") == ["q1", "a1", "c2"]
    assert read(as_("viewer"), talked, thread="a1", kind="dead_end") == []
    assert read(as_("viewer"), talked, thread="nobody") == []


def test_hundreds_of_posts_come_in_pages(ledger: Ledger, talked: Run, as_: As) -> None:
    for number in range(3 * PAGE):
        ledger.post(Post(f"n{number}", "cache", "insight", f"number {number}", at=float(number)))
    client, url = as_("viewer"), reverse("run_board", args=[talked.id])
    page, seen, pages = client.get(url).content.decode(), [], 1
    ledger.post(Post("n-late", "cache", "result", "it came", reply_to="n1"))  # an old thread goes on meanwhile
    while True:
        seen = ids(page) + seen
        found = re.search(r'hx-get="([^"]+)"', page)
        if not found:
            break
        page = client.get(found[1].replace("&amp;", "&")).content.decode()
        pages += 1
    assert pages == 4 and len(re.findall("post-", client.get(url).content.decode())) < 6 * PAGE
    expected = ["post1", "c1", "d1", "q1", "a1", "c2", *(f"n{i}" for i in range(3 * PAGE) if i != 1)]
    assert seen == expected, "no post twice; the thread that went on is on the first page"
    assert read(client, talked)[-2:] == ["n1", "n-late"]
    assert read(client, talked, q="number 7")[:1] == ["n7"], "a filter looks at all pages"


def test_the_page_does_not_carry_the_whole_board_in_its_state(talked: Run, as_: As) -> None:
    html = as_("viewer").get(reverse("run", args=[talked.id])).content.decode()
    assert html.count("It has room for it.") == 1


def test_staff_read_it_a_stranger_does_not(talked: Run, as_: As) -> None:
    url = reverse("run_board", args=[talked.id])
    assert "It has room for it." in as_("staff").get(url).content.decode()
    assert "It has room for it." in as_("staff").get(reverse("run", args=[talked.id])).content.decode()
    assert as_("stranger").get(url).status_code == 404


def test_a_run_that_said_nothing_says_so(endpoint: Endpoint, people: dict[str, User], as_: As) -> None:
    run = runs.queued_run(endpoint, people["member"])
    assert "No post yet" in as_("viewer").get(reverse("run", args=[run.id])).content.decode()
    ended = runs.failed(run)
    assert "Nothing was said in this run." in as_("viewer").get(reverse("run", args=[ended.id])).content.decode()


def test_a_reply_to_what_is_not_there_is_a_thread_of_its_own() -> None:
    def post(name: str, reply_to: str = "") -> dict[str, Any]:
        return {"id": name, "reply_to": reply_to, "kind": "answer", "agent": "a", "text": name}

    threads = threads_of([post("a", "gone"), post("b", "a"), post("c", "c"), post("d")])
    assert [[p["id"] for p in t.posts] for t in threads] == [["a", "b"], ["c"], ["d"]]


def test_words_are_looked_for_in_any_order_and_case() -> None:
    post = {"kind": "claim", "agent": "cache", "text": "Joint KV"}
    assert Filter(q=" kv  JOINT ").takes(post) and not Filter(q="joint kvs").takes(post)
    assert Filter.read({"q": " x ", "kind": "claim", "more": "y"}) == Filter("claim", "", "x")
