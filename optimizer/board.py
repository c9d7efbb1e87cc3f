"""The message board that agents share: claims with an expiry, results, insights, dead ends, questions and answers.

Two agents never work on the same mechanism at once, and the very same program is never tried twice. Every post goes to
`on_post` (the run's store) before it is visible.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable

from optimizer.records import Candidate, Experiment, Post, State

CLAIM_TTL_S = 180.0
SAID = ("insight", "question", "answer")  # kinds that agents make of their own accord


class Board:
    def __init__(
        self,
        posts: Iterable[Post] = (),
        on_post: Callable[[Post], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._posts = list(posts)
        self._on_post, self._clock = on_post or (lambda post: None), clock
        self._claims: dict[str, Post] = {}  # mechanism (source hash) -> latest claim
        self._seen: set[str] = set()  # contents that were claimed, ever
        self._began: dict[
            tuple[str, str], str
        ] = {}  # agent and candidate's name -> the claim that its results reply to
        for post in self._posts:
            self._index(post)

    def claim(
        self,
        agent: str,
        source_hash: str,
        content_hash: str,
        text: str,
        ttl_s: float = CLAIM_TTL_S,
        reply_to: str = "",
    ) -> Post | None:
        """The claim, or None: the same content was proposed before, or another agent holds the mechanism just now.

        `reply_to` is the post that led to it.
        """
        held = self._claims.get(source_hash)
        if content_hash in self._seen or (held and held.agent != agent and held.expires > self._clock()):
            return None
        data = {"source_hash": source_hash, "content_hash": content_hash}
        return self.post(agent, "claim", text, "", reply_to, self._clock() + ttl_s, data)

    def release(self, claim: Post) -> None:
        """Ends a claim early; its content stays known."""
        held = self._claims.get(claim.data["source_hash"])
        if held is not None and held.id == claim.id:
            del self._claims[claim.data["source_hash"]]

    def result(self, agent: str, candidate: Candidate, experiment: Experiment) -> Post:
        """What came of a candidate: a `result`, or a `dead_end` that saves others the same mistake."""
        data = {"focus": candidate.focus, "mechanism": candidate.mechanism, "name": candidate.name}
        data |= {"tier": experiment.tier, "state": str(experiment.state), "ratio": experiment.ratio}
        data["source_hash"] = candidate.source_hash
        claim = self._began.get((agent, candidate.name), "")
        if experiment.state is State.FAILED:
            text = f"{candidate.name} failed: {experiment.failure}"
            return self.post(agent, "dead_end", text, candidate.artifact_hash, claim, data=data)
        low, high = experiment.ci_low or 0.0, experiment.ci_high or 0.0
        text = f"{candidate.name}: {experiment.ratio or 0.0:.2f}x ({low:.2f} to {high:.2f})"
        text += f" at tier {experiment.tier}, {experiment.state}"
        kind = "dead_end" if experiment.state is State.DISCARD else "result"
        return self.post(agent, kind, text, candidate.artifact_hash, claim, data=data)

    def repeat(self, agent: str, candidate: Candidate, experiment: Experiment, earlier: Candidate, whole: bool) -> Post:
        """Other text that does what an `earlier` candidate does: a dead end that names it, so that nobody tries it again.

        Where it is not `whole` the same, it is scheduled in another way: that is for the traffic to judge, and no dead end.
        """
        data = {"name": candidate.name, "source_hash": candidate.source_hash, "state": str(experiment.state)}
        data |= {"same_as": earlier.name, "same_as_hash": earlier.artifact_hash, "ratio": experiment.ratio}
        text = f"{candidate.name} does the same as {earlier.name}, which was measured: {experiment.ratio or 0.0:.2f}x. "
        text += "Nobody need try it again." if whole else "Only its scheduling differs, which the traffic judges."
        claim = self._began.get((agent, candidate.name), "")
        return self.post(agent, "dead_end" if whole else "result", text, candidate.artifact_hash, claim, data=data)

    def post(
        self,
        agent: str,
        kind: str,
        text: str,
        artifact_hash: str = "",
        reply_to: str = "",
        expires: float = 0.0,
        data: dict | None = None,
    ) -> Post:
        post = Post(
            secrets.token_hex(6), agent, kind, text, artifact_hash, reply_to, expires, self._clock(), data or {}
        )
        self._on_post(post)
        self._posts.append(post)
        self._index(post)
        return post

    def read(self, *kinds: str, agent: str = "", since: float = 0.0, limit: int = 0) -> list[Post]:
        """Live posts in the order they were made, the last `limit` of them when given."""
        now = self._clock()
        wanted = (p for p in self._posts if (not kinds or p.kind in kinds) and (not agent or p.agent == agent))
        found = [p for p in wanted if p.at >= since and (not p.expires or p.expires > now)]
        return found[-limit:] if limit else found

    def claimed(self) -> set[str]:
        """Mechanisms that somebody holds just now."""
        return {source for source, post in self._claims.items() if post.expires > self._clock()}

    def _index(self, post: Post) -> None:
        if post.kind == "claim" and post.data.get("source_hash"):
            self._claims[post.data["source_hash"]] = post
            self._seen.add(post.data["content_hash"])
            self._began[post.agent, post.text] = post.id
        elif post.kind in ("result", "dead_end"):
            self._claims.pop(post.data.get("source_hash", ""), None)
