"""KV events on their way to routers: feeds from the engines, the relay over NATS, its history in JetStream."""
