"""Tokens of an OIDC issuer, and its keys."""
