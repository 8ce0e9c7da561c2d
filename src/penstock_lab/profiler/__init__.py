"""From a model and an SLO to a deployment: measures engines, plans deployments, tunes settings."""
