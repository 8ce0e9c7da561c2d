"""Deployment plans: candidates for a model, GPUs, an SLO and traffic, verified in simulation."""
