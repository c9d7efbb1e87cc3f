"""Operators with a torch reference each, the builder that compiles them by content hash, and measured machine ceilings."""
