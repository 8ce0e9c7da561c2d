"""Trace formats: reads Mooncake, Azure, BurstGPT, Dynamo and ServeGen traces, and writes traces."""
