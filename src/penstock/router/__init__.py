"""Which worker gets a request? Request life cycle, roster, index, cost, queue, active sequences."""
