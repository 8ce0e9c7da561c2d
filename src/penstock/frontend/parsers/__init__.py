"""Parsers of a model's text: tool calls and reasoning, for engines that pass on what the model wrote."""
