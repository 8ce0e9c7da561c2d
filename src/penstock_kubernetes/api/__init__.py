"""What all parts of ours that talk to a Kubernetes API server share: login, resources, a watch that resumes."""
