"""Commands of KV tiers and weights."""
