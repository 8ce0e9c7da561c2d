"""Fleet sizing: workload mix, attainment model, load correction, start-up times, and the cheapest fleet."""
