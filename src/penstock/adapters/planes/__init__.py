"""How our own processes talk: in process and over ZMQ."""
