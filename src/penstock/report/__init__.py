"""What did a run do? The load generator that makes one, and the page that is drawn from its folder."""
