"""Commands of Kubernetes and of gateways."""
