"""Encoded media of several engines: the folder, and the connector that vLLM loads."""
