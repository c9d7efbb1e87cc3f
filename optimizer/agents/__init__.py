"""Agents: each writes programs for one focus and learns from what is measured."""
