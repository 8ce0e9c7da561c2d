"""The vocabulary that every room shares: machines, values, errors, hashing, settings."""
