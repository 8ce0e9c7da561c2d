"""HTTP clients of engines: the hand-written HTTP/1.1 client of requests, and small GETs for descriptions."""
