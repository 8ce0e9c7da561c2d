"""Node of one frontend: the live router machine, tickets, engine statistics and canaries."""
