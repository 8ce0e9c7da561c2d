"""KV that a simulated engine does not compute: from other engines, and from tiers below its memory."""
