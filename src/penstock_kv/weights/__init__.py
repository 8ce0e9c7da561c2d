"""Weight processes: one per pool and machine, which serves a checkpoint to siblings and fetches it from them."""
