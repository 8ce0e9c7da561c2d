"""What the lab reads and checks of a config: timing files, simulated engines, their tiers."""
