"""Workers in the router, from joining to gone: roster, circuit breaker, active sequences and replica sync."""
