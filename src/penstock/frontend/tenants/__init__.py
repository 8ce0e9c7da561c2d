"""Tenants: who a key or a token belongs to, their limits, and their budgets."""
