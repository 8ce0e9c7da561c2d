"""penstock_kv.inside.weights NEEDS A SENTENCE."""
