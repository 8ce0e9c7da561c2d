"""Event planes: publish and subscribe between Penstock's own processes, in process, over ZMQ or over NATS."""
