"""Double of a kubelet: pods run as processes of this machine, each in a network of its own."""
