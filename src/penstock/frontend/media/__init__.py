"""Media of prompts: fetched once, checked from their headers alone, and known by what they contain."""
