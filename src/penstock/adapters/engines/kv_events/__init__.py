"""KV events of engines: the codec of their messages, the subscriber, and the simulated engine's publisher."""
