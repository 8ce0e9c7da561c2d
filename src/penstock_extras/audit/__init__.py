"""Audit log of prompts and answers, encrypted at rest."""
