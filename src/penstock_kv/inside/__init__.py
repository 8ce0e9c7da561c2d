"""penstock_kv.inside NEEDS A SENTENCE."""
