"""Fleet of one supervisor as a pure machine: which engines start, drain, flip, restart and end, and in which order."""
