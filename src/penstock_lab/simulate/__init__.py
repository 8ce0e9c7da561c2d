"""A whole cluster on virtual time: the production router, simulated engines, traffic and faults; pure."""
