"""The lab: the simulated engine, simulations on virtual time, traffic, measurements, plans and their pages.

The names below are what a program needs that simulates clusters; each is imported at its first use.
"""
