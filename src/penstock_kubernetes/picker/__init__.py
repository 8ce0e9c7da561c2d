"""Chooses the engine for gateways that others run: Envoy's external processor, nginx and HAProxy."""
