"""HTTP servers of the frontend: the hand-written HTTP/1.1 server, the aiohttp server, keys and the request guard."""
