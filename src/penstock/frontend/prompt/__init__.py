"""Prompts: request body, routing hints, chat template, tokenizer and block hashing."""
