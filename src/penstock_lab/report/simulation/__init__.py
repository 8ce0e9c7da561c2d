"""Command ``penstock simulate``: options, faults, runs and their outcome."""
