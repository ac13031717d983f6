"""What a budget buys: which layers are recorded in which iteration, and what recording costs."""
