"""The operator: carries a PenstockCluster out as pods, services and secrets."""
