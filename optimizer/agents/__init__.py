"""Agents: each writes programs for one focus and learns from what is measured."""

from __future__ import annotations

from collections.abc import Collection

from optimizer.agents.attention import AttentionAgent
from optimizer.agents.base import Agent, Machine, SearchView, Tried
from optimizer.agents.cache import CacheAgent
from optimizer.agents.device import DeviceAgent
from optimizer.agents.fusion import FusionAgent
from optimizer.agents.projections import ProjectionsAgent
from optimizer.agents.scheduling import SchedulingAgent
from optimizer.config import FOCI

# in the order of what they usually bring: the first asked is the first measured
KINDS = (DeviceAgent, ProjectionsAgent, FusionAgent, AttentionAgent, CacheAgent, SchedulingAgent)


def make_agents(seed: int = 0, foci: Collection[str] = ()) -> list[Agent]:
    """An agent of each kind whose focus is in `foci` (empty: all), in the order in which to ask them."""
    return [kind(seed) for kind in KINDS if not foci or kind.focus in foci]


def limits(agents: Collection[Agent], view: SearchView) -> list[str]:
    """What cannot be tried on this machine and model, and why: one sentence each."""
    return [sentence for agent in agents for sentence in agent.limits(view)]


__all__ = ["FOCI", "KINDS", "Agent", "Machine", "SearchView", "Tried", "limits", "make_agents"]
