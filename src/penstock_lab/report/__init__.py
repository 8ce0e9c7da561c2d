"""Load generator, journal replay, simulation, and the reports that are drawn from run folders."""
