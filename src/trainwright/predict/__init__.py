"""What a plan costs before it runs: time, memory, wire, money. No torch."""
