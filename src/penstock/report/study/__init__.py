"""Study of scaling policies in simulation: which keeps the service level at the least GPU-hours."""
