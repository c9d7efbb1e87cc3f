"""Proposals waiting to be measured. Kept full, so that an engine never waits for an agent that is thinking."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from optimizer.agents.base import Agent, SearchView
from optimizer.board import SAID, Board
from optimizer.builder import content_hash, mechanism_hash
from optimizer.records import Candidate, Estimate, Experiment, Post, Proposal
from optimizer.thinking import Thinker

PER_AGENT = 2  # proposals that one agent may have waiting
NEWS = 8  # results after which an agent that had nothing to say is asked again; at once when the incumbent has changed
ROUNDS = 2  # of talk after a result: a question, and its answer
SELDOM = 6  # programs tuned for one of a new source that is not expected to beat the incumbent
REFUSALS = 3  # proposals in a row that the board may refuse before an agent is passed over this round


@dataclass(frozen=True, slots=True)
class Waiting:
    proposal: Proposal
    claim: Post
    source_hash: str


@dataclass
class ProposalQueue:
    """`on_proposal` records a proposal once it is claimed, before anyone else sees it.

    Quick agents are asked inline, in turn, so that a run can be repeated. Those that think (`Agent.thinks`) do so in threads
    of their own; what they come to is put in the queue when it is there.
    """

    agents: Sequence[Agent]
    board: Board
    on_proposal: Callable[[Proposal], None]
    waiting: list[Waiting] = field(default_factory=list)
    duplicates: int = 0
    _turn: int = 0
    _tuned: int = 0  # taken since the last that was of a source that had not been measured
    _lead: float = 1.0  # the incumbent's speed over the baseline
    _told: int = 0
    _measured: set[str] = field(default_factory=set)  # mechanisms of which a result was told
    _silent: dict[str, int] = field(
        default_factory=dict
    )  # agents that had nothing to say: asked again at so many results

    def __post_init__(self) -> None:
        self._news = threading.Event()
        self.thinkers = {a.name: Thinker(a, self._news) for a in self.agents if getattr(a, "thinks", False)}

    @property
    def thinking(self) -> bool:
        return any(thinker.busy for thinker in self.thinkers.values())

    def wait(self, limit_s: float) -> None:
        """Until a thinking agent has come to something, or the time is up."""
        self._news.wait(limit_s)
        self._news.clear()

    def told(self, candidate: Candidate, experiment: Experiment) -> None:
        """All agents hear of it; those that think do so between thoughts."""
        self._told += 1
        self._measured.add(candidate.source_hash)
        if experiment.leads:
            self._silent.clear()
            self._lead = experiment.ratio or 1.0
        for agent in self.agents:
            thinker = self.thinkers.get(agent.name)
            (thinker or agent).told(candidate, experiment)

    def talk(self, view: Callable[[], SearchView]) -> None:
        """Gives the floor to each agent in turn, again while something is said: who was asked answers at once.

        When something was said, all are asked for a proposal again.
        """
        speakers = [talk for agent in self.agents if (talk := getattr(agent, "talk", None)) is not None]
        for _ in range(ROUNDS if speakers else 0):
            said = len(self.board.read(*SAID))
            for talk in speakers:
                talk(view())
            if len(self.board.read(*SAID)) == said:
                return
            self._silent.clear()

    def restore(self, proposals: Iterable[Proposal]) -> None:
        """Proposals of an earlier attempt that were claimed and never measured: they go first."""
        for p in proposals:
            source = mechanism_hash(p)
            claim = Post(p.id, p.agent, "claim", p.name, data={"source_hash": source, "content_hash": content_hash(p)})
            self.waiting.append(Waiting(p, claim, source))

    def fill(self, view: Callable[[], SearchView]) -> None:
        """Asks each agent in turn until every one has its share waiting or nothing more to say."""
        for agent in self._in_turn():
            room = PER_AGENT - sum(w.proposal.agent == agent.name for w in self.waiting)
            if agent.name in self.thinkers:
                self._collect(self.thinkers[agent.name], room, view)
            elif room > 0 and self._told >= self._silent.get(agent.name, 0):
                self._ask(agent, room, view)

    def _ask(self, agent: Agent, room: int, view: Callable[[], SearchView]) -> None:
        refused = 0
        while room > 0 and refused < REFUSALS:
            proposal = agent.propose(view())
            if proposal is None:
                self._silent[agent.name] = self._told + (NEWS if self.waiting else 1)
                return
            if self.add(proposal):
                room -= 1
            else:
                refused += 1

    def _collect(self, thinker: Thinker, room: int, view: Callable[[], SearchView]) -> None:
        room -= sum(self.add(proposal) for proposal in thinker.collect())
        if room > 0 and not thinker.busy:
            thinker.think(view())

    def add(self, proposal: Proposal) -> bool:
        """False when the board refuses the claim: the program was tried, or someone else is at that mechanism.

        A mechanism that was measured may be tuned by several at once: each claims its own program.
        """
        source, content = mechanism_hash(proposal), content_hash(proposal)
        held = content if source in self._measured else source
        claim = self.board.claim(proposal.agent, held, content, proposal.name, reply_to=proposal.because)
        if claim is None:
            self.duplicates += 1
            return False
        self.on_proposal(proposal)
        self.waiting.append(Waiting(proposal, claim, source))
        return True

    def take(
        self,
        predict: Callable[[Proposal], Estimate],
        measured: Sequence[Proposal],
        tried: set[str],
        ready: Callable[[Proposal], bool] = lambda proposal: True,
    ) -> Waiting | None:
        """The proposal worth most: a focus or mechanism not yet measured first, then the best that may come of it.

        What is ready to be measured goes before what has to be compiled first: the engine does not wait for a compiler.

        Tuning what was measured takes turns with sources that were not: the best program's neighbours always promise
        most, and something better may lie elsewhere. Sources that cannot be expected to beat the incumbent come seldom.
        """
        if not self.waiting:
            return None
        foci = Counter(p.focus for p in measured)
        mechanisms = Counter(p.mechanism for p in measured)

        def worth(w: Waiting) -> tuple[bool, bool, bool, float]:
            new_ground = not foci[w.proposal.focus] or not mechanisms[w.proposal.mechanism]
            high = predict(w.proposal).high
            turn = w.source_hash not in tried and self._tuned >= (1 if high > self._lead else SELDOM)
            return ready(w.proposal), new_ground, turn, high

        best = max(self.waiting, key=worth)
        self.waiting.remove(best)
        self._tuned = self._tuned + 1 if best.source_hash in tried else 0
        return best

    def _in_turn(self) -> list[Agent]:
        """A new agent begins each round."""
        start = self._turn % len(self.agents) if self.agents else 0
        self._turn += 1
        return [*self.agents[start:], *self.agents[:start]]
