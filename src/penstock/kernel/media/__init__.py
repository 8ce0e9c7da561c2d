"""Media in prompts: what a file is by its first bytes, and how many tokens stand for it."""
