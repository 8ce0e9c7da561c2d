"""Event planes: publish and subscribe between Penstock's own processes, over ZMQ or NATS."""
