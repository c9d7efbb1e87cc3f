"""A recorded landscape: a finite space of programs, each measured once, and searches replayed on the record."""
