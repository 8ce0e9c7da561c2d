"""One request in the router: phases, eligibility, scheduling, queue, overload, hedging and stages."""
