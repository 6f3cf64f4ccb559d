"""Pure decisions: what the system looks like (snapshot), what it costs, and what to do next (plan)."""
