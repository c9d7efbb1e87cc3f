"""Measuring: tiers in the search host, load over HTTP, paired statistics, the final before/after."""
