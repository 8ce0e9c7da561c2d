"""Doubles of a Kubernetes API server and of a kubelet, for tests with real clients: what our objects need."""
