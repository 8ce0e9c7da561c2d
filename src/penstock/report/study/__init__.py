"""Which way of scaling keeps the service level at the least GPU-hours? Policies beside each other in simulation."""
