"""How ranks talk to each other: groups, ways of bringing wires to others, and those who watch over them."""
