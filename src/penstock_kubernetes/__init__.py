"""Kubernetes companion: the operator, discovery and scaling over an API server, the end-point picker."""
