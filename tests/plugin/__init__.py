"""ColossalAI's Booster and its callers."""
