"""KV between simulated engines: transfer parameters of requests, links with a bandwidth, hand-off."""
