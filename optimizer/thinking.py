"""An agent that thinks long does so in a thread of its own, so that no engine waits for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from optimizer.agents.base import Agent, SearchView
from optimizer.records import Candidate, Experiment, Proposal


class Thinker:
    """One thought at a time. What is told meanwhile is heard before the next one begins. `news` is set when one has ended."""

    def __init__(self, agent: Agent, news: threading.Event) -> None:
        self.agent, self.news = agent, news
        self.failure = ""  # of the latest thought
        self._inbox: queue.SimpleQueue[tuple[Candidate, Experiment]] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[Proposal] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._heard = 0  # results told since it last had nothing to say
        self._silent = False

    @property
    def busy(self) -> bool:
        """Whether it thinks, or has come to something that was not collected yet."""
        return (self._thread is not None and self._thread.is_alive()) or not self._found.empty()

    def told(self, candidate: Candidate, experiment: Experiment) -> None:
        self._inbox.put((candidate, experiment))
        self._silent = False

    def think(self, view: SearchView) -> None:
        """Begins a thought about `view`. An agent that had nothing to say is asked again once it was told something."""
        if self._silent:
            return
        self._thread = threading.Thread(target=self._run, args=(view,), daemon=True, name=f"agent {self.agent.name}")
        self._thread.start()

    def collect(self) -> list[Proposal]:
        return list(_drained(self._found))

    def _run(self, view: SearchView) -> None:
        try:
            for candidate, experiment in _drained(self._inbox):
                self.agent.told(candidate, experiment)
            proposal = self.agent.propose(view)
            self.failure = ""
        except Exception as error:  # an agent's fault costs its thought, never the run
            proposal, self.failure = None, f"{type(error).__name__}: {error}"
        if proposal is None:
            self._silent = True
        else:
            self._found.put(proposal)
        self.news.set()


def _drained(source: queue.SimpleQueue[Any]) -> list[Any]:
    found = []
    take: Callable[[], Any] = source.get_nowait
    while True:
        try:
            found.append(take())
        except queue.Empty:
            return found
