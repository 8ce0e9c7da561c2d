"""Commands of extras."""
