"""The Kubernetes API server's double: objects, watches, patches, discovery, access rules and faults over HTTP."""
