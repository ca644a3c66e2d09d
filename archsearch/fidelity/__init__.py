"""How well a short look at a candidate ranks head maps as long training would."""
