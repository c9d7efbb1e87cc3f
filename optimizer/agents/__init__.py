"""Agents: each writes programs for one focus and learns from what is measured."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from optimizer.agents.attention import AttentionAgent
from optimizer.agents.base import Agent, Desk, Machine, SearchView, Tried
from optimizer.agents.cache import CacheAgent
from optimizer.agents.device import DeviceAgent
from optimizer.agents.evolution import EvolutionAgent
from optimizer.agents.fusion import FusionAgent
from optimizer.agents.projections import ProjectionsAgent
from optimizer.agents.scheduling import SchedulingAgent
from optimizer.config import FOCI

# in the order of what they usually bring: the first asked is the first measured
KINDS = (DeviceAgent, ProjectionsAgent, FusionAgent, AttentionAgent, CacheAgent, SchedulingAgent, EvolutionAgent)


def make_agents(seed: int = 0, foci: Collection[str] = (), llm: Mapping[str, Any] | None = None) -> list[Agent]:
    """An agent of each kind whose focus is in `foci` (empty: all), in the order in which to ask them.
    Evolution crosses foci, so it is there when all are.

    `llm` is `RunConfig.llm`: with a model in it, agents that ask that model come last. Raises ConfigError when the
    environment's settings for it cannot be used.
    """
    built_in: list[Agent] = [kind(seed) for kind in KINDS if not foci or kind.focus in foci]
    return [*built_in, *_language_models(llm, foci)] if llm else built_in


def _language_models(llm: Mapping[str, Any], foci: Collection[str]) -> list[Agent]:
    from optimizer.agents.llm.agent import make_llm_agents  # its client takes a second to load: only where it is used
    from optimizer.agents.llm.settings import LlmSettings, conceal_environment

    settings = LlmSettings.read(os.environ, llm)
    if settings and settings.key:
        conceal_environment()
    return list(make_llm_agents(settings, foci))


def seat(agents: Collection[Agent], desk: Desk) -> None:
    """Gives `desk` to the agents that ask for one."""
    for agent in agents:
        sit = getattr(agent, "sit", None)
        if sit is not None:
            sit(desk)


def limits(agents: Collection[Agent], view: SearchView) -> list[str]:
    """What cannot be tried on this machine and model, and why: one sentence each."""
    return [sentence for agent in agents for sentence in agent.limits(view)]


__all__ = ["FOCI", "KINDS", "Agent", "Desk", "Machine", "SearchView", "Tried", "limits", "make_agents", "seat"]
