"""The paper's tables and figures as recipes: what each needs, how it is run, and the numbers it printed."""
