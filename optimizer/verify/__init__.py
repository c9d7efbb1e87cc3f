"""Is a finalist still the customer's model? Checks of contamination, quality and integrity, each with a planted fault.

    bench.py          one candidate in a fresh host, with content drawn from seeds that came after it was submitted
    contamination.py  step by step: poison, neighbours, block history, boundaries
    serving.py        through the scheduler: eviction, pre-emption, abort, shared prefixes, rejected drafts
    quality.py        teacher-forced against float32
    integrity.py      weights, inputs, the baseline's speed, proof of application
    faults.py         what each check must catch
    runner.py         all of them, in order, for one candidate

The checks are a gate, not a guarantee.
"""
