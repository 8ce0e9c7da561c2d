"""Doubles of the controllers of a cluster: clients of any API server, one file per kind of object."""
