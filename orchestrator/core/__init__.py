"""Pure: ids, states, events, failure policy, scheduler. No I/O, no clock, no randomness."""
