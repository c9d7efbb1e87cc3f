"""Programs that agents write: the baseline's text with parts put in, and kernels with their parameters."""
