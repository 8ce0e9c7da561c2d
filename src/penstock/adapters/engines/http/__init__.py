"""HTTP clients of engines: the hand-written HTTP/1.1 client, the aiohttp client, and small GETs for descriptions."""
