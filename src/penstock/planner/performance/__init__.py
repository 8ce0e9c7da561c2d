"""How long does an engine take? One Protocol, and models of it made from whatever is known of an engine."""
