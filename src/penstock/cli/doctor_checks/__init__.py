"""Checks of ``penstock doctor``: this machine, the config, etcd and NATS, and the caches of engines."""
