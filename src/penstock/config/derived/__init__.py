"""Views derived from the settings structs: knob names, docs, JSON Schema and YAML."""
