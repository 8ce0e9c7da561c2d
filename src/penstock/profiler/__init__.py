"""From a model and an SLO to a deployment: measures engines, plans a deployment, searches the design space, tunes settings."""
