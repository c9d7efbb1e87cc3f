"""Proposals waiting to be measured. Kept full, so that an engine never waits for an agent that is thinking."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from optimizer.agents.base import Agent, SearchView
from optimizer.bandit import Bandit
from optimizer.board import SAID, Board
from optimizer.builder import content_hash, mechanism_hash
from optimizer.records import Candidate, Estimate, Experiment, Post, Proposal
from optimizer.thinking import Thinker

PER_AGENT = 2  # proposals that one agent may have waiting
NEWS = 8  # results after which an agent that had nothing to say is asked again; at once when the incumbent has changed
ROUNDS = 2  # of talk after a result: a question, and its answer
SELDOM = 6  # programs tuned for one of a new source that is not expected to beat the incumbent
PATIENCE = 3  # turns for each agent of the search, after which one whose proposals were passed over goes first
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
    bandit: Bandit = field(default_factory=Bandit)
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
    _passed: Counter[str] = field(default_factory=Counter)  # agent -> turns since something of it was taken

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
        """The next proposal: a focus or mechanism not yet measured first, then the best of the focus that the bandit chose.

        What is ready to be measured goes before what has to be compiled first: the engine does not wait for a compiler. An agent
        that was passed over for long goes before the bandit's choice, so that none is starved.

        Tuning what was measured takes turns with sources that were not: the best program's neighbours always promise
        most, and something better may lie elsewhere. Sources that cannot be expected to beat the incumbent come seldom.
        """
        pool = [w for w in self.waiting if ready(w.proposal)] or self.waiting
        if not pool:
            return None
        high = {w.proposal.id: predict(w.proposal).high for w in pool}
        foci = Counter(p.focus for p in measured)
        mechanisms = Counter(p.mechanism for p in measured)
        chosen = self.bandit.choose(_promises(pool, high))

        def worth(w: Waiting) -> tuple[bool, bool, bool, bool, float]:
            new_ground = not foci[w.proposal.focus] or not mechanisms[w.proposal.mechanism]
            first = new_ground, self._overdue(w), w.proposal.focus == chosen
            promised = high[w.proposal.id]
            turn = w.source_hash not in tried and self._tuned >= (1 if promised > self._lead else SELDOM)
            return *first, turn, promised

        best = max(pool, key=worth)
        self.waiting.remove(best)
        self._tuned = self._tuned + 1 if best.source_hash in tried else 0
        self._passed.update({w.proposal.agent for w in self.waiting})
        self._passed.pop(best.proposal.agent, None)
        return best

    def wanted(self, predict: Callable[[Proposal], Estimate]) -> list[Proposal]:
        """What waits, in the order in which it is worth compiling ahead."""

        def worth(w: Waiting) -> tuple[bool, float, float]:
            high = predict(w.proposal).high
            return self._overdue(w), self.bandit.expects(w.proposal.focus, high), high

        return [w.proposal for w in sorted(self.waiting, key=worth, reverse=True)]

    def _overdue(self, waiting: Waiting) -> bool:
        return self._passed[waiting.proposal.agent] >= PATIENCE * len(self.agents)

    def _in_turn(self) -> list[Agent]:
        """A new agent begins each round."""
        start = self._turn % len(self.agents) if self.agents else 0
        self._turn += 1
        return [*self.agents[start:], *self.agents[:start]]


def _promises(pool: Iterable[Waiting], high: Mapping[str, float]) -> dict[str, float]:
    """focus -> the highest speed over the baseline that what waits of it may have."""
    found: dict[str, float] = {}
    for w in pool:
        found[w.proposal.focus] = max(found.get(w.proposal.focus, 0.0), high[w.proposal.id])
    return found
