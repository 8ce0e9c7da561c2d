"""Settings of a whole cluster: declared once as structs, from which everything that a person types is derived."""
